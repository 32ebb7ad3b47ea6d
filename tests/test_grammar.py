"""Texts held to a grammar: which tokens may follow is a function of the prefix, so what holds without it holds here."""

import contextlib
import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from pearl import Engine, SamplingParams
from pearl.config import RequestOptions
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import probabilities, read_draw
from pearl.decoding.shaping import Shaper
from pearl.engine import request as requests
from pearl.errors import ForwardError, GrammarError, RequestError, installing
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.feeds import paths
from pearl.models.toy import alpha_pair
from pearl.spec.methods import METHODS
from pearl.text import parser
from pearl.text.grammar import Guides, grammar_of
from pearl.text.schema import place_of, simplified
from pearl.text.tokenizer import GenerationDefaults
from tests.language import (
    END,
    LANGUAGE,
    PROMPT,
    REGEX,
    VOCAB,
    allowed,
    decoded,
    masked,
    shaping,
    toy_guides,
    written,
)
from tests.options import drawn_by
from tests.pairwise import pairwise
from tests.virtual import NEVER, TIMINGS, likelihood

TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=10)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 12), TEXTS), max_size=6))
def test_what_may_follow_is_what_the_language_has(moves: list[tuple[int, list[int]]]) -> None:
    """After any text, in the language or not, however it was come by."""
    guide, text = toy_guides()(grammar_of(None, REGEX), (END,)), list[int]()
    for length, more in moves:
        text = text[:length]
        guide.cut(len(text))
        for token in more:
            guide.extend(token)
            text.append(token)
        is_within = END not in text and any(word.startswith(written(text)) for word in LANGUAGE)
        mask = guide.allowed()
        assert (mask is not None) == is_within
        if mask is not None:
            assert set(mask.nonzero()[0]) == allowed(written(text))


def test_a_model_may_have_more_ids_than_its_tokenizer_and_fewer() -> None:
    for size in (VOCAB + 3, VOCAB - 2):
        mask = toy_guides(size)(grammar_of(None, REGEX), (END,)).allowed()
        assert list(mask.nonzero()[0]) == [0, 1]
        assert len(mask) == size
    shaper = Shaper(shaping(), PROMPT, toy_guides(VOCAB - 2))
    shaper.hold(len(PROMPT))
    assert shaper.shape(torch.zeros(VOCAB)).isfinite().tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_rows_behind_a_guess_that_breaks_the_grammar_are_as_they_were() -> None:
    """They are never drawn from: the guess has no probability."""
    shaper = Shaper(shaping(), PROMPT, toy_guides())
    shaper.hold(len(PROMPT))
    rows = shaper.tree(torch.zeros(4, VOCAB), [0, 4, 1, 2], paths([-1, 0, 0, 2]))
    assert [set(row.isfinite().nonzero()[:, 0].tolist()) for row in rows] == [
        {0, 1},
        {*range(VOCAB)},
        {2},
        {0, 1, 3, END},
    ]


