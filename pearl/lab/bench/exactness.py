"""Compare a pair's logits and texts with references, bit for bit: what `pearl check` runs.

Logits: a sequence of tokens is fed in forwards of random sizes. Its logits must be those of the
same sequence in forwards of equal size.

Texts: every method decodes the same prompts, with several windows. Under rules that commit the
target's own draw (greedy, coupled), the texts must be those of the target alone, which are decoded
in this process without the engine. Under the ratio rule, the texts must be those of method `pearl`
with stream windows.

A bug that changes only the distribution of sampled texts is not found here, but by
tests/test_verification.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product, repeat
from typing import Any, NamedTuple

import torch

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.decoding.shaping import make_shaper
from pearl.engine import Engine
from pearl.engine.request import Prompt, encode, submission
from pearl.engine.stream import Stream
from pearl.lab.bench.rows import parse_settings
from pearl.lab.studies.recorded_texts import answers
from pearl.models.checkpoints.checkpoint import is_head, is_toy
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.gpu.recordings import FED
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.sequence import common_prefix
from pearl.text.grammar import Guides
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_ROWS = 300  # tokens of the sequence whose logits are compared
_SLOTS = 3
_REFERENCE_PIECE = 512  # tokens per forward of the reference
_CUT_SIZES = (1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64, 200)
_TARGET = "the target's own"
_FIXED = "pearl,window=fixed,gamma=3"
# Settings in the notation of `pearl bench`.
_DIRECT = (
    "sd",
    "sd,gamma=3",
    "ssd",
    "auto",
    "published",
    "pearl",
    _FIXED,
    "pearl-no-pre-verify",
    "pearl-no-post-verify",
)
# For texts with one of `_SHAPES`, and for several texts at once.
_SOME = ("ngram", "sd,gamma=3", _FIXED, "auto")
_RATIO = ("auto", "published", "pearl,window=fixed,gamma=1", _FIXED, "pearl-no-pre-verify")
_QUICK = ("ngram", "head", "sd,gamma=3", "pearl", "auto")  # with --quick: one method of each kind
_RULES = ("greedy", "coupled")  # rules that commit the target's own draw


@dataclass(frozen=True)
class Finding:
    """The result of one comparison of texts, or of rows of logits, with a reference.

    Attributes:
        what: what was compared, in words.
        reference: what it was compared with, in words.
        count: number of texts or rows that were compared.
        equal: how many of these texts or rows equal the reference.
        first: the first difference, in words; empty if there is none.
        guessed: source -> number of guessed tokens in the texts. If nothing was guessed, equal
            texts do not prove that guesses are verified correctly.
        longest: the most tokens that one step of the target added to a text.
    """

    what: str
    reference: str
    count: int
    equal: int
    first: str = ""
    guessed: dict[str, int] = field(default_factory=dict)
    longest: int = 0

    @property
    def passed(self) -> bool:
        return self.equal == self.count


def check_pair(
    config: EngineConfig,
    asked: Sequence[Prompt],
    params: RequestOptions,
    *,
    kill: bool,
    quick: bool = False,
    watcher: Watcher,
) -> Iterator[Finding]:
    """Make every comparison of `pearl check`, and yield a finding for each.

    Args:
        asked: the prompts.
        params, kill: see `check_texts`.
        quick: whether to make fewer comparisons: one method of each kind, no penalties or grammars,
            and never several texts at once.
        watcher: receives the number of comparisons.
    """
    target = make_runner(config.model("target"), place(config, "target"))
    shapes = {}
    if not quick:
        shapes = _shapes(config)
    methods = list(_SOME)
    if not config.has_draft:
        methods = ["ngram", "auto"]
    if config.head is not None:
        methods.append("head")
    shaped = []
    for shape, rule, settings in product(shapes, _RULES, methods):
        shaped.append(Case(f"{rule}, {shape}", settings))
    texts = text_cases(config, kill=kill, quick=quick)
    unmixed = []
    if config.datastore is not None:
        unmixed = list(map(Case, _RULES, repeat("ngram")))
    together = []
    if target.capabilities.row_invariant and not quick:
        for rule, settings in product(_RULES, methods):
            together.append(Case(rule, settings, together=True))
    # A head has no logits of its own to compare: they depend on the target's states.
    has_draft_logits = config.has_draft and not is_head(config.draft)
    texts_in_all = len(unmixed) + len(shaped) + len(texts) + len(together)
    watcher.begin("checking", 1 + has_draft_logits + texts_in_all)
    yield _check_logits(target, "target")
    references = target_texts(config, target, asked, params, shapes, watcher)
    del target  # a GPU may have no room for this target and the engine's
    if has_draft_logits:
        yield _check_logits(make_runner(config.model("draft"), place(config, "draft")), "draft")
    yield from _check_on(config.model_copy(update={"datastore": None}), unmixed, references)
    yield from _check_on(config, shaped + texts, references)
    several = config.model_copy(update={"slots": max(_SLOTS, config.slots)})
    yield from _check_on(several, together, references)


def _check_on(
    config: EngineConfig, cases: Sequence[Case], references: References
) -> Iterator[Finding]:
    """Start an engine with this configuration and compare its texts; yield a finding for each case.

    Without cases no engine is started.
    """
    if cases:
        with Engine(config=config) as engine:
            for case in cases:
                yield _check(engine, case, references)


# ---- logits ----


def _check_logits(runner: ModelRunner, role: str) -> Finding:
    piece = _REFERENCE_PIECE
    if runner.device.type == "cuda":
        piece = max(FED, runner.capabilities.tree_nodes)
    return compare_cuts(runner, role, min(_ROWS, runner.context), piece=piece)


def compare_cuts(
    runner: ModelRunner, name: str, tokens: int, seed: int = 0, piece: int = _REFERENCE_PIECE
) -> Finding:
    """Compare the logits of one random sequence, cut into forwards in two ways.

    The reference feeds the sequence in forwards of `piece` tokens. The other way feeds it in
    forwards of random sizes, and now and then rolls back and feeds tokens again. The runner's cache
    is empty afterwards.

    Args:
        name: what the runner is, for the finding.
        tokens: length of the sequence, at most the runner's context.
        piece: tokens per forward of the reference, and the largest random size.
    """
    rng = random.Random(seed)
    ids = rng.choices(range(runner.vocab_size), k=tokens)
    reference = _reference_logits(runner, ids, piece)
    sizes = [size for size in _CUT_SIZES if size <= piece]
    difference = ""
    position = 0
    fed = 0
    equal = 0
    while position < tokens:
        count = min(rng.choice(sizes), tokens - position)
        rows = feed_chain(runner, ids[position : position + count], count)
        expected = reference[position : position + count]
        differing = torch.nonzero((rows != expected).any(-1)).flatten().tolist()
        if differing and not difference:
            row = differing[0]
            off = float((rows[row] - expected[row]).abs().max())
            difference = (
                f"position {position + row} in a forward of {count} tokens, by up to {off:.2g}"
            )
        position += count
        fed += count
        equal += count - len(differing)
        if rng.random() < 0.2:  # as after a rejection: roll back, and feed positions again
            position -= rng.randint(0, count)
            runner.rollback(position)
    runner.rollback(0)
    reference_name = f"in pieces of {piece}"
    return Finding(f"{name} logits, in random cuts", reference_name, fed, equal, difference)


def _reference_logits(runner: ModelRunner, ids: Sequence[int], piece: int) -> torch.Tensor:
    """Return the logits [tokens, vocab] for `ids`, computed in forwards of `piece` tokens."""
    runner.rollback(0)
    rows = []
    for start in range(0, len(ids), piece):
        fed = ids[start : start + piece]
        rows.append(feed_chain(runner, fed, len(fed)))
    runner.rollback(0)
    return torch.cat(rows)


# ---- texts ----


class Case(NamedTuple):
    """A method whose texts are compared with reference texts.

    Attributes:
        reference: the name of the reference texts in `References`.
        settings: the method and its settings, for `parse_settings`.
        kill: whether to kill the draft's process after three pieces of each text.
        together: whether to submit all prompts at once.
    """

    reference: str
    settings: str
    kill: bool = False
    together: bool = False


def text_cases(config: EngineConfig, *, kill: bool, quick: bool) -> list[Case]:
    """Return the cases that `check_texts` compares, in order."""
    settings = ["ar", "ngram"]
    ratio: Sequence[str] = _RATIO
    killed: Sequence[str] = _RULES
    if config.head is not None:
        settings.append("head")
    if config.has_draft:
        settings += _DIRECT
    else:
        settings.append("auto")
    if quick:
        settings = [method for method in settings if method in _QUICK]
        ratio = (_FIXED,)
        killed = _RULES[:1]
    cases: list[Case] = []
    for rule in _RULES:
        cases += map(Case, repeat(rule), settings)
    if config.has_draft and not is_head(config.draft):
        cases += map(Case, repeat("ratio"), ratio)
    if config.has_draft and kill:
        # Last, after all cases of the ratio rule: a text of that rule keeps its distribution
        # without the draft, but not its tokens.
        cases += map(Case, killed, repeat("pearl"), repeat(True))
    return cases


def check_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: RequestOptions,
    *,
    kill: bool,
    quick: bool = False,
    known: Mapping[str, list[list[int]]] = {},
) -> Iterator[Finding]:
    """Compare texts of all methods with reference texts; yield a finding for each comparison.

    Args:
        params: sampling parameters, with a temperature above 0.
        kill: whether to also decode texts during which the draft process is killed.
        quick: whether to compare only one method of each kind.
        known: rule -> reference texts. The engine decodes the reference texts of missing rules.
    """
    references = References(prompts, params, dict(known))
    for case in text_cases(engine.config, kill=kill, quick=quick):
        yield _check(engine, case, references)


def _check(engine: Engine, case: Case, references: References) -> Finding:
    name = case.reference
    expected_texts = references.texts(name, engine)
    reference = _TARGET
    rule = "coupled"
    if name == "ratio":
        reference = "pearl"
        rule = "ratio"
    options = references.sampling[name].overridden_by(
        parse_settings(f"{case.settings},rule={rule}")
    )
    prompts = references.prompts[: len(expected_texts)]
    streams: Iterable[Stream] = (engine.stream(prompt, options) for prompt in prompts)
    if case.together:
        streams = list(streams)
    difference = ""
    equal = 0
    longest = 0
    guessed: Counter[str] = Counter()
    for number, stream in enumerate(streams):
        longest = max(longest, _read(stream, engine if case.kill else None))
        tokens = stream.result.tokens
        guessed.update(stream.result.statistics.guessed_by_source)
        if tokens == expected_texts[number]:
            equal += 1
        elif not difference:
            place = common_prefix(tokens, expected_texts[number])
            difference = f"text {number + 1}, token {place}"
    label = f"{name}: {case.settings}"
    if case.settings == "ngram" and engine.config.datastore is not None:
        label += ", datastore"
    if case.kill:
        label += ", draft killed"
    if case.together:
        label += f", {len(prompts)} texts in {engine.config.slots} slots"
    return Finding(label, reference, len(prompts), equal, difference, dict(guessed), longest)


def _read(stream: Stream, kill_in: Engine | None) -> int:
    """Read a stream to its end; return the largest number of tokens in a piece.

    Args:
        kill_in: the engine whose draft process is killed after three pieces; None to kill nothing.
    """
    longest = 0
    with stream:
        for number, piece in enumerate(stream, 1):
            longest = max(longest, len(piece.tokens))
            if number == 3 and kill_in is not None and kill_in.draft is not None:
                kill_in.draft.worker.kill()
    return longest


# ---- the target alone ----

PROMPTS = (  # the first two begin alike; the third repeats itself, so that many tokens are guessed
    "Explain gravity to a beginner.",
    "Explain gravity to a child of five.",
    "Go on: red green blue white black, red green blue white black, red green blue white black, red green",
)
_SECOND_TURN = "\n\nAnd now in one sentence:"
# name -> options that change the logits before a token is drawn
_SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "grammar": {"regex": "([a-z]{1,6} ){3,6}end", "json_schema": None, "ignore_eos": False},
}


class References:
    """The reference texts, by name: "greedy", "coupled" or "ratio", or a rule and one of `_SHAPES`.

    Under greedy and coupled, reference texts are the target's own. For example, "greedy, grammar"
    has the target's greedy texts under the grammar in `_SHAPES`. Under ratio, reference texts are
    those of method `pearl` with stream windows.

    Args:
        texts: name -> texts. The engine that is checked decodes the texts of "greedy", "coupled"
            and "ratio" if they are missing.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: RequestOptions,
        texts: dict[str, list[list[int]]],
    ) -> None:
        self.prompts = prompts
        self.sampling = {**direct_rules(params), "ratio": params}
        self._texts = texts

    def add(self, name: str, params: RequestOptions, texts: list[list[int]]) -> None:
        """Add reference texts that were sampled with `params`.

        Text i is for prompt i. There may be fewer texts than prompts.
        """
        self.sampling[name] = params
        self._texts[name] = texts

    def texts(self, name: str, engine: Engine) -> list[list[int]]:
        if name not in self._texts:
            alone = "ar,rule=coupled"
            if name == "ratio":
                alone = "pearl,rule=ratio"
            options = self.sampling[name].overridden_by(parse_settings(alone))
            texts = []
            for prompt in self.prompts:
                (result,) = engine.generate(prompt, options)
                texts.append(result.tokens)
            self._texts[name] = texts
        return self._texts[name]


