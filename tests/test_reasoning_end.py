"""Stop strings and grammars are for the answer of a thinking model: they begin where its reasoning ends."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pearl import Engine, SamplingParams
from pearl.config.options import Reasoning
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.decoding.shaping import Shaper
from pearl.engine.request import Chat, encode, prompt_for
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.feeds import paths
from pearl.models.toy import alpha_pair
from pearl.server.requests import Setup, read_request
from pearl.server.schemas import ChatCompletionRequest
from pearl.spec.methods import METHODS
from pearl.text import reasoning
from pearl.text.reasoning import TAGS, is_open_after, tag_pair, tags_after
from pearl.text.reasoning_end import ReasoningState
from pearl.text.reasoning_marks import mark_token, reasoning_of
from pearl.text.stream import TextStream
from tests import tokenizers
from tests.language import END, LANGUAGE, PROMPT, VOCAB, decoded, masked, shaping, toy_guides
from tests.options import drawn_by
from tests.replies import OTHER_TAGS, Case, with_tokens
from tests.served import Served, message
from tests.virtual import TIMINGS

METHODS_NAMED = ("ar", "ngram", "pearl")
THINK = Reasoning("<think>", None, ("</think>",))
WRITTEN = ("think", "<think>", "</think>", "</", ">", "\n", " ", "stop", "a")


# ---- where it ends ----


def state_of(pieces: list[str], marks: Reasoning) -> tuple[str, str]:
    """Return the reasoning and the answer of a text that comes in these pieces."""
    state = ReasoningState(marks)
    reasoning_text = ""
    answer = ""
    for piece in pieces:
        thought, shown = state.feed(0, piece)
        reasoning_text += thought
        answer += shown
    rest = state.flush()
    return reasoning_text, answer + rest


@given(st.lists(st.sampled_from(WRITTEN)), st.booleans())
def test_pieces_of_a_text_have_its_parts(pieces: list[str], is_open: bool) -> None:
    marks = THINK.changed(is_open=is_open)
    text = "".join(pieces)
    thought, answer = state_of(pieces, marks)
    assert thought + answer == text
    assert state_of(list(text), marks) == (thought, answer)
    begins = is_open or text.lstrip().startswith("<think>")
    if begins and "</think>" in text:
        answer_start = text.index("</think>") + len("</think>")
        assert answer == text[answer_start:].lstrip()
    elif begins:
        assert thought == text
    else:
        assert answer == text


def test_a_quoted_mark_ends_nothing_where_it_is_a_token() -> None:
    marks = Reasoning("<think>", 7, ("</think>",), (8,))
    state = ReasoningState(marks)
    for token, text in ((7, "<think>"), (1, "</"), (2, "think"), (3, ">")):
        assert state.feed(token, text) == (text, "")
    assert state.feed(8, "</think>") == ("</think>", "")
    assert state.feed(7, "<think>") == ("", "<think>"), "an answer may show it"


def test_marks_are_tokens_where_the_vocabulary_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizers.byte_level()
    monkeypatch.setattr(tokenizer, "chat_template", "it thinks")
    tags = {"test": replace(tag_pair("<unk>", "</s>"), marks=("it thinks",))}
    monkeypatch.setattr(reasoning, "TAGS", tags)
    start = mark_token(tokenizer, "<unk>")
    end = mark_token(tokenizer, "</s>")
    assert start is not None
    assert end is not None
    hello = tokenizer.encode("hello\n", special=False)
    for prompt, is_open in (
        ([*hello, start], True),
        ([*hello, start, *tokenizer.encode("\n", special=False)], True),
        ([*hello, start, end], False),
        ([*hello, start, *hello], False),
        (hello, False),
    ):
        assert reasoning_of(tokenizer, prompt) == Reasoning(
            "<unk>", start, ("</s>",), (end,), is_open
        )


# ---- stop strings ----


@pytest.mark.parametrize("name", TAGS)
@pytest.mark.parametrize("kind", ["special", "ordinary", "none"])
def test_stops_look_at_the_answer_behind_every_kind_of_tags(name: str, kind: str) -> None:
    """Whether the names are special tokens, ordinary ones or none; the front shows them, and agrees with the worker."""
    text, answer, _ = OTHER_TAGS[name].partition("Yes.")
    names = () if kind == "none" else TAGS[name].tokens
    tokenizer = with_tokens(Case(text, tokens=names, special=kind == "special", tags=name))
    tokens = tokenizer.encode(text + answer, special=False)
    marks = reasoning_of(tokenizer, [])
    for show in ((), TAGS[name].tokens):
        stream = TextStream(tokenizer, [], ["."], show, marks)
        ends = []
        for token in tokens:
            stream.push(token)
            ends.append(stream.stopped)
        assert ends.index(True) == len(tokens) - 1


def shown(pieces: str, stops: list[str], marks: Reasoning | None) -> tuple[str, bool]:
    """Return the text that is shown of these tokens, a character each, and whether a stop ended it."""
    tokenizer = _Letters(256)
    stream = TextStream(tokenizer, [], stops, reasoning=marks)
    text = "".join(stream.push(ord(letter)) for letter in pieces)
    return text + stream.finish(), stream.stopped


class _Letters(ToyTokenizer):
    """A token a character of ASCII."""

    def token(self, id: int) -> str | None:
        return chr(id)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a\n\nb</think>c\n\nd", "<think>a\n\nb</think>c"),
        ("<think>a\n\nb", "<think>a\n\nb"),
        ("a\n\nb</think>c\n\nd", "a"),
        ("<thin\n\nb", "<thin"),
        ("<think>a</think>\n\nd", "<think>a</think>\n\nd"),
        ("<think>a</think>\n\nd\n\ne", "<think>a</think>\n\nd"),
    ],
)
def test_stops_look_at_the_answer(text: str, wanted: str) -> None:
    assert shown(text, ["\n\n"], THINK) == (wanted, wanted != text)


def test_a_stop_with_a_mark_looks_at_all() -> None:
    """As of a client that wants the reasoning alone."""
    marks = THINK.changed(is_open=True)
    assert shown("a</think>b", ["</think>"], marks) == ("a", True)
    assert shown("a</think>b\n", ["\n"], marks) == ("a</think>b", True)


def test_white_space_before_a_special_token_is_shown_before_it() -> None:
    """It is held back, for it may come before the opening tag."""
    tokenizer = tokenizers.byte_level()
    (end,) = tokenizer.encode("</s>", special=False)
    tokens = [*tokenizer.encode("\n", special=False), end]
    ended = TextStream(tokenizer, [], ["</s>"], reasoning=THINK)
    assert "".join(map(ended.push, tokens)) + ended.finish() == "\n"
    assert ended.stopped
    named = TextStream(tokenizer, [], ["x"], ["</s>"], reasoning=THINK)
    assert "".join(map(named.push, tokens)) + named.finish() == "\n</s>"


# ---- both, through the runtime ----


@pytest.fixture
def thinking(toy: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return how to set the tags of the toy."""

    def think(start: str, end: str) -> None:
        tags = replace(tag_pair(start, end), marks=("it thinks",))
        monkeypatch.setattr(toy.tokenizer, "chat_template", "it thinks")
        monkeypatch.setattr(reasoning, "TAGS", {"test": tags})

    return think


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("method", METHODS_NAMED)
def test_a_stop_in_the_reasoning_ends_no_text(
    toy: Engine, thinking: Any, method: str, length: int
) -> None:
    """Whether the tag is a token or two."""
    params = SamplingParams(
        method=method, rule="coupled", temperature=1, seed=3, max_tokens=120, ignore_eos=True
    )
    (plain,) = toy.generate("5a", params)
    text = plain.text
    for start in range(8, 60):
        end = text[start : start + length]
        before, _, after = text.partition(end)
        stops = [stop for stop in text[:4] if stop in after and stop not in end]
        if len(before) == start and stops:
            break
    stop = stops[0]
    thinking("5a", end)
    wanted = before + end + after.partition(stop)[0]
    with toy.stream("5a", params.changed(stop=(stop,))) as stream:
        streamed = "".join(piece.text for piece in stream)
    assert streamed == wanted
    assert stream.result.text == wanted
    assert stream.result.finish_reason == "stop"
    assert len(stream.result.tokens) == len(wanted) + 1, "the worker ends it at the same token"