class _Spacious(ToyTokenizer):
    """Puts something first in a text, as many tokenizers put a space."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [31, *super().encode(text, special)]


def test_what_a_grammar_leaves_no_choice_about_is_written_by_tokens_that_write_it() -> None:
    """Not by what the tokenizer takes for it, as its first token is then all that may follow."""
    guide = Guides(lambda: _Spacious(32), 32)(grammar_of(None, "12ab(3|4)"), (3,))
    for token in (1, 2, 10, 11):
        mask = guide.allowed()
        assert list(mask.nonzero()[0]) == [token]
        guide.extend(token)


# ---- texts ----


def reference(sampling: RequestOptions) -> list[int]:
    """What the target says by itself under the direct draw, found without runtime and parser."""
    target, _ = alpha_pair(VOCAB, 0.6)
    draw, text = DirectDraw(sampling), list(PROMPT)
    while text[-1] != END:
        text.append(read_draw(draw(masked(text, torch.log(target(text))), len(text))))
    return text[len(PROMPT) :]


CASES = pairwise(METHODS, range(2), TIMINGS)


@pytest.mark.parametrize("method", METHODS)
def test_a_direct_text_is_that_of_the_held_target(method: str) -> None:
    for seed, timing in [case[1:] for case in CASES if case[0] == method]:
        sampling = drawn_by(float(seed > 0), seed=seed, shaping=shaping())
        text = decoded(method, "coupled", sampling, timing)
        assert text == reference(sampling)
        assert text[-1] == END
        assert written(text[:-1]) in LANGUAGE


def test_sampled_texts_have_the_held_targets_distribution() -> None:
    found = Counter(
        tuple(
            decoded(
                "pearl", "ratio", drawn_by(1.0, seed=seed, shaping=shaping()), TIMINGS[seed % 4]
            )
        )
        for seed in range(300)
    )
    expected: dict[tuple[int, ...], float] = {}
    target, _ = alpha_pair(VOCAB, 0.6)
    open_: list[tuple[list[int], float]] = [([], 1.0)]
    while open_:
        so_far, chance = open_.pop()
        if so_far[-1:] == [END]:
            expected[tuple(so_far)] = chance
            continue
        text = [*PROMPT, *so_far]
        probs = probabilities(masked(text, torch.log(target(text))), drawn_by(1.0))
        open_ += [
            ([*so_far, token], chance * float(prob)) for token, prob in enumerate(probs) if prob
        ]
    assert {written(list(text[:-1])) for text in expected} <= LANGUAGE
    assert likelihood(found, expected) > NEVER


# ---- what cannot be ----

PATTERNS = [{"type": "string", "pattern": f".*a.{{{i}}}$"} for i in range(16)]
INTERSECTED = json.dumps({"allOf": PATTERNS})  # a minute
REMAINDERS = '{"type": "integer", "multipleOf": 4000037}'  # 35 seconds, and 1.6 GB
LEFT_OUT = [part * 3000 for part in (".*", r"\w?", "(.|)", ".{0,1}")]


@pytest.mark.parametrize(
    ("schema", "expression"),
    [(INTERSECTED, None), (REMAINDERS, None), *((None, one) for one in LEFT_OUT)],
    ids=lambda given: given and given[:6],
)
def test_a_grammar_that_would_cost_too_much_is_refused_at_once(
    schema: str | None, expression: str | None
) -> None:
    """Seconds to hours and gigabytes, in which a server sent nobody a token, and a target was given up as silent."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(
        RequestError,
        match=r"(json_schema|regex) cannot be kept to: its parser would take more than 0\.3 s",
    ):
        grammar_of(schema, expression)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime < 1


@pytest.mark.parametrize(
    "expression", ["a{99999}", "((((a{99}){99}){99}){99})", "(" + ".*" * 498 + "){9}", *LEFT_OUT]
)
def test_what_costs_too_much_only_at_a_later_token_ends_that_text(
    expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step the parser's own limits hold, whatever making it took (which has a limit of its own)."""
    untried = CompletedProcess([], 0, b"", b"")
    monkeypatch.setattr("pearl.text.parser.subprocess.run", lambda *_, **__: untried)
    guide = Guides(lambda: ToyTokenizer(64), 64)(grammar_of(None, "0" + expression), (38,))
    for token in (0, 10, 10, 10):
        began = time.thread_time()
        with contextlib.suppress(GrammarError):
            guide.allowed()
            guide.extend(token)
        assert time.thread_time() - began < 1


@pytest.mark.parametrize("unlike", "nos")
def test_a_parser_that_gave_up_behind_a_guess_takes_nothing_of_the_text(unlike: str) -> None:
    """It refused what may follow, and said nothing: the text was held to nothing from there on."""
    letters = "".join(c for c in "abcdefghijklmnopqrstuvwxyz" if c != unlike)
    make = Guides(lambda: ToyTokenizer(40), 40)
    guide = make(grammar_of(None, f"([{letters}]|{unlike}{{99999}})*"), (38,))
    fits, breaks = 15, 10 + ord(unlike) - ord("a")
    for _ in range(4):
        for token in (fits, breaks, breaks):
            guide.extend(token)
            with contextlib.suppress(GrammarError):
                guide.allowed()
        guide.cut(1)
        guide.extend(fits)
        assert (mask := guide.allowed()) is not None, "it is within the grammar"
        assert mask[fits]
        guide.cut(0)


COLOURS = {"enum": [f"colour {i}" for i in range(100)]}
NODE = {
    "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "colour": COLOURS,
    }
}
USUAL = {
    "recursive and inherited": {
        "$defs": {"node": {"type": "object", **NODE}},
        "allOf": [
            {"$ref": "#/$defs/node"},
            {"properties": {"id": {"type": "string", "format": "uuid"}}},
        ],
    },
    "many patterns, each its own": {"properties": {f"{i}": one for i, one in enumerate(PATTERNS)}},
    "one of many": {"anyOf": PATTERNS},
    "a long enumeration": {"enum": list(range(1000))},
}


