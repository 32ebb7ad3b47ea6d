"""Check that a pair's logits and texts are equal bit for bit on this machine: what `pearl check` runs.

Logits: one token sequence in forwards of random sizes, compared with the same sequence in forwards of equal size.
Texts: every method and window.  Under rules that commit the target's own draw (greedy, coupled) they are compared with
the target alone, decoded in this process without the engine; under the ratio rule with each other.  A bug that changes
only the distribution of sampled texts is not found here but by tests/test_verification.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch

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
from pearl.text.grammar import Guides
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_ROWS = 300  # tokens whose logits are compared
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
_SOME = ("ngram", "sd,gamma=3", _FIXED, "auto")  # for shaped texts, and for simultaneous ones
_RATIO = ("auto", "published", "pearl,window=fixed,gamma=1", _FIXED, "pearl-no-pre-verify")
_QUICK = ("ngram", "sd,gamma=3", "pearl", "auto")  # one way of each kind
_RULES = ("greedy", "coupled")  # that commit the target's own draw


@dataclass(frozen=True)
class Finding:
    """One comparison: `equal` of `count` rows or texts equal the reference.

    Attributes:
        first: the first difference, in words.
        guessed: guessed tokens of the texts, by source; without any, equal texts prove nothing about guesses.
        longest: most tokens that one step of the target has added to a text.
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
    tick: Callable[[str], None] = lambda what: None,
    begin: Callable[[int], None] = lambda total: None,
) -> Iterator[Finding]:
    """Make every comparison of `pearl check`, and yield one finding each; arguments as of `check_texts`.

    Args:
        quick: compare fewer: one method of each kind, no shaped logits, and no texts side by side.
        tick: called with each text of the target alone: these take most of the time before texts are compared.
        begin: called with the number of findings, once the target is loaded.
    """
    plain: list[Reference] = []
    shaped: list[Reference] = []
    has_slots = False
    # The logits of a head depend on the states that have come.
    roles = [role for role in config.roles if role == "target" or not is_head(config.draft)]
    for role in roles:
        runner = make_runner(config.model(role), place(config, role))
        if role == "target":
            has_slots = runner.capabilities.row_invariant and not quick
            shapes = {} if quick else _shapes(config)
            references_of_some = len(_RULES) * (len(shapes) + has_slots)
            total = len(roles) + len(text_cases(config, kill=kill, quick=quick))
            total += references_of_some * len(_some(config))
            if config.datastore is not None:
                total += len(_RULES)
            begin(total)
        piece = _REFERENCE_PIECE
        if runner.device.type == "cuda":
            piece = max(FED, runner.capabilities.tree_nodes)
        yield compare_cuts(runner, role, min(_ROWS, runner.context), piece=piece)
        if role == "target":
            plain, shaped = references(config, runner, asked, params, shapes, tick)
            asked = plain[0].prompts
        del runner  # a GPU may have no room for it beside the engine's
    if config.datastore is not None:
        with Engine(config=config.model_copy(update={"datastore": None})) as engine:
            for reference in plain:
                yield _check(engine, reference, "ngram")
    texts = {reference.name: reference.texts for reference in plain}
    with Engine(config=config) as engine:
        yield from _check_some(engine, shaped)
        yield from check_texts(engine, asked, params, kill=kill, quick=quick, known=texts)
    if has_slots:
        several = config.model_copy(update={"slots": max(_SLOTS, config.slots)})
        with Engine(config=several) as engine:
            yield from _check_some(engine, plain, together=True)


# ---- logits ----


def compare_cuts(
    runner: ModelRunner, name: str, tokens: int, seed: int = 0, piece: int = _REFERENCE_PIECE
) -> Finding:
    """Feed a random sequence in forwards of random sizes, with rollbacks, and compare all logits with the reference.

    Leaves the runner's cache empty.

    Args:
        tokens: length of the sequence, at most the runner's context.
        piece: tokens per forward of the reference, and the largest random size. On a GPU those of the largest table.
    """
    rng = random.Random(seed)
    ids = [rng.randrange(runner.vocab_size) for _ in range(tokens)]
    reference = _reference_logits(runner, ids, piece)
    sizes = [size for size in _CUT_SIZES if size <= piece]
    differences: list[str] = []
    position = fed = 0
    while position < tokens:
        count = min(rng.choice(sizes), tokens - position)
        rows = feed_chain(runner, ids[position : position + count], count)
        differences += _differences(rows, reference[position : position + count], position)
        position += count
        fed += count
        if rng.random() < 0.2:  # as after a rejection: roll back, and feed again
            position -= rng.randint(0, count)
            runner.rollback(position)
    runner.rollback(0)
    return Finding(
        f"{name} logits, in random cuts",
        f"in pieces of {piece}",
        fed,
        fed - len(differences),
        differences[0] if differences else "",
    )