def test_a_grammar_binds_behind_the_reasoning_inside_one_step() -> None:
    """In each row of a chain and of a tree that feeds the end of the reasoning among other tokens."""
    options = shaping(reasoning=Reasoning("", None, ("4",), (4,), True))  # type: ignore[arg-type]
    thought = {*range(VOCAB)} - {END}
    for shape in ("chain", "tree"):
        shaper = Shaper(options, PROMPT, toy_guides())
        shaper.hold(len(PROMPT))
        rows = torch.zeros(5, VOCAB)
        fed = [3, 4, 1, 2, 0]
        if shape == "chain":
            shaped = shaper.chain(rows, fed)
        else:
            shaped = shaper.tree(rows, fed, paths([-1, 0, 1, 2, 3]))
        allowed = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in shaped]
        assert allowed == [thought, {0, 1}, {2}, {0, 1}, {0, 1, 3, END}]
        shaper.hold(len(PROMPT))
        (row,) = shaper.chain(torch.zeros(1, VOCAB), [3])
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == thought, "rolled back"


def reference(sampling: Any) -> list[int]:
    """What the target says by itself: freely up to its first 4, and from there on text of the language."""
    target, _ = alpha_pair(VOCAB, 0.6)
    draw = DirectDraw(sampling)
    text = list(PROMPT)
    while text[-1] != END:
        logits = torch.log(target(text))
        written = text[len(PROMPT) :]
        if 4 in written:
            answer = written[written.index(4) + 1 :]
            row = masked([*PROMPT, *answer], logits)
        else:
            row = logits.clone()
            row[END] = -torch.inf
        text.append(read_draw(draw(row, len(text))))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_binds_at_the_same_token_for_every_method(method: str) -> None:
    marks = Reasoning("", None, ("4",), (4,), True)
    for seed, timing in product(range(3), TIMINGS[:2]):
        shape = shaping(reasoning=marks)  # type: ignore[arg-type]
        sampling = drawn_by(1.0, seed=seed, shaping=shape)
        text = decoded(method, "coupled", sampling, timing)
        assert text == reference(sampling)
        answer = "".join(map(str, text[text.index(4) + 1 : -1]))
        assert answer in LANGUAGE


