"""Conversations: which tokens ask for the next reply, under any template. And log probabilities: the target's own."""

import re
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pearl import SamplingParams
from pearl.config import RequestOptions
from pearl.config.option_values import LEAST_LOGPROB
from pearl.engine import Engine
from pearl.errors import ConfigError, RequestError
from pearl.models.toy import alpha_pair
from pearl.protocol import messages as m
from pearl.text.conversation import Conversation
from pearl.text.stream import token_bytes
from tests.conftest import AS_PUBLISHED
from tests.tokenizers import Characters, Messages, byte_fallback, byte_level

SPECIAL = {"<s>": 0x10000, "<e>": 0x10001}  # <|im_start|>, <|im_end|>


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


def said(turns: Sequence[tuple[str, str]], last: str, system: str = "") -> Messages:
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": last}]


def talked(
    template: Callable[[Messages], str], turns: Sequence[tuple[str, str]], **options: str
) -> Conversation:
    conversation = Conversation(Characters(template), **options)  # type: ignore[arg-type]
    for turn in turns:
        conversation.add(*turn)
    return conversation


TURNS = [("How are you?", "Fine."), ("And you?", " I am well\n"), ("Bye", "TsadT Bye.")]
texts = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063"), max_size=8)


@given(st.lists(st.tuples(texts, texts), max_size=4), texts, texts)
def test_tokens_read_as_the_template_writes_them(
    turns: list[tuple[str, str]], last: str, system: str
) -> None:
    conversation = talked(chatml, turns, system=system)
    prompt = conversation.prompt(last)
    assert Characters(chatml).decode(prompt) == chatml(said(turns, last, system))


@pytest.mark.parametrize("template", [chatml, trimming, forgetting, numbered])
def test_a_template_that_rewrites_gets_its_way(template: Callable[[Messages], str]) -> None:
    conversation = talked(template, TURNS)
    prompt = conversation.prompt("?")
    assert Characters(None).decode(prompt) == template(said(TURNS, "?"))


def test_undo_goes_back_to_the_same_tokens() -> None:
    """So that another reply to the last message finds its prefix in the cache."""
    conversation = talked(chatml, TURNS)
    before = talked(chatml, TURNS[:2]).prompt(TURNS[2][0])
    turn = conversation.undo()
    assert turn.user == TURNS[2][0]
    assert conversation.prompt(turn.user) == before
    assert [conversation.undo() is None for _ in range(3)] == [False, False, True]


def test_raw_text_goes_on_where_it_ended() -> None:
    tokenizer = Characters(None)
    conversation = Conversation(tokenizer, raw=True)
    conversation.add("Once upon", " a time")
    conversation.add(" there", " was")
    assert tokenizer.decode(conversation.prompt(" a king")) == "^Once upon a time there was a king"
    assert conversation.make_room(" a king", 20) == 1
    assert tokenizer.decode(conversation.prompt(" a king")) == "^ there was a king"


def test_the_oldest_turns_make_room() -> None:
    conversation = talked(chatml, TURNS)
    whole = len(conversation.prompt("?"))
    assert conversation.make_room("?", whole) == 0
    with pytest.raises(RequestError, match="too many tokens"):
        conversation.make_room("?", 5)
    assert len(conversation.prompt("?")) == whole
    assert conversation.make_room("?", whole - 1) == 1
    assert Characters(None).decode(conversation.prompt("?")) == chatml(said(TURNS[1:], "?"))
    assert conversation.make_room("?", len(talked(chatml, []).prompt("?"))) == len(TURNS) - 1


def test_a_saved_conversation_goes_on() -> None:
    """Also one with tokens, which were kept once."""
    conversation = talked(chatml, TURNS, system="Be brief.")
    other = Conversation(Characters(chatml))
    other.load(conversation.saved("a"))
    assert other.system == "Be brief."
    assert other.prompt("?") == conversation.prompt("?")
    turn = '{"user": "Hi", "reply": "Yes", "finish_reason": "eos"}'
    other.load(f'{{"target": "a", "system": "", "turns": [{turn}], "tokens": [-5]}}')
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
    ],
)
def test_what_is_no_conversation_is_refused_and_changes_nothing(text: str, where: str) -> None:
    conversation = talked(chatml, TURNS)
    before = conversation.prompt("?")
    with pytest.raises(RequestError, match=f"no saved conversation: {where}"):
        conversation.load(text)
    assert conversation.prompt("?") == before