def _reference_logits(runner: ModelRunner, ids: Sequence[int], piece: int) -> torch.Tensor:
    """Return the logits [tokens, vocab] of forwards of `piece` tokens each."""
    runner.rollback(0)
    rows = []
    for start in range(0, len(ids), piece):
        fed = ids[start : start + piece]
        rows.append(feed_chain(runner, fed, len(fed)))
    runner.rollback(0)
    return torch.cat(rows)


def _differences(rows: torch.Tensor, reference: torch.Tensor, position: int) -> list[str]:
    """Describe each row that differs from the reference. `position`: of the first row."""
    differences = []
    for i in torch.nonzero((rows != reference).any(-1)).flatten().tolist():
        off = float((rows[i] - reference[i]).abs().max())
        differences.append(
            f"position {position + i} in a forward of {len(rows)} tokens, by up to {off:.2g}"
        )
    return differences


# ---- texts ----


class Case(NamedTuple):
    """Texts to compare with a reference: its rule, the settings of the method, and whether the draft is killed."""

    rule: str
    settings: str
    kill: bool = False


def text_cases(config: EngineConfig, *, kill: bool, quick: bool) -> list[Case]:
    """Return the cases that `check_texts` compares, in order."""
    settings = ["ar", "ngram"]
    if config.head is not None:
        settings.append("head")
    if config.has_draft:
        settings += _DIRECT
    if quick:
        settings = [method for method in settings if method in _QUICK]
    cases = [Case(rule, method) for rule in _RULES for method in settings]
    if config.has_draft and not is_head(config.draft):
        cases += [Case("ratio", method) for method in ([_FIXED] if quick else _RATIO)]
    if config.has_draft and kill:
        # Last: without its draft a text of the ratio rule has the same distribution only.
        cases += [Case(rule, "pearl", kill=True) for rule in (_RULES[:1] if quick else _RULES)]
    return cases


def check_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: RequestOptions,
    *,
    kill: bool,
    quick: bool = False,
    known: Mapping[str, list[list[int]]] | None = None,
) -> Iterator[Finding]:
    """Compare the texts of all methods, one finding each.

    The reference is the target's own text under the greedy and coupled rules, and `pearl` with stream windows under the
    ratio rule, by which a head drafts for no text.

    Args:
        params: for sampled texts: needs a temperature above 0.
        kill: also decode texts during which the draft process is killed.
        quick: one method of each kind.
        known: the target's own texts, by rule; missing ones are decoded with `ar` by this engine.
    """
    texts = dict(known or {})
    sampling = {**direct_rules(params), "ratio": params}
    for rule, settings, is_killed in text_cases(engine.config, kill=kill, quick=quick):
        if rule not in texts:
            alone = "pearl,rule=ratio" if rule == "ratio" else "ar,rule=coupled"
            texts[rule] = _decoded(engine, prompts, sampling[rule], alone)
        reference = Reference(rule, sampling[rule], prompts, texts[rule])
        yield _check(engine, reference, settings, kill=is_killed)


def _check_some(
    engine: Engine, references: Sequence[Reference], *, together: bool = False
) -> Iterator[Finding]:
    """Compare texts of some methods with references, one finding each. `together`: all texts of a method at once."""
    for reference, settings in product(references, _some(engine.config)):
        yield _check(engine, reference, settings, together=together)


def _some(config: EngineConfig) -> list[str]:
    return [settings for settings in _SOME if config.has_draft or settings in ("ngram", "auto")]


def _decoded(
    engine: Engine, prompts: Sequence[Prompt], params: RequestOptions, settings: str
) -> list[list[int]]:
    options = params.overridden_by(parse_settings(settings))
    texts = []
    for prompt in prompts:
        (result,) = engine.generate(prompt, options)
        texts.append(result.tokens)
    return texts