def test_a_schema_waits_for_the_end_of_the_reasoning(
    served: Served, toy: Engine, thinking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each method the same text, in Python and over HTTP."""
    options = SamplingParams(
        rule="coupled", temperature=1, seed=5, max_tokens=200, regex="(01|12){4}x?"
    )
    thinking("a", "7")
    texts = []
    for method in METHODS_NAMED:
        (result,) = toy.generate("5a", options.changed(method=method))
        thought, _, answer = result.text.partition("7")
        assert len(thought) > 1
        assert len(answer.removesuffix("3")) == 8
        texts.append(result.text)
    assert len(set(texts)) == 1
    tokenizer = served.service.engine.tokenizer
    asked = {"temperature": 1, "seed": 5, "max_tokens": 200}
    (choice,) = served.post("chat/completions", **asked).json()["choices"]
    assert "reasoning_content" not in choice["message"]
    prompt_end = _prompt_end(served)
    monkeypatch.setattr(tokenizer, "chat_template", "it thinks")
    tags = replace(tag_pair(prompt_end, "7"), marks=("it thinks",))
    monkeypatch.setattr(reasoning, "TAGS", {"test": tags})
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [111111, 222222]}}}
    (choice,) = served.post("chat/completions", response_format=schema, **asked).json()["choices"]
    message = choice["message"]
    assert message["content"].removesuffix("3") in ("111111", "222222")
    assert message["reasoning_content"]
    deltas = [
        event["choices"][0]["delta"]
        for event in served.events("chat/completions", response_format=schema, **asked)
    ]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


@pytest.mark.parametrize("limit", [{}, {"stop": ["1", "2"]}])
def test_a_continued_thought_is_followed_to_its_end(
    served: Served, thinking_chat: None, limit: dict[str, Any]
) -> None:
    """By a grammar and by stop strings, for each method; the reply's beginning has opened it, not the template."""
    fields: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 200, **limit}
    fields["messages"] = [message("123"), message("a9", "assistant")]
    fields["continue_final_message"] = True
    if not limit:
        schema = {"enum": [111111, 222222]}
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    replies = []
    for speculation in ("off", "ngram", "pearl"):
        fields["speculation"] = speculation
        (choice,) = served.post("chat/completions", **fields).json()["choices"]
        reply = choice["message"]
        deltas = [
            event["choices"][0]["delta"] for event in served.events("chat/completions", **fields)
        ]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == reply.get(name, "")
        replies.append((reply["reasoning_content"], reply["content"]))
    assert len(set(replies)) == 1
    thought, answer = replies[0]
    if limit:
        assert choice["finish_reason"] == "stop"
        assert {"1", "2"} & set(thought)
        assert not {"1", "2"} & set(answer)
    else:
        assert len(thought) > 1
        assert answer.removesuffix("3") in ("111111", "222222")


