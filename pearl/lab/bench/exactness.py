"""Check that a pair's logits and texts are equal bit for bit on this machine: what `pearl check` runs.

Logits: one token sequence in forwards of random sizes, compared with the same sequence in forwards of equal size.
Texts: every method and window.  Under rules that commit the target's own draw (greedy, coupled) they are compared with
what the target writes by itself, in this process, from an empty cache; under the ratio rule with each other.  So a bug
that changes only the law of sampled texts is not seen here: tests/test_verification.py shows the law.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pearl.config import DecodingConfig, EngineConfig, ModelRole, SamplingParams
from pearl.engine import Engine
from pearl.engine.request import Prompt
from pearl.engine.stream import Stream
from pearl.errors import DraftLost
from pearl.lab.bench.alone import Alone, Own, direct_rules
from pearl.metrics import Statistics
from pearl.models.graphs import FED
from pearl.models.runner import ModelRunner, feed_chain
from pearl.spec.methods import AS_PUBLISHED
from pearl.worker.build import make_runner, place

_PATIENCE_SECONDS = 300.0  # for a draft that was killed; back-off and a slow start on a busy machine are in it
_ROWS = 300  # tokens whose logits are compared
_SLOTS = 3
_REFERENCE_PIECE = 512  # tokens per forward of the reference
_CUT_SIZES = (1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64, 200)
_OWN = "the target's own"
_AR = ("ar", "stream", None)
_DRAFTLESS = (("ngram", "stream", None),)
_DIRECT = (  # method, window, gamma[, whether guesses are off]
    ("sd", "stream", None),
    ("sd", "stream", 3),
    ("ssd", "stream", None),
    ("auto", "stream", None),
    ("pearl", "stream", None, True),
    ("pearl", "stream", None),
    ("pearl", "fixed", 3),
    ("pearl-no-pre-verify", "stream", None),
    ("pearl-no-post-verify", "stream", None),
)
_SOME = (  # for texts that are shaped, and for several at once
    ("ngram", "stream", None),
    ("sd", "stream", 3),
    ("pearl", "fixed", 3),
    ("auto", "stream", None),
)
_RATIO = (
    ("auto", "stream", None),
    ("pearl", "stream", None, True),
    ("pearl", "fixed", 1),
    ("pearl", "fixed", 3),
    ("pearl-no-pre-verify", "stream", None),
)


@dataclass(frozen=True)
class Finding:
    """One comparison: `equal` of `count` rows or texts equal the reference.

    Attributes:
        first: the first difference, in words.
        guessed: tokens of the texts that were guessed, by source; equal texts prove something about guesses only where
            there are some.
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


class Written(NamedTuple):
    """A text. `longest`: most tokens of one piece."""

    tokens: list[int]
    statistics: Statistics
    longest: int


def check_pair(
    config: EngineConfig, asked: Sequence[Prompt], params: SamplingParams, *, kill: bool, combinations: bool = False
) -> Iterator[Finding]:
    """All that `pearl check` compares, one finding each; arguments as of `check_texts`."""
    plain, shaped, has_slots = list[Own](), list[Own](), False
    for role in config.roles:
        runner = make_runner(config.model(role), place(config, role))
        yield _compare_rows(runner, role, _ROWS)
        if role == "target" and config.target_tp == 1:  # sums over ranks are rounded in another way
            has_slots = runner.capabilities.row_invariant
            plain, shaped = Alone(config, runner).owns(asked, params)
            asked = plain[0].prompts
        del runner  # a GPU may have no room for it beside the engine's
    known = {own.name: own.texts for own in plain}
    if config.datastore is not None:
        with Engine(config=config.model_copy(update={"datastore": None})) as engine:
            yield from check_guesses(engine, asked, params, known)
    with Engine(config=config) as engine:
        if combinations:
            yield from check_combinations(engine, asked, params, known)
            return
        yield from check_texts(engine, asked, params, kill=kill, known=known)
        yield from check_some(engine, shaped)
    if has_slots:
        with Engine(config=config.model_copy(update={"slots": max(_SLOTS, config.slots)})) as engine:
            yield from check_some(engine, plain, together=True)


def check_rows(config: EngineConfig, role: ModelRole, tokens: int, seed: int = 0) -> Finding:
    """Load a model and compare its logits over a random sequence of `tokens` tokens. See `compare_cuts`."""
    return _compare_rows(make_runner(config.model(role), place(config, role)), role, tokens, seed)


def _compare_rows(runner: ModelRunner, role: ModelRole, tokens: int, seed: int = 0) -> Finding:
    piece = FED if runner.device.type == "cuda" else _REFERENCE_PIECE
    return compare_cuts(runner, role, min(tokens, runner.context), seed, piece)


