"""Conversations: which tokens ask for the next reply, under templates that keep what went before and that do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.engine.conversation import Conversation
from pearl.errors import RequestError

Messages = list[dict[str, str]]
START, END, OTHER_END = 0x10000, 0x10001, 0x10002  # <|im_start|>, <|im_end|>, <|endoftext|>
SPECIAL = {"<s>": START, "<e>": END, "<o>": OTHER_END}
NAMES = {id: name for name, id in SPECIAL.items()}


def chatml(messages: Messages) -> str:
    """As SmolLM2's and Qwen's: nothing changes what stands before."""
    return "".join(f"<s>{m['role']}\n{m['content']}<e>\n" for m in messages) + "<s>assistant\n"


def trimming(messages: Messages) -> str:
    """As Llama 3's, which trims every message."""
    return chatml([{**m, "content": m["content"].strip()} for m in messages])


def forgetting(messages: Messages) -> str:
    """As those of models that think: what they thought before is taken out of older replies."""
    thoughtless = [{**m, "content": re.sub("T.*T", "", m["content"])} for m in messages[:-1]]
    return chatml([*thoughtless, messages[-1]])


def numbered(messages: Messages) -> str:
    """Says at the head how long the conversation is, so that every turn changes everything."""
    return f"{len(messages)}:" + chatml(messages)


class Characters:
    """A token a character, and three special ones."""

    vocab_size = 1 << 17

    def __init__(self, template: Callable[[Messages], str] | None) -> None:
        self._template = template

    def encode(self, text: str, special: bool = True) -> list[int]:
        parts = re.split("(<s>|<e>|<o>)", text)
        ids = [[SPECIAL[part]] if part in SPECIAL else [ord(c) for c in part] for part in parts]
        return [ord("^")] * special + list(chain.from_iterable(ids))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(NAMES.get(id) or chr(id) for id in ids)

    def chat_text(self, messages: Messages) -> str | None:
        return self._template(messages) if self._template else None

    def apply_chat(self, messages: Messages) -> list[int] | None:
        text = self.chat_text(messages)
        return None if text is None else self.encode(text, special=False)

    def token(self, id: int) -> str | None:
        return chr(id)


def said(turns: Sequence[tuple[str, str]], last: str, system: str = "") -> Messages:
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": last}]


def talked(template: Callable[[Messages], str], turns: Sequence[tuple[str, str]], **options: str) -> Conversation:
    """Each reply generated as its characters, and an end of turn."""
    tokenizer = Characters(template)
    conversation = Conversation(tokenizer, **options)  # type: ignore[arg-type]
    for user, reply in turns:
        tokens = [*tokenizer.encode(reply, special=False), END]
        conversation.add(user, conversation.prompt(user), reply, tokens, "eos")
    return conversation


TURNS = [("How are you?", "Fine."), ("And you?", " I am well\n"), ("Bye", "TsadT Bye.")]
texts = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063"), max_size=8)


@given(st.lists(st.tuples(texts, texts), max_size=4), texts, texts)
def test_tokens_read_as_the_template_writes_them(turns: list[tuple[str, str]], last: str, system: str) -> None:
    conversation = talked(chatml, turns, system=system)
    prompt = conversation.prompt(last)
    assert Characters(chatml).decode(prompt) == chatml(said(turns, last, system))


@pytest.mark.parametrize("template", [chatml, trimming])
def test_what_went_before_stays_as_generated(template: Callable[[Messages], str]) -> None:
    """Token for token, so that its KV is still good, even where the template would trim what the model wrote."""
    conversation = talked(template, TURNS[:2])
    generated = conversation._tokens
    prompt = conversation.prompt("Bye")
    assert prompt[: len(generated)] == generated
    assert Characters(None).decode(prompt[len(generated) :]) == "\n<s>user\nBye<e>\n<s>assistant\n"


def test_tokens_that_encode_otherwise_stay_too() -> None:
    """A model may write what its tokenizer would split in another way."""
    conversation = Conversation(Characters(chatml))
    asked = conversation.prompt("Hi")
    strange = [ord("a"), 0x301, END]
    conversation.add("Hi", asked, "\u00e1", strange, "eos")
    assert conversation.prompt("?")[: len(asked) + 3] == [*asked, *strange]


@pytest.mark.parametrize("template", [forgetting, numbered])
def test_a_template_that_rewrites_gets_its_way(template: Callable[[Messages], str]) -> None:
    conversation = talked(template, TURNS)
    prompt = conversation.prompt("?")
    assert Characters(None).decode(prompt) == template(said(TURNS, "?"))