@pytest.mark.parametrize("content", ["", "The answer"])
@pytest.mark.parametrize("name", TAGS)
def test_a_thought_in_a_field_of_its_own_is_continued(name: str, content: str) -> None:
    """As reasoning; or as the content that follows it. It was dropped."""
    tokenizer = with_tokens(Case("", tokens=TAGS[name].tokens, tags=name))
    begun = message(content, "assistant") | {"reasoning_content": "part of"}
    body = {"model": "m", "messages": [message("Hi"), begun], "continue_final_message": True}
    setup = Setup("m", SamplingParams(), tokenizer=tokenizer)
    request = read_request(body, ChatCompletionRequest, setup)
    (chat,) = request.prompts
    assert isinstance(chat, Chat)
    prompt = encode(tokenizer, chat)
    assert tokenizer.decode(prompt).endswith(content or "part of")
    assert is_open_after(tokenizer, TAGS[name], prompt, chat.prefix) == (not content)


@pytest.mark.parametrize("names", [(), TAGS["think"].tokens])
def test_a_continued_thought_is_closed_where_no_token_ends_it(names: tuple[str, ...]) -> None:
    """A grammar then begins at once, and the text has no reasoning."""
    tokenizer = with_tokens(Case("", tokens=names, tags="think"))
    thought = "<think>part of"
    begun = encode(tokenizer, Chat([message("Hi")], prefix=thought))
    params = SamplingParams(regex="[0-9]+")
    prompt = prompt_for(tokenizer, begun, params, thought)
    assert prompt_for(tokenizer, prompt, params, thought) == prompt
    tags = tags_after(tokenizer, prompt, True, thought)
    marks = reasoning_of(tokenizer, prompt, thought)
    assert marks is not None
    assert marks.is_open == (tags is not None) == bool(names)
    if names:
        assert prompt == begun
    else:
        assert tokenizer.decode(prompt).endswith(f"{thought}\n</think>\n\n")


def test_a_grammar_behind_harmony_begins_in_the_final_channel() -> None:
    """Not where the header of a message stands; once, and only behind a chat's prompt."""
    case = Case("", tokens=TAGS["harmony"].tokens, special=True, tags="harmony")
    tokenizer = with_tokens(case)
    params = SamplingParams(regex="[0-9]+")
    turn = tokenizer.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant", special=False)
    prompt = prompt_for(tokenizer, turn, params)
    final = tokenizer.encode("<|channel|>final<|message|>", special=False)
    assert prompt == [*turn, *final] == prompt_for(tokenizer, prompt, params)
    assert prompt_for(tokenizer, turn, params.changed(regex=None)) == turn
    plain = tokenizer.encode("hello", special=False)
    assert prompt_for(tokenizer, plain, params) == plain


@pytest.fixture
def thinking_chat(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags of the server's toy: its reasoning is between an "a" and a "7"."""
    monkeypatch.setattr(served.service.engine.tokenizer, "chat_template", "it thinks")
    monkeypatch.setattr(
        reasoning, "TAGS", {"test": replace(tag_pair("a", "7"), marks=("it thinks",))}
    )


def _prompt_end(served: Served) -> str:
    """Return the end of the prompts of the server's chats."""
    engine = served.service.engine
    tokens = engine.encode([{"role": "user", "content": "123"}])
    return engine.tokenizer.decode(tokens[-2:])


def test_thinking_is_off_where_no_token_ends_it(
    toy: Engine, thinking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's reasoning is closed: only a token can tell a grammar where it begins."""
    params = SamplingParams(seed=1, regex="(01|12){4}", max_tokens=40)
    thinking("5a", "bc")
    (result,) = toy.generate("005a", params)
    closing = toy.tokenizer.encode("\nbc\n\n")
    assert result.prompt_tokens == [*toy.tokenizer.encode("005a"), *closing]
    assert len(result.text.removesuffix("3")) == 8
    assert prompt_for(toy.tokenizer, result.prompt_tokens, params) == result.prompt_tokens
    monkeypatch.setattr(toy.tokenizer, "chat_template", "")
    (again,) = toy.generate(result.prompt_tokens, params)
    assert again.text == result.text
