"""The reasoning of thinking models apart from their answers: as text, in a conversation and in the server's answers."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pearl.cli import generate
from pearl.cli.chat import ChatSession
from pearl.cli.console import SafeConsole
from pearl.cli.reply import MarkdownReply
from pearl.config import RequestOptions, SamplingParams, Settings
from pearl.protocol.messages import Provenance
from pearl.text import reasoning
from pearl.text.chat_template import render
from pearl.text.conversation import Conversation
from pearl.text.reasoning import TAGS, Splitter, Tags, split, splitter_of, tags_of
from tests.served import Served, message
from tests.tokenizers import Characters

THINK = TAGS["think"]
HARMONY = TAGS["harmony"]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nOne.\n\nTwo.\n</think>\n\nThree.", False, ("One.\n\nTwo.", "Three.")),
        ("\n<think>One.</think>Two.", False, ("One.", "Two.")),
        (
            "One.\n</think>\n\nTwo. </think>",
            True,
            ("One.", "Two. </think>"),
        ),  # the prompt has the opening tag
        ("<think>One.</think> Two.", True, ("One.", "Two.")),  # both have it
        ("<think>\n\n</think>\n\nTwo.", False, ("", "Two.")),
        ("<think>One. </thi", False, ("One. </thi", "")),  # cut
        ("One. ", True, ("One. ", "")),
        (" Two. <think>no</think>", False, ("", " Two. <think>no</think>")),
        ("<thin", False, ("", "<thin")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_answer(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split(text, THINK, is_open) == expected


def test_channels_whose_special_tokens_have_no_text() -> None:
    assert split("analysisThey greet.assistantfinalHello!", HARMONY) == ("They greet.", "Hello!")
    assert split("finalHello! finally", HARMONY) == ("", "Hello! finally")
    assert split("They greet.assistantfinalHello!", HARMONY, is_open=True) == (
        "They greet.",
        "Hello!",
    )
    assert split("fin", HARMONY) == ("", "fin")
    called = "to=functions.f json{}"
    assert split("analysisLook.assistantcommentary " + called, HARMONY) == ("Look.", called)
    assert split("commentary " + called, HARMONY) == ("", called)
    splitter = Splitter(HARMONY)
    assert [splitter.feed(piece) for piece in ("fi", "nal", "Hi", " final")] == [("", "")] * 2 + [
        ("", "Hi"),
        ("", " final"),
    ]


PARTS = st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "a", "think"])


@given(st.lists(PARTS, max_size=12).map("".join), st.booleans(), st.data())
def test_pieces_of_any_size_add_up_to_the_whole(
    text: str, is_open: bool, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    splitter = Splitter(THINK, is_open)
    given = [splitter.feed(piece) for piece in pieces] + [splitter.feed("", is_last=True)]
    assert tuple("".join(side) for side in zip(*given, strict=True)) == split(text, THINK, is_open)


def test_text_is_given_out_once_it_cannot_be_a_tag() -> None:
    splitter = Splitter(THINK)
    given = [
        splitter.feed(piece)
        for piece in ("<thi", "nk>\n", "a b", " c </", "em>", "</think>", "\n", "d ", "e")
    ]
    assert given == [
        *[("", "")] * 2,
        ("a b", ""),
        (" c", ""),
        (" </em>", ""),
        *[("", "")] * 2,
        ("", "d "),
        ("", "e"),
    ]


@pytest.mark.parametrize("begun", ["<think>", "<think></think>", ""])
def test_no_piece_costs_more_in_a_longer_text(begun: str) -> None:
    """What was given out is not looked at again."""
    splitter = Splitter(THINK)
    splitter.feed(begun)
    for _ in range(100):
        splitter.feed("word </th")
        assert sum(len(value) for value in vars(splitter).values() if isinstance(value, str)) < 30


def test_templates_say_which_models_think() -> None:
    assert tags_of("{{ content.split('</think>')[-1] }}") == THINK
    assert tags_of("{{ '<|channel|>analysis<|message|>' + thinking }}") == HARMONY
    assert tags_of("{{ content }}") is None


# ---- conversations ----

# As Qwen3's: the reasoning of earlier turns is left out; as DeepSeek-R1's and QwQ's, the prompt may open the next.
QWEN3 = (
    "{% for m in messages %}{{ '<s>' + m.role + '\\n' }}"
    "{% if m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') + '<e>\\n' }}{% endfor %}{{ '<s>assistant\\n' }}"
)
KEEPING = QWEN3.replace(" and loop.last", "")  # a template that keeps what was thought


def opens(text: str) -> str:
    return f"{{{{ {text!r} }}}}"


THOUGHT, ANSWER = "What do they want?", "Hello!"
REPLY = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"


class Thinking(Characters):
    def __init__(self, template: str) -> None:
        super().__init__(lambda messages: render(template, None, {}, messages))
        self.chat_template = template


def prompt_after(template: str, reply: str) -> str:
    tokenizer = Thinking(template)
    conversation = Conversation(tokenizer)
    conversation.add("Hi", reply)
    return tokenizer.decode(conversation.prompt("Bye"))


@pytest.mark.parametrize("opening", ["", "<think>\n"])
def test_the_reasoning_of_earlier_turns_is_not_sent_back(opening: str) -> None:
    prompt = prompt_after(QWEN3 + opens(opening), REPLY.removeprefix(opening))
    assert (
        prompt
        == f"<s>user\nHi<e>\n<s>assistant\n{ANSWER}<e>\n<s>user\nBye<e>\n<s>assistant\n{opening}"
    )


@pytest.mark.parametrize("cut", [f"<think>\n{THOUGHT}", THOUGHT])
def test_a_reply_that_was_cut_while_it_thought_has_no_answer(cut: str) -> None:
    opening = "" if cut.startswith("<think>") else "<think>\n"
    assert THOUGHT not in prompt_after(QWEN3 + opens(opening), cut)


def test_a_template_that_keeps_the_reasoning_sends_it_back() -> None:
    tokenizer = Thinking(KEEPING)
    conversation = Conversation(tokenizer)
    before = conversation.prompt("Hi")
    conversation.add("Hi", REPLY)
    written = [*before, *tokenizer.encode(REPLY, special=False)]
    assert conversation.prompt("Bye")[: len(written)] == written, (
        "and what was generated is in the cache"
    )


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    for opening, is_open in (("", False), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)):
        tokenizer = Thinking(QWEN3 + opens(opening))
        splitter = splitter_of(tokenizer, tokenizer.apply_chat([message("Hi")]) or [])
        assert splitter.is_open == is_open
    assert splitter_of(Thinking("{{ messages[0].content }}"), [ord("x")]) is None


# ---- displays ----


def test_reasoning_is_dimmed_and_the_answer_is_not() -> None:
    file = StringIO()
    reply = MarkdownReply(
        Console(file=file, force_terminal=True, width=80, height=20), Splitter(THINK)
    )
    for piece in re.findall("(?s)..?", "<think>\n*One*\nTwo\n</think>\n\nThree *four*"):
        reply.add((piece,), (Provenance.DIRECT,))
    reply.finish()
    shown = file.getvalue()
    assert "\x1b[2;3m*One*" in shown  # dim italic, and not taken for Markdown
    assert "\x1b[2;3mTwo" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"Two\s*\n\s*\n\s*Three four\s*$", plain)
    assert "think>" not in plain


def test_generate_prints_the_answer_and_shows_the_reasoning(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To standard output the first; in --json both have a field."""
    engine = served.service.engine
    settings = Settings(engine.config, RequestOptions())
    text = engine.generate("123", SamplingParams(max_tokens=40, ignore_eos=True))[0].text
    tags = Tags(text[:2], text[10:12])
    wanted = split(text, tags)
    assert all(wanted)
    params, splitter = SamplingParams(max_tokens=40, ignore_eos=True), Splitter(tags)
    with engine.stream("123", params) as stream:
        generate._print_as_it_comes(stream, splitter, SafeConsole(stderr=True))
    shown = capsys.readouterr()
    assert shown.out == wanted[1] + "\n"
    assert shown.err.strip() == wanted[0]
    document = generate._document(settings, engine, stream.result, splitter)
    assert (document["reasoning"], document["text"]) == wanted
    document = generate._document(settings, engine, stream.result, None)
    assert (document["reasoning"], document["text"]) == (None, text)