def test_replies_that_end_in_another_way_are_closed_as_the_template_does() -> None:
    """A reply that was cut, or with an end of text that the template does not write."""
    tokenizer = Characters(chatml)
    for reason, ending in (("length", []), ("cancelled", []), ("stop", []), ("eos", [OTHER_END])):
        conversation = Conversation(tokenizer)
        reply = [*tokenizer.encode("Hel", special=False), *ending]
        conversation.add("Hi", conversation.prompt("Hi"), "Hel", reply, reason)
        assert tokenizer.decode(conversation.prompt("?")) == chatml(said([("Hi", "Hel")], "?"))


def test_undo_goes_back_to_the_same_tokens() -> None:
    """So that another reply to the last message finds its prefix in the cache."""
    conversation = talked(chatml, TURNS)
    before = talked(chatml, TURNS[:2]).prompt(TURNS[2][0])
    turn = conversation.undo()
    assert turn is not None
    assert turn.user == TURNS[2][0]
    assert conversation.prompt(turn.user) == before
    assert [conversation.undo() is None for _ in range(3)] == [False, False, True]


def test_a_system_prompt_changes_everything_from_the_start() -> None:
    conversation = talked(chatml, TURNS)
    conversation.system = "Be brief."
    assert Characters(None).decode(conversation.prompt("?")) == chatml(said(TURNS, "?", "Be brief."))
    conversation.undo()
    assert Characters(None).decode(conversation.prompt("?")) == chatml(said(TURNS[:2], "?", "Be brief."))


def test_no_template_is_said_with_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*--raw"):
        Conversation(Characters(None)).prompt("Hi")


def test_raw_text_goes_on_where_it_ended() -> None:
    tokenizer = Characters(None)
    conversation = Conversation(tokenizer, raw=True)
    for message, reply in (("Once upon", " a time"), (" there", " was")):
        tokens = [*tokenizer.encode(reply, special=False), END]
        conversation.add(message, conversation.prompt(message), reply, tokens, "eos")
    assert tokenizer.decode(conversation.prompt(" a king")) == "^Once upon a time there was a king"
    conversation.forget_oldest(1)
    assert tokenizer.decode(conversation.prompt(" a king")) == "^ there was a king"


def test_the_oldest_turns_make_room() -> None:
    conversation = talked(chatml, TURNS)
    whole = len(conversation.prompt("?"))
    assert conversation.turns_to_forget(whole, "?") == 0
    assert conversation.turns_to_forget(whole - 1, "?") == 1
    assert conversation.turns_to_forget(len(talked(chatml, []).prompt("?")), "?") == 3
    assert conversation.turns_to_forget(5, "?") is None
    conversation.forget_oldest(2)
    assert Characters(None).decode(conversation.prompt("?")) == chatml(said(TURNS[2:], "?"))


def test_a_saved_conversation_goes_on_with_the_same_tokens() -> None:
    """With another model, or with tokens that the model has not, it is rendered again."""
    conversation = talked(chatml, TURNS, system="Be brief.")
    other = Conversation(Characters(chatml))
    other.load(conversation.saved("a"), "a")
    assert other.system == "Be brief."
    assert other.prompt("?") == conversation.prompt("?")
    other.undo()
    assert Characters(None).decode(other.prompt("?")) == chatml(said(TURNS[:2], "?", "Be brief."))
    strange = Conversation(Characters(chatml))
    strange.add("Hi", strange.prompt("Hi"), "Yes", [5, 6, 7], "length")
    other.load(strange.saved("a"), "b")
    assert Characters(None).decode(other.prompt("?")) == chatml(said([("Hi", "Yes")], "?"))
    turn = '{"user": "Hi", "reply": "Yes", "finish_reason": "eos"}'
    other.load(f'{{"target": "a", "system": "", "turns": [{turn}], "tokens": [-5]}}', "a")
    assert Characters(None).decode(other.prompt("?")) == chatml(said([("Hi", "Yes")], "?"))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "file"),
        ("hello", "file"),
        ("[]", "file"),
        ("{}", "target"),
        ('{"pearl_chat": 2, "target": "a", "system": "", "turns": [], "tokens": []}', "pearl_chat"),
        ('{"target": "a", "system": "", "turns": [{"user": 1}], "tokens": []}', r"turns\.0"),
        ('{"target": "a", "system": "", "turns": [], "tokens": ["x"]}', r"tokens\.0"),
    ],
)
def test_what_is_no_conversation_is_refused_and_changes_nothing(text: str, where: str) -> None:
    conversation = talked(chatml, TURNS)
    before = conversation.prompt("?")
    with pytest.raises(RequestError, match=f"no saved conversation: {where}"):
        conversation.load(text, "a")
    assert conversation.prompt("?") == before