def _check(
    engine: Engine,
    reference: Reference,
    settings: str,
    *,
    kill: bool = False,
    together: bool = False,
) -> Finding:
    """Compare the texts of a method with a reference.

    Args:
        kill: kill the draft's process after three pieces of each text.
        together: submit all prompts at once.
    """
    is_ratio = reference.name == "ratio"
    rule = "ratio" if is_ratio else "coupled"
    options = reference.params.overridden_by(parse_settings(f"{settings},rule={rule}"))
    streams: Iterable[Stream] = (engine.stream(prompt, options) for prompt in reference.prompts)
    if together:
        streams = list(streams)
    first = ""
    equal = 0
    longest = 0
    guessed: Counter[str] = Counter()
    for number, stream in enumerate(streams):
        longest = max(longest, _read(stream, engine if kill else None))
        tokens = stream.result.tokens
        expected = reference.texts[number]
        guessed.update(stream.result.statistics.guessed_by_source)
        if tokens == expected:
            equal += 1
        elif not first:
            first = f"text {number + 1}, token {_first_difference(tokens, expected)}"
    count = len(reference.prompts)
    what = f"{reference.name}: {settings}"
    if settings == "ngram" and engine.config.datastore is not None:
        what += ", datastore"
    if kill:
        what += ", draft killed"
    if together:
        what += f", {count} texts in {engine.config.slots} slots"
    return Finding(
        what, "pearl" if is_ratio else _TARGET, count, equal, first, dict(guessed), longest
    )


def _first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int:
    for i, (token, expected_token) in enumerate(zip(tokens, expected, strict=False)):
        if token != expected_token:
            return i
    return min(len(tokens), len(expected))


def _read(stream: Stream, kill_in: Engine | None) -> int:
    """Return the most tokens that came at once.

    Args:
        kill_in: an engine whose draft's process is killed after three pieces.
    """
    longest = 0
    with stream:
        for number, piece in enumerate(stream, 1):
            longest = max(longest, len(piece.tokens))
            if number == 3 and kill_in is not None and kill_in.draft is not None:
                kill_in.draft.worker.kill()
    return longest


# ---- the target alone ----

PROMPTS = (  # the second has a prefix of the first; the third repeats itself, so that many tokens are guessed
    "Explain gravity to a beginner.",
    "Explain gravity to a child of five.",
    "Go on: red green blue white black, red green blue white black, red green blue white black, red green",
)
_SECOND_TURN = "\n\nAnd now in one sentence:"
_SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "grammar": {"regex": "([a-z]{1,6} ){3,6}end", "json_schema": None, "ignore_eos": False},
}


@dataclass(frozen=True)
class Reference:
    """The target's texts for some prompts, sampled with `params`. `name` begins with the rule: greedy or coupled."""

    name: str
    params: RequestOptions
    prompts: Sequence[Prompt]
    texts: list[list[int]]


def references(
    config: EngineConfig,
    runner: ModelRunner,
    asked: Sequence[Prompt],
    params: RequestOptions,
    shapes: Mapping[str, Mapping[str, Any]],
    tick: Callable[[str], None],
) -> tuple[list[Reference], list[Reference]]:
    """Decode prompts and a second turn of the first, under each direct rule; return (plain texts, texts with `shapes`).

    The target decodes them in this process, one token a forward, from an empty cache. The texts share only the runner,
    the draw and the shaper with the engine, so any other bug shows as a difference. `tick`: called with each text.
    """
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    rules = direct_rules(params)
    guides = Guides(lambda: tokenizer, runner.vocab_size)

    def decode(prompt: list[int], params: RequestOptions) -> list[int]:
        submit = submission(1, prompt, runner.context, params.changed(method="ar"), defaults)
        limit = submit.limit - len(prompt)
        shaper = make_shaper(submit.options, prompt, guides)
        tick("the target alone")
        return answers(runner, [prompt], [submit.options], submit.eos, limit, shaper=shaper)[0]

    def reference(name: str, params: RequestOptions, prompts: list[list[int]]) -> Reference:
        return Reference(name, params, prompts, [decode(prompt, params) for prompt in prompts])

    prompts = [encode(tokenizer, prompt) for prompt in asked]
    second_turn = prompts[0] + decode(prompts[0], rules["greedy"])
    second_turn += tokenizer.encode(_SECOND_TURN, special=False)
    if len(second_turn) + (params.max_tokens or 0) <= runner.context:
        prompts.insert(1, second_turn)
    plain = [reference(rule, sampling, prompts) for rule, sampling in rules.items()]
    shaped = []
    for name, shape in shapes.items():
        for rule, sampling in rules.items():
            shaped.append(reference(f"{rule}, {name}", sampling.changed(**shape), prompts[:2]))
    return plain, shaped


def _shapes(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return the shapes that the target's texts can have: a toy has no space, which the grammar needs."""
    _, defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)
    if defaults.eos and not is_toy(config.target) and find_spec("llguidance"):
        return _SHAPES
    return {"penalties": _SHAPES["penalties"]}


def direct_rules(params: RequestOptions) -> dict[str, RequestOptions]:
    """Return how to sample under each rule that commits the target's own draw."""
    return {"greedy": params.changed(temperature=0.0), "coupled": params}