@pytest.mark.parametrize("schema", USUAL.values(), ids=USUAL)
def test_a_usual_schema_is_taken(schema: dict[str, Any]) -> None:
    assert grammar_of(json.dumps(schema), None)


IDLE: list[dict[str, Any]] = [  # keywords that constrain nothing with these values
    {"uniqueItems": False},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2, "maxContains": 3},
    {"unevaluatedItems": True, "unevaluatedProperties": {}},
    {"propertyNames": {"type": "string"}},
    {"dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}},
    {"not": False},
    {"if": {"type": "object"}, "then": True},
    {"then": {"type": "null"}, "else": {"type": "null"}},
    {"$dynamicAnchor": "node", "$recursiveAnchor": False},
]
AROUND: list[Callable[[Any], Any]] = [
    lambda inner: inner,
    lambda inner: {"type": "object", "properties": {"tags": inner}, "required": ["tags"]},
    lambda inner: {"$defs": {"tags": {"anyOf": [{"type": "null"}, inner]}}, "$ref": "#/$defs/tags"},
]
PLACES = ["", "/properties/tags", "/$defs/tags/anyOf/1"]
TIED: list[dict[str, Any]] = [  # the same keywords where they do
    {"uniqueItems": True},
    {"contains": {"type": "null"}},
    {"contains": {}, "minContains": 0, "maxContains": 1},
    {"unevaluatedItems": False},
    {"propertyNames": {"pattern": "^a"}},
    {"dependentRequired": {"a": ["b"]}},
    {"not": {}},
    {"if": {"type": "object"}, "then": True, "else": False},
]


def array(**keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, **keywords}


@pytest.mark.parametrize("keywords", IDLE, ids=str)
def test_keywords_that_constrain_nothing_are_dropped(keywords: dict[str, Any]) -> None:
    """llguidance refuses them whatever their value, wherever they are: pydantic and others write them."""
    for around in AROUND:
        assert simplified(json.dumps(around(array(**keywords)))) == json.dumps(around(array()))


@pytest.mark.parametrize("around", AROUND, ids=PLACES)
def test_keywords_that_constrain_nothing_are_no_reason_to_refuse(
    around: Callable[[Any], Any],
) -> None:
    arrays = {str(number): array(**keywords) for number, keywords in enumerate(IDLE)}
    assert grammar_of(json.dumps(around({"type": "object", "properties": arrays})), None)


@pytest.mark.parametrize(
    ("number", "keywords"),
    [(number % len(AROUND), keywords) for number, keywords in enumerate(TIED)],
    ids=str,
)
def test_keywords_that_constrain_are_refused_with_their_place(
    number: int, keywords: dict[str, Any]
) -> None:
    """By llguidance in one place each, since every trial is a process; and we find them in all."""
    texts = [json.dumps(around(array(**keywords))) for around in AROUND]
    assert [simplified(text) for text in texts] == texts
    with pytest.raises(RequestError, match="cannot be kept to: Unimplemented keys: ") as caught:
        grammar_of(texts[number], None)
    said = str(caught.value)
    _, _, place = said.rpartition("]")
    assert place.removeprefix(", at ") == PLACES[number]
    assert [place_of(text, said) for text in texts] == PLACES