def compare_cuts(runner: ModelRunner, name: str, tokens: int, seed: int = 0, piece: int = _REFERENCE_PIECE) -> Finding:
    """Feed a random sequence in forwards of random sizes, with rollbacks, and compare all logits with the reference.

    Leaves the runner's cache empty.

    Args:
        tokens: length of the sequence, at most the runner's context.
        piece: tokens per forward of the reference, and the largest random size. On a GPU at most `FED`, because longer
            forwards use other kernels there.
    """
    rng = random.Random(seed)
    ids = [rng.randrange(runner.vocab_size) for _ in range(tokens)]
    runner.rollback(0)
    whole = torch.cat(
        [feed_chain(runner, ids[i : i + piece], len(ids[i : i + piece])) for i in range(0, tokens, piece)]
    )
    runner.rollback(0)
    differing: list[str] = []
    position = fed = 0
    while position < tokens:
        count = min(rng.choice([cut for cut in _CUT_SIZES if cut <= piece]), tokens - position)
        rows = feed_chain(runner, ids[position : position + count], count)
        for i in torch.nonzero((rows != whole[position : position + count]).any(-1)).flatten().tolist():
            off = float((rows[i] - whole[position + i]).abs().max())
            differing.append(f"position {position + i} in a forward of {count} tokens, by up to {off:.2g}")
        position, fed = position + count, fed + count
        if rng.random() < 0.2:  # as after a rejection: roll back, and feed again
            position -= rng.randint(0, count)
            runner.rollback(position)
    runner.rollback(0)
    first = differing[0] if differing else ""
    return Finding(f"{name} logits, in random cuts", f"in pieces of {piece}", fed, fed - len(differing), first)


References = dict[str, list[list[int]]]  # the target's own texts, by rule


def check_guesses(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, known: References
) -> Iterator[Finding]:
    """Compare the texts of methods that need no draft, one finding each; see `check_texts`."""
    for rule, sampling in direct_rules(params):
        yield from _guessing(engine, prompts, sampling, rule, _wanted(engine, prompts, sampling, rule, known))


def check_texts(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, *, kill: bool, known: References | None = None
) -> Iterator[Finding]:
    """Compare the texts of all methods, one finding each.

    The reference is the target's own text under the greedy and coupled rules, and `pearl` with stream windows under the
    ratio rule.

    Args:
        params: for sampled texts: needs a temperature above 0.
        kill: also decode texts during which the draft process is killed.
        known: the target's own texts; what is missing `ar` of this engine writes.
    """
    known = {} if known is None else known
    for rule, sampling in direct_rules(params):
        wanted = _wanted(engine, prompts, sampling, rule, known)
        texts = [_text(engine, prompt, sampling, rule, *_AR) for prompt in prompts]
        yield _compare(f"{rule}: ar", _OWN, texts, wanted)
        yield from _guessing(engine, prompts, sampling, rule, wanted)
        if not engine.config.has_draft:
            continue
        for case in _DIRECT:
            texts = [_text(engine, prompt, sampling, rule, *case) for prompt in prompts]
            yield _compare(f"{rule}: {_case_name(*case)}", _OWN, texts, wanted)
        if kill:
            case = "pearl", "stream", None
            texts = [_text(engine, prompt, sampling, rule, *case, strike=signal.SIGKILL) for prompt in prompts]
            yield _compare(f"{rule}: pearl stream, draft killed", _OWN, texts, wanted)
    if engine.config.has_draft:
        wanted = [_drafted(engine, prompt, params, "pearl", "stream", None).tokens for prompt in prompts]
        for case in _RATIO:
            texts = [_drafted(engine, prompt, params, *case) for prompt in prompts]
            yield _compare(f"ratio: {_case_name(*case)}", "pearl stream", texts, wanted)


def check_some(engine: Engine, owns: Sequence[Own], *, together: bool = False) -> Iterator[Finding]:
    """Compare texts of some methods with the target's own, one finding each. `together`: all of a method at once."""
    cases = [case for case in _SOME if engine.config.has_draft or case[0] in ("ngram", "auto")]
    for own, case in product(owns, cases):
        what = own.params, own.name.partition(",")[0], *case
        if together:
            texts = [_read(stream) for stream in [_start(engine, prompt, *what) for prompt in own.prompts]]
        else:
            texts = [_text(engine, prompt, *what) for prompt in own.prompts]
        several = f", {len(texts)} texts in {engine.config.slots} slots" if together else ""
        yield _compare(f"{own.name}: {_case_name(*case)}{several}", _OWN, texts, own.texts)


