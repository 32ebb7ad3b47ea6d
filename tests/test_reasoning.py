"""The reasoning of thinking models apart from their answers: as text, in a conversation and in the server's answers."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pearl.cli import generate
from pearl.cli.chat import ChatSession
from pearl.cli.reply import MarkdownReply
from pearl.config import SamplingParams
from pearl.engine.request import Chat, encode
from pearl.errors import ConfigError
from pearl.protocol.messages import Provenance
from pearl.text import reasoning
from pearl.text.chat_template import chat_prompt, render
from pearl.text.conversation import Conversation
from pearl.text.reasoning import (
    TAGS,
    check_tags,
    is_open_after,
    tag_pair,
    tags_for,
    tags_of,
    warn_of_unknown_tags,
)
from pearl.text.reply import Delta, parser_of, reasoning_parser, split
from pearl.text.tools import FORMATS
from tests.conftest import TOY, ran
from tests.replies import HARMONY_TEXTS, OTHER_TAGS
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


CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "a", "think", CALL),
        *(
            "<tool_call>",
            '{"name": "add"',
            ', "arguments": ',
            '{"x": 1}',
            "}",
            "</tool_call>",
            "{",
            '"',
        ),
        *("<function=add>", "<parameter=x>", "1", "</parameter>", "</function>", "call:add"),
        *("<arg_key>", "x", "</arg_key>", "<arg_value>", "</arg_value>", "[add(", "1)", "]"),
        *(
            "<|channel|>",
            "analysis",
            "final",
            " to=functions.add",
            "<|message|>",
            "<|end|>",
            "<|start|>",
        ),
        *("[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ]
)
SCHEMAS = {"add": {"properties": {"x": {"type": "integer"}}}}


def parsed(pieces: list[str], tags: str | None, format: str | None, is_open: bool) -> object:
    """Reasoning, content and calls, with the reply's text as its parts add up to it."""
    parser = parser_of(
        None,
        TAGS.get(tags or ""),
        FORMATS.get(format or ""),
        SCHEMAS,
        is_open=is_open,
    )
    whole, source = Delta(), ""
    for piece in pieces:
        whole += parser.feed([piece])
        source += "".join(event.source for event in parser.events)
    whole += parser.finish()
    source += "".join(event.source for event in parser.events)
    calls = [call["function"] for call in whole.calls]
    return whole.reasoning, whole.content, calls, source