def test_names_and_values_are_no_keywords() -> None:
    """A property may be named as a keyword is, and a constant may look like a schema."""
    value = {"uniqueItems": False, "not": False}
    schema = {
        "type": "object",
        "properties": {"not": False, "uniqueItems": {"const": value, "default": value}},
    }
    assert simplified(json.dumps(schema)) == json.dumps(schema)
    deep = '{"not":' * 5000 + "true" + "}" * 5000
    assert simplified(deep) == deep
    assert simplified("[") == "["


def test_sets_and_bytes_of_openai_s_parse_are_refused_by_name() -> None:
    """Neither can be kept to: items of a set differ, and JSON has no bytes."""

    class Item(BaseModel):
        tags: set[int]

    class Upload(BaseModel):
        items: list[Item]

    class File(BaseModel):
        content: bytes

    for model, cause in (
        (Upload, r'\["uniqueItems"\], at /\$defs/Item/properties/tags'),
        (File, "format: binary, at /properties/content"),
    ):
        with pytest.raises(RequestError, match=cause):
            grammar_of(json.dumps(model.model_json_schema()), None)


def test_what_cannot_be_kept_to_is_refused() -> None:
    """Before anything is sent."""
    schemas: list[dict[str, str]] = [{"type": "mouse"}, {"$ref": "https://example.com/x"}]
    for asked in (
        {"regex": "(0"},
        {"regex": r"(?=0)1"},
        *({"json_schema": schema} for schema in schemas),
    ):
        with pytest.raises(RequestError, match=f"{next(iter(asked))} cannot be kept to"):
            requests.resolved(SamplingParams(seed=1, **asked), GenerationDefaults(eos=(3,)), 1)  # type: ignore[arg-type]


def test_a_model_without_an_end_is_held_to_none() -> None:
    with pytest.raises(RequestError, match="no token that ends a text"):
        requests.resolved(SamplingParams(seed=1, regex="1+"), GenerationDefaults(), 1)


@pytest.mark.parametrize("method", ["ar", "ngram", "sd", "pearl"])
def test_a_grammar_that_goes_on_with_no_token_of_the_model_is_to_blame(
    toy: Engine, method: str
) -> None:
    """Not a checkpoint whose logits are not finite. Rows behind guesses that end so are none to draw from: no harm.

    Where it goes on, the text is that of ar, and fits.
    """
    decoding = RequestOptions(method=method, rule="coupled")
    with pytest.raises(ForwardError, match="goes on with no token that this model has"):
        toy.generate([7, 8], decoding.changed(regex="(0|12){2}x", max_tokens=20))
    ended = set()
    for seed in range(20):
        asked = SamplingParams(temperature=1, seed=seed, regex="(0|12|4x){3}4", max_tokens=20)
        said = []
        for way in (decoding, RequestOptions(method="ar")):
            try:
                said.append(toy.generate([7, 8], asked.overridden_by(way))[0].text)
            except ForwardError as error:
                said.append(str(error))
        assert said[0] == said[1], "guesses change nothing of it"
        ended.add("no token" in said[0])
        # 3 is what ends a text, and a digit.
        assert "no token" in said[0] or re.fullmatch("(0|12){3}4", said[0].removesuffix("3"))
    assert ended == {True, False}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front that sends what it should have refused."""
    monkeypatch.setattr("pearl.engine.request.grammar_of", lambda json_schema, regex: regex or "")


@pytest.mark.usefixtures("unchecked")
def test_a_hostile_front_fails_its_own_request(toy: Engine) -> None:
    schemas = ('{"type":"mouse"}', REMAINDERS, INTERSECTED)
    for hostile in (
        "{",
        "lark\nstart: (",
        "regex\n(",
        *(f"json_schema\n{schema}" for schema in schemas),
    ):
        with pytest.raises(ForwardError, match="the text's grammar"):
            toy.generate([1], SamplingParams(max_tokens=4, regex=hostile))
    assert toy.generate([1], SamplingParams(max_tokens=4, ignore_eos=True))[0].tokens


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    parser.checked.cache_clear()
    with pytest.raises(RequestError, match=re.escape(installing("structured"))):
        grammar_of(None, "1+")
    with pytest.raises(GrammarError, match="needs the package llguidance"):
        toy_guides()("anything", ())