# ---- the server ----


def test_through_a_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a toy, whose tags are characters that it writes."""
    path, tokenizer = "chat/completions", served.service.engine.tokenizer
    (choice,) = served.post(path, max_tokens=60, ignore_eos=True).json()["choices"]
    text = choice["message"]["content"]
    tags = Tags(text[:2], text[10:12])
    monkeypatch.setattr(tokenizer, "chat_template", "it thinks")
    monkeypatch.setattr(reasoning, "TAGS", {"test": replace(tags, marks=("it thinks",))})
    for most in (60, 11):  # the second ends in half of a tag
        (choice,) = served.post(path, max_tokens=most, ignore_eos=True).json()["choices"]
        found = choice["message"].get("reasoning_content", ""), choice["message"]["content"]
        assert found == split(text[:most], tags)
        _, *deltas, last = [
            one["choices"][0]["delta"]
            for one in served.events(path, max_tokens=most, ignore_eos=True)
        ]
        assert all(deltas), "a chunk has something to say"
        names = "reasoning_content", "content"
        assert found == tuple(
            "".join(one.get(name, "") for one in (*deltas, last)) for name in names
        )
    with served.writing("[0-9]{20}"):
        (choice,) = served.post(path, max_tokens=60).json()["choices"]
    assert "reasoning_content" not in choice["message"], "a grammar has no tags"


def test_plain_text_has_the_opening_tag_that_the_prompt_has(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = served.service.engine
    conversation = Conversation(engine.tokenizer)
    tags = Tags(engine.tokenizer.decode(conversation.prompt("123")[-2:]), "~")
    monkeypatch.setattr(engine.tokenizer, "chat_template", "it thinks")
    monkeypatch.setattr(reasoning, "TAGS", {"test": replace(tags, marks=("it thinks",))})
    chat = ChatSession(
        engine, SamplingParams(max_tokens=8), conversation, console=Console(file=StringIO())
    )
    text = chat.answer("123").text
    assert capsys.readouterr().out == f"{tags.start}\n{text}\n"