@given(
    st.lists(PARTS, max_size=14).map("".join),
    st.sampled_from([None, *TAGS]),
    st.sampled_from([None, *FORMATS]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=600, deadline=None)
def test_pieces_of_any_size_add_up_to_the_whole(
    text: str, tags: str | None, format: str | None, is_open: bool, data: st.DataObject
) -> None:
    """Of any text, in any format; and every character of it is reasoning, content, a call's or beside a tag."""
    is_open = is_open and tags is not None
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed([text], tags, format, is_open)
    assert (
        parsed(pieces, tags, format, is_open) == parsed(list(text), tags, format, is_open) == whole
    )
    assert whole[-1] == text  # type: ignore[index]


WORDS = st.text(st.sampled_from("ab <{\n\"'`"), max_size=8).map(lambda text: f"x{text}y ")


@given(
    st.lists(st.one_of(WORDS, st.just(CALL), st.just("<tool_call> is one. ")), max_size=8),
    st.integers(1, 40),
)
def test_calls_among_prose_take_nothing_of_it(parts: list[str], size: int) -> None:
    text = "".join(parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    _, content, calls, _ = parsed(pieces, None, "hermes", False)  # type: ignore[misc]
    assert content.split() == text.replace(CALL, " ").split()
    assert [call["name"] for call in calls] == ["add"] * parts.count(CALL)


def test_text_is_given_out_once_it_cannot_be_a_tag() -> None:
    parser = parser_of(None, THINK)
    pieces = ("<thi", "nk>\n", "a b", " c </", "em>", "</think>", "\n", "d ", "e")
    deltas = [parser.feed([piece]) for piece in pieces]
    assert [(delta.reasoning, delta.content) for delta in deltas] == [
        *[("", "")] * 2,
        ("a b", ""),
        (" c", ""),
        (" </em>", ""),
        *[("", "")] * 2,
        ("", "d"),
        ("", " e"),
    ]


@pytest.mark.parametrize("begun", ["<think>", "<think></think>", ""])
def test_no_piece_costs_more_in_a_longer_text(begun: str) -> None:
    """What was given out is not looked at again."""
    parser = parser_of(None, THINK, FORMATS["hermes"])
    parser.feed([begun])
    for _ in range(100):
        parser.feed(["word </th"])
        assert len(parser._cursor.text) + len(parser._gap) < 30


def test_calls_before_the_end_of_the_reasoning_are_calls() -> None:
    """What stands around them is reasoning, and a second block, too."""
    text = f"<think>\nLook it up.\n{CALL}\nThen say.\n</think>\n\nWait.\n<think>Hm.</think>\nDone."
    whole = parsed(list(text), "think", "hermes", False)
    assert whole[:2] == ("Look it up.\n\nThen say.\n\nHm.", "Wait.\n\nDone.")  # type: ignore[index]
    assert whole[2] == [{"name": "add", "arguments": '{"x": 1}'}]  # type: ignore[index]


def test_a_call_that_must_be_made_may_stand_behind_the_reasoning() -> None:
    """As where the template opens the reasoning and the format's calls have no beginning of their own."""
    call = '{"name": "add", "arguments": {"x": 1}}'
    parser = parser_of(None, THINK, FORMATS["llama3"], SCHEMAS, is_open=True, is_forced=True)
    whole = Delta()
    for character in f'{{"x": 1}} it is.\n</think>\n\n{call}':
        whole += parser.feed([character])
    whole += parser.finish()
    assert (whole.reasoning, whole.content) == ('{"x": 1} it is.', "")
    assert [call["function"] for call in whole.calls] == [{"name": "add", "arguments": '{"x": 1}'}]


def test_a_call_that_must_be_made_in_harmony_has_no_token_beside_it() -> None:
    """The token that ended the text was its content."""
    call = '{"name": "add", "arguments": {}}'
    tokenizer = with_marks(None, "harmony")
    texts, tokens = tokenizer.reply(call, "!<|return|>")
    parser = parser_of(tokenizer, None, FORMATS["harmony"], SCHEMAS, is_forced=True)  # type: ignore[arg-type]
    whole = parser.feed(texts, tokens) + parser.finish()
    assert (whole.content, [made["function"]["name"] for made in whole.calls]) == ("", ["add"])


@pytest.mark.parametrize("name", HARMONY_TEXTS)
def test_messages_of_harmony(name: str) -> None:
    text, expected = HARMONY_TEXTS[name]
    for pieces in ([text], list(text)):
        assert parsed(pieces, "harmony", "harmony", False)[:3] == expected  # type: ignore[index]


@pytest.mark.parametrize("name", TAGS)
def test_every_kind_of_tags(name: str) -> None:
    text = OTHER_TAGS[name]
    assert parsed(list(text), name, None, False)[:2] == ("Hm.", "Yes.")  # type: ignore[index]


# ---- tags that are tokens ----


class WithTokens(Characters):
    """A token a character, and one of each of these names."""

    def __init__(self, *names: str) -> None:
        super().__init__(None)
        self.names = names
        self._tags = dict(enumerate(names, start=self.vocab_size))

    def tokens(self) -> list[str | None]:
        return [None] * self.vocab_size + list(self._tags.values())

    def reply(self, *parts: str) -> tuple[list[str], list[int]]:
        """The texts and tokens of a reply: a part in a list is a token."""
        texts: list[str] = []
        tokens: list[int] = []
        ids = {name: id for id, name in self._tags.items()}
        for part in parts:
            if part.startswith("!"):
                texts.append(part[1:])
                tokens.append(ids[part[1:]])
            else:
                texts += part
                tokens += map(ord, part)
        return texts, tokens


@cache
def with_marks(tags: str | None, format: str | None) -> WithTokens:
    """A tokenizer whose vocabulary has the names of these tags and of this format."""
    names: list[str] = []
    if tags is not None:
        names += TAGS[tags].tokens
    if format is not None:
        names += FORMATS[format].shown
    return WithTokens(*dict.fromkeys(names))


@given(
    st.sampled_from([None, *TAGS]),
    st.sampled_from([None, *FORMATS]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=400, deadline=None)
def test_tokens_in_any_groups_add_up_to_the_whole(
    tags: str | None, format: str | None, is_open: bool, data: st.DataObject
) -> None:
    """Of a vocabulary that has the marks, in a text that quotes them, too; every character has its place."""
    tokenizer = with_marks(tags, format)
    marks = [f"!{name}" for name in tokenizer.names]
    choices = st.one_of(PARTS, st.sampled_from(marks)) if marks else PARTS
    parts = data.draw(st.lists(choices, max_size=14))
    texts, tokens = tokenizer.reply(*parts)
    cuts = data.draw(st.lists(st.integers(0, len(texts)), max_size=6).map(sorted))
    replies = []
    for ends in ([len(texts)], [*cuts, len(texts)], range(len(texts) + 1)):
        parser = parser_of(
            tokenizer,  # type: ignore[arg-type]
            TAGS.get(tags or ""),
            FORMATS.get(format or ""),
            SCHEMAS,
            is_open=is_open and tags is not None,
        )
        whole, source = Delta(), ""
        start = 0
        for end in ends:
            whole += parser.feed(texts[start:end], tokens[start:end])
            source += "".join(event.source for event in parser.events)
            start = end
        whole += parser.finish()
        source += "".join(event.source for event in parser.events)
        assert source == "".join(texts)
        calls = [call["function"] for call in whole.calls]
        replies.append((whole.reasoning, whole.content, calls))
    assert replies[0] == replies[1] == replies[2]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            ("!<think>", "It ends with </think>, they say. ", "!</think>", "\nYes. </think>"),
            ("It ends with </think>, they say.", "Yes. </think>"),
        ),
        (("One. ", "!<think>", "Two.", "!</think>", " Three."), ("Two.", "One.\n\nThree.")),
        (("One.", "!</think>", " Two."), ("", "One. Two.")),
        (("<think>is quoted</think>",), ("", "<think>is quoted</think>")),
    ],
)
def test_a_quoted_tag_ends_nothing_where_the_vocabulary_has_it(
    parts: tuple[str, ...], expected: tuple[str, str]
) -> None:
    tokenizer = WithTokens("<think>", "</think>")
    texts, tokens = tokenizer.reply(*parts)
    parser = parser_of(tokenizer, THINK)  # type: ignore[arg-type]
    whole = parser.feed(texts, tokens) + parser.finish()
    assert (whole.reasoning, whole.content) == expected