def check_combinations(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, known: References | None = None
) -> Iterator[Finding]:
    """Compare the texts of `pearl` with each combination of look-ahead, lookup and branches, and with either window.

    One finding each.  With all three also while the draft's process is killed, or stopped, in the middle of texts:
    under rules that commit the target's own draw.  Arguments as of `check_texts`.
    """
    known = {} if known is None else known
    for rule, sampling in (*direct_rules(params), ("ratio", params)):
        is_direct = rule != "ratio"
        if is_direct:
            wanted = _wanted(engine, prompts, sampling, rule, known)
        else:
            wanted = [_drafted(engine, each, sampling, "pearl", "stream", None, True).tokens for each in prompts]
        reference = _OWN if is_direct else "pearl stream, no guesses"
        for (window, gamma), chosen in product((("stream", None), ("fixed", 3)), product((False, True), repeat=3)):
            off = {name: 0 for name, on in zip(AS_PUBLISHED, chosen, strict=True) if not on}
            case = "pearl", window, gamma
            texts = [
                _text(engine, prompt, sampling, rule, *case, off=off)
                if is_direct
                else _drafted(engine, prompt, sampling, *case, off=off)
                for prompt in prompts
            ]
            words = " + ".join(name.replace("_", "-") for name in AS_PUBLISHED if name not in off) or "no guesses"
            yield _compare(f"{rule}: {_case_name('pearl', window, gamma)}, {words}", reference, texts, wanted)
        for strike in (signal.SIGKILL, signal.SIGSTOP) if is_direct else ():
            texts = [_text(engine, each, sampling, rule, "pearl", "stream", None, strike=strike) for each in prompts]
            what = "killed" if strike is signal.SIGKILL else "stopped"
            yield _compare(f"{rule}: pearl stream, all, draft {what}", reference, texts, wanted)


def _wanted(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, rule: str, known: References
) -> list[list[int]]:
    if rule not in known:
        known[rule] = [_text(engine, prompt, params, rule, *_AR).tokens for prompt in prompts]
    return known[rule]


def _guessing(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, rule: str, wanted: list[list[int]]
) -> Iterator[Finding]:
    store = ", datastore" if engine.config.datastore is not None else ""
    for case in _DRAFTLESS:
        texts = [_text(engine, prompt, params, rule, *case) for prompt in prompts]
        yield _compare(f"{rule}: {_case_name(*case)}{store}", _OWN, texts, wanted)


def _start(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    rule: str,
    method: str,
    window: str,
    gamma: int | None,
    no_guesses: bool = False,
    off: Mapping[str, int] = MappingProxyType({}),
) -> Stream:
    """`off`: settings of what guesses."""
    off = AS_PUBLISHED if no_guesses else off
    rule = "ratio" if rule == "ratio" else "coupled"
    settings: dict[str, Any] = {"method": method, "window": window, "gamma": gamma, "rule": rule, **off}
    return engine.stream(prompt, params, decoding=DecodingConfig(**settings))


def _read(stream: Stream, after_three: Callable[[], None] = lambda: None) -> Written:
    longest = 0
    with stream:
        for done, piece in enumerate(stream, 1):
            longest = max(longest, len(piece.tokens))
            if done == 3:
                after_three()
    return Written(stream.result.tokens, stream.result.statistics, longest)


def _text(engine: Engine, *what: Any, strike: signal.Signals | None = None, **more: Any) -> Written:
    """See `_start`. `strike`: what is sent to the draft's process once three pieces have come."""

    def hit() -> None:
        if strike is not None and engine.draft_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.draft_pid, strike)

    return _read(_start(engine, *what, **more), hit)


def _drafted(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    method: str,
    window: str,
    gamma: int | None,
    no_guesses: bool = False,
    off: Mapping[str, int] = MappingProxyType({}),
) -> Written:
    """A text of the ratio rule in whose every token the draft took part; of one without its draft the law alone holds.

    A draft that was lost is waited for: it is started again later each time.

    Raises:
        DraftLost: it has not come back in `_PATIENCE_SECONDS`, or was lost in every text.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    case = method, window, gamma, no_guesses
    while (result := _text(engine, prompt, params, "ratio", *case, off=off)).statistics.draft_lost:
        if time.monotonic() > deadline:
            raise DraftLost(f"in {_PATIENCE_SECONDS:.0f} s no text of the ratio rule had its draft from end to end")
        time.sleep(0.2)
    return result


def _case_name(method: str, window: str, gamma: int | None, no_guesses: bool = False) -> str:
    return f"{method} {window}" + (f"({gamma})" if gamma else "") + (", no guesses" if no_guesses else "")


def _compare(what: str, reference: str, results: Sequence[Written], wanted: list[list[int]]) -> Finding:
    texts = [result.tokens for result in results]
    guessed = Counter[str]()
    for result in results:
        guessed.update(result.statistics.guessed_by_source)
    wrong = [(i, *pair) for i, pair in enumerate(zip(texts, wanted, strict=True)) if pair[0] != pair[1]]
    first = ""
    if wrong:
        number, text, want = wrong[0]
        at = next((k for k, (a, b) in enumerate(zip(text, want, strict=False)) if a != b), min(len(text), len(want)))
        first = f"text {number + 1}, token {at}"
    return Finding(
        what, reference, len(texts), len(texts) - len(wrong), first, dict(guessed), max(one.longest for one in results)
    )