def target_texts(
    config: EngineConfig,
    runner: ModelRunner,
    asked: Sequence[Prompt],
    params: RequestOptions,
    shapes: Mapping[str, Mapping[str, Any]],
    watcher: Watcher,
) -> References:
    """Decode the reference texts of the direct rules, greedy and coupled.

    The prompts are those in `asked`, and a second turn after the first prompt's answer. The first
    two of these prompts are also decoded with each of `shapes`.

    The target decodes in this process, one token per forward, from an empty cache. This code shares
    only the runner, the draw and the shaper with the engine, so a bug anywhere else shows as a
    difference.

    Args:
        shapes: entries of `_SHAPES`.
    """
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    rules = direct_rules(params)
    guides = Guides(lambda: tokenizer, runner.vocab_size)

    def decode(prompt: list[int], params: RequestOptions) -> list[int]:
        submit = submission(1, prompt, runner.context, params.changed(method="ar"), defaults)
        limit = submit.limit - len(prompt)
        shaper = make_shaper(submit.options, prompt, guides)
        watcher.advance(0, "the target alone")
        return answers(runner, [prompt], [submit.options], submit.eos, limit, shaper=shaper)[0]

    prompts = [encode(tokenizer, prompt) for prompt in asked]
    second_turn = prompts[0] + decode(prompts[0], rules["greedy"])
    second_turn += tokenizer.encode(_SECOND_TURN, special=False)
    if len(second_turn) + (params.max_tokens or 0) <= runner.context:
        prompts.insert(1, second_turn)
    references = References(prompts, params, {})
    for rule, sampling in rules.items():
        references.add(rule, sampling, [decode(prompt, sampling) for prompt in prompts])
    for (name, shape), (rule, sampling) in product(shapes.items(), rules.items()):
        shaped = sampling.changed(**shape)
        texts = [decode(prompt, shaped) for prompt in prompts[:2]]
        references.add(f"{rule}, {name}", shaped, texts)
    return references


def _shapes(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return the entries of `_SHAPES` that this target supports: penalties, and often the grammar.

    The grammar needs an EOS token, llguidance, and a vocabulary with spaces, which a toy lacks.
    """
    _, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    if defaults.eos and not is_toy(config.target) and find_spec("llguidance"):
        return _SHAPES
    return {"penalties": _SHAPES["penalties"]}


def direct_rules(params: RequestOptions) -> dict[str, RequestOptions]:
    """Return the sampling options of the rules that commit the target's draw: greedy, coupled."""
    return {"greedy": params.changed(temperature=0.0), "coupled": params}