def test_a_tag_whose_text_a_stop_string_holds_back_is_still_one() -> None:
    tokenizer = WithTokens("<think>", "</think>")
    texts, tokens = tokenizer.reply("!<think>", "Hm </think>.", "!</think>", "Yes.")
    held = [*texts[:-5], "", f"{texts[-5]}{texts[-4]}", *texts[-3:]]
    assert len(held) == len(texts)
    parser = parser_of(tokenizer, THINK)  # type: ignore[arg-type]
    whole = parser.feed(held, tokens) + parser.finish()
    assert (whole.reasoning, whole.content) == ("Hm </think>.", "Yes.")


def test_a_quoted_call_is_none_where_the_vocabulary_has_its_tag() -> None:
    tokenizer = WithTokens("<tool_call>", "</tool_call>")
    inner = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    texts, tokens = tokenizer.reply(CALL, " ", "!<tool_call>", inner, "!</tool_call>")
    parser = parser_of(tokenizer, None, FORMATS["hermes"], SCHEMAS)  # type: ignore[arg-type]
    whole = parser.feed(texts, tokens) + parser.finish()
    assert whole.content == CALL
    assert [call["function"] for call in whole.calls] == [{"name": "add", "arguments": '{"x": 1}'}]


def test_templates_say_which_models_think() -> None:
    assert tags_of("{{ content.split('</think>')[-1] }}") == THINK
    assert tags_of("{{ '<|channel|>analysis<|message|>' + thinking }}") == HARMONY
    assert tags_of("{{ '[THINK]' + thinking + '[/THINK]' }}") == TAGS["mistral"]
    assert tags_of("{{ content }}") is None