PROMPT = [1, 2, 3]
WAYS = {
    "ar": RequestOptions(method="ar"),
    "ngram": RequestOptions(method="ngram"),
    "sd": RequestOptions(method="sd", gamma=3),
    "published": AS_PUBLISHED,
    "coupled": AS_PUBLISHED.changed(rule="coupled"),
    "pearl": RequestOptions(method="pearl", rule="coupled"),
    "auto": RequestOptions(method="auto"),
}


def rows(tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """The target's log probabilities at the place of each."""
    target, _ = alpha_pair(32, 0.5)
    for count in range(len(tokens)):
        yield target([*PROMPT, *tokens[:count]]).double().log().clamp(min=LEAST_LOGPROB)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_the_targets_own(toy: Engine, way: str, temperature: float) -> None:
    """At temperature 1 and unfiltered, however the text was drawn and whoever proposed it."""
    params = SamplingParams(
        temperature=temperature, top_k=9, seed=4, max_tokens=60, ignore_eos=True, logprobs=3
    )
    with toy.stream(PROMPT, params.overridden_by(WAYS[way])) as stream:
        pieces = list(stream)
    result = stream.result
    assert [one for piece in pieces for one in piece.details] == result.logprobs
    assert all(len(piece.details) == len(piece.tokens) for piece in pieces)
    assert len(result.logprobs) == len(result.tokens) == 60
    for token, told, row in zip(result.tokens, result.logprobs, rows(result.tokens), strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(3)
        assert [id for id, _ in told.top] == ids.tolist()
        assert [value for _, value in told.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_penalties_and_biases_are_not_in_them(toy: Engine) -> None:
    asked = SamplingParams(temperature=1, seed=2, max_tokens=40, ignore_eos=True, logprobs=0)
    shaped = asked.changed(presence_penalty=2.0, logit_bias=((4, 5.0),))
    (result,) = toy.generate([PROMPT], shaped.overridden_by(WAYS["pearl"]))
    assert result.tokens != toy.generate([PROMPT], asked.overridden_by(WAYS["pearl"]))[0].tokens
    for token, told, row in zip(result.tokens, result.logprobs, rows(result.tokens), strict=True):
        assert told == m.TokenDetails(pytest.approx(float(row[token]), abs=1e-4))


def test_they_are_told_only_where_asked_for_and_up_to_the_end(toy: Engine) -> None:
    """One for each token of a text that an EOS or a stop string ends."""
    assert toy.generate([PROMPT], SamplingParams(max_tokens=5))[0].logprobs == []
    (whole,) = toy.generate(
        [PROMPT], SamplingParams(temperature=1, seed=3, max_tokens=200, logprobs=1)
    )
    assert whole.finish_reason == "eos"
    assert len(whole.logprobs) == len(whole.tokens)
    stop = whole.text[2:4]
    (cut,) = toy.generate(
        [PROMPT], SamplingParams(temperature=1, seed=3, max_tokens=200, logprobs=1, stop=stop)
    )
    assert cut.finish_reason == "stop"
    assert cut.logprobs == whole.logprobs[: len(cut.tokens)]
    with pytest.raises(ConfigError, match="logprobs"):
        SamplingParams(logprobs=21)


# ---- as OpenAI's clients read them; see test_server too ----


def test_a_token_is_its_bytes() -> None:
    """A part of a character too; they join to the text."""
    text = "Grüße, 你好 👍🏽 x"
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, special=False)
        assert (
            b"".join(token_bytes(tokenizer, id) for id in ids).decode().strip()
            == tokenizer.decode(ids).strip()
        )
    assert token_bytes(byte_level(), 10**6) == b""
    assert LEAST_LOGPROB == -9999.0, "of an impossible token: JSON has no infinity"