@pytest.mark.parametrize(
    ("template", "choice", "is_told"),
    [
        ("<mm:think>{{ m.reasoning_content }}</mm:think>", "auto", True),
        ("<mm:think>{{ m.reasoning_content }}</mm:think>", "none", False),
        ("<mm:think>{{ m.reasoning_content }}</mm:think>", "<mm:think> </mm:think>", False),
        ("<think>{{ m.reasoning_content }}</think>", "auto", False),
        ("{{ m.content }}", "auto", False),
        ("{{ raise_exception('no assistants') }}", "auto", False),
    ],
)
def test_a_template_with_other_tags_is_told(
    template: str, choice: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Thinking(f"{{% for m in messages %}}{template}{{% endfor %}}")
    tokenizer.reasoning_tags = choice
    warn_of_unknown_tags(tokenizer)
    assert ("--reasoning-tags names them" in caplog.text) == is_told


def test_the_user_names_other_tags() -> None:
    tokenizer = Thinking(QWEN3)
    for choice, tags in (("none", None), ("auto", THINK), ("mistral", TAGS["mistral"])):
        tokenizer.reasoning_tags = check_tags(choice)
        assert tags_for(tokenizer) is tags
    tokenizer.reasoning_tags = check_tags("<reason> </reason>")
    tags = tags_for(tokenizer)
    assert tags is not None
    assert split("<reason>Hm.</reason> Yes", tags) == ("Hm.", "Yes")
    with pytest.raises(ConfigError, match="auto, none"):
        check_tags("reason")


@pytest.mark.parametrize(
    ("opening", "reply", "end", "is_thinking"),
    [
        ("", "<think>part of", "<think>part of", True),
        ("<think>\n", "<think>part of", "<think>\npart of", True),
        ("<think>\n", "I am", "<think>\n\n</think>\n\nI am", False),
        ("<think>\n", "Hm.</think>\nI am", "<think>\nHm.</think>\nI am", False),
        ("", "I am", "I am", False),
    ],
)
def test_a_continued_thought_is_reasoning(
    opening: str, reply: str, end: str, is_thinking: bool
) -> None:
    """With no empty block before it."""
    tokenizer = Thinking(QWEN3 + opens(opening))
    prompt = encode(tokenizer, Chat([message("Hi")], prefix=reply))
    assert tokenizer.decode(prompt).endswith(f"assistant\n{end}")
    assert is_open_after(tokenizer, THINK, prompt, reply) == is_thinking


def test_a_call_that_must_be_made_waits_for_the_end_of_a_continued_thought() -> None:
    """Its beginning stands behind the reasoning, never within."""
    tokenizer = Thinking(QWEN3 + opens("<think>\n"))
    for reply, end in (
        ("<think>part of", "<think>\npart of"),
        ("I am", "<think>\n\n</think>\n\nI am<tool_call>\n"),
        ("", "<think>\n\n</think>\n\n<tool_call>\n"),
    ):
        prompt = encode(tokenizer, Chat([message("Hi")], prefix=reply, call="<tool_call>\n"))
        assert tokenizer.decode(prompt).endswith(f"assistant\n{end}")


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
        super().__init__(partial(chat_prompt, partial(render, template, None, {})))
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
        parser = reasoning_parser(tokenizer, tokenizer.apply_chat([message("Hi")]) or [])
        assert parser is not None
        assert parser.is_thinking == is_open
    assert reasoning_parser(Thinking("{{ messages[0].content }}"), [ord("x")]) is None


# ---- displays ----


def test_reasoning_is_dimmed_and_the_answer_is_not() -> None:
    file = StringIO()
    reply = MarkdownReply(
        Console(file=file, force_terminal=True, width=80, height=20), parser_of(None, THINK)
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
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To standard output the first; in --json both have a field."""
    engine = served.service.engine
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    text = engine.generate([engine.encode("123", raw=False)], params)[0].text
    tags = tag_pair(text[:2], text[10:12])
    wanted = split(text, tags)
    assert all(wanted)
    monkeypatch.setattr(generate, "open_engine", lambda *_: nullcontext(engine))
    monkeypatch.setattr(generate, "tags_after", lambda *_: tags)
    monkeypatch.setattr(generate, "reasoning_parser", lambda *_: parser_of(None, tags))
    command = ("generate", "123", "--target", TOY, "--draft", TOY)
    command += ("--max-tokens", "40", "--ignore-eos")
    shown = ran(*command)
    assert shown.stdout == wanted[1] + "\n"
    assert shown.stderr.startswith(wanted[0])
    document = json.loads(ran(*command, "--json").stdout)
    assert (document["reasoning"], document["text"]) == wanted


# ---- the server ----


def test_through_a_server(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a toy, whose tags are characters that it writes."""
    path, tokenizer = "chat/completions", served.service.engine.tokenizer
    (choice,) = served.post(path, max_tokens=60, ignore_eos=True).json()["choices"]
    text = choice["message"]["content"]
    tags = tag_pair(text[:2], text[10:12])
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
    tags = tag_pair(engine.tokenizer.decode(conversation.prompt("123")[-2:]), "~")
    monkeypatch.setattr(engine.tokenizer, "chat_template", "it thinks")
    monkeypatch.setattr(reasoning, "TAGS", {"test": replace(tags, marks=("it thinks",))})
    chat = ChatSession(
        engine, SamplingParams(max_tokens=8), conversation, console=Console(file=StringIO())
    )
    text = chat.answer("123").text
    assert capsys.readouterr().out == f"{tags.opening}\n{text}\n"
