"""Check that a pair's logits and texts are equal bit for bit on this machine: what `pearl check` runs.

Logits: one token sequence in forwards of random sizes, compared with the same sequence in forwards of equal size.
Texts: every method and window, compared with `ar` under rules that commit the target's own draw (greedy, coupled), and
with each other under the ratio rule.  Where there is a datastore, `ngram` is compared with and without it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from pearl.client.request import Prompt
from pearl.client.stream import Result
from pearl.config import AS_PUBLISHED, DecodingConfig, EngineConfig, ModelRole, SamplingParams
from pearl.engine import Engine
from pearl.errors import DraftLost
from pearl.models.graphs import FED
from pearl.models.runner import ModelRunner, feed_chain
from pearl.worker.build import make_runner, place

_PATIENCE_SECONDS = 300.0  # for a draft that was killed; back-off and a slow start on a busy machine are in it
_REFERENCE_PIECE = 512  # tokens per forward of the reference
_CUT_SIZES = (1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 31, 64, 200)
_AR = ("ar", "stream", None)
_DRAFTLESS = (("ngram", "stream", None),)
_DIRECT = (  # method, window, gamma[, whether guesses are off]
    ("sd", "stream", None),
    ("sd", "stream", 3),
    ("pearl", "stream", None, True),
    ("pearl", "stream", None),
    ("pearl", "fixed", 3),
    ("pearl-no-pre-verify", "stream", None),
    ("pearl-no-post-verify", "stream", None),
)
_RATIO = (
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
    """

    what: str
    reference: str
    count: int
    equal: int
    first: str = ""
    guessed: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.equal == self.count


def check_rows(config: EngineConfig, role: ModelRole, tokens: int, seed: int = 0) -> Finding:
    """Load a model and compare its logits over a random sequence of `tokens` tokens. See `compare_cuts`."""
    runner = make_runner(config.model(role), place(config, role))
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


References = dict[str, list[list[int]]]  # texts of `ar`, by rule


def check_guesses(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, known: References
) -> Iterator[Finding]:
    """Compare the texts of methods that need no draft, one finding each; see `check_texts`."""
    for rule, sampling in _direct_rules(params):
        yield from _guessing(engine, prompts, sampling, rule, _wanted(engine, prompts, sampling, rule, known))


def check_texts(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, *, kill: bool, known: References | None = None
) -> Iterator[Finding]:
    """Compare the texts of all methods, one finding each.

    The reference is `ar` under the greedy and coupled rules, and `pearl` with stream windows under the ratio rule.

    Args:
        params: for sampled texts: needs a temperature above 0.
        kill: also decode texts during which the draft process is killed.
        known: references that another engine has decoded; what is missing is added.
    """
    known = {} if known is None else known
    for rule, sampling in _direct_rules(params):
        wanted = _wanted(engine, prompts, sampling, rule, known)
        yield from _guessing(engine, prompts, sampling, rule, wanted)
        if not engine.config.has_draft:
            continue
        for case in _DIRECT:
            texts = [_text(engine, prompt, sampling, rule, *case) for prompt in prompts]
            yield _compare(f"{rule}: {_case_name(*case)}", "ar", texts, wanted)
        if kill:
            case = "pearl", "stream", None
            texts = [_text(engine, prompt, sampling, rule, *case, strike=signal.SIGKILL) for prompt in prompts]
            yield _compare(f"{rule}: pearl stream, draft killed", "ar", texts, wanted)
    if engine.config.has_draft:
        wanted = [_drafted(engine, prompt, params, "pearl", "stream", None).tokens for prompt in prompts]
        for case in _RATIO:
            texts = [_drafted(engine, prompt, params, *case) for prompt in prompts]
            yield _compare(f"ratio: {_case_name(*case)}", "pearl stream", texts, wanted)


def check_combinations(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, known: References | None = None
) -> Iterator[Finding]:
    """Compare the texts of `pearl` with each combination of look-ahead, lookup and branches, and with either window.

    One finding each.  With all three also while the draft's process is killed, or stopped, in the middle of texts:
    under rules that commit the target's own draw.  Arguments as of `check_texts`.
    """
    known = {} if known is None else known
    for rule, sampling in (*_direct_rules(params), ("ratio", params)):
        is_direct = rule != "ratio"
        if is_direct:
            wanted = _wanted(engine, prompts, sampling, rule, known)
        else:
            wanted = [_drafted(engine, each, sampling, "pearl", "stream", None, True).tokens for each in prompts]
        reference = "ar" if is_direct else "pearl stream, no guesses"
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


def _direct_rules(params: SamplingParams) -> tuple[tuple[str, SamplingParams], ...]:
    """Rules that commit the target's own draw, and how to sample under them."""
    return ("greedy", params.model_copy(update={"temperature": 0.0})), ("coupled", params)


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
        yield _compare(f"{rule}: {_case_name(*case)}{store}", "ar", texts, wanted)


def _text(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    rule: str,
    method: str,
    window: str,
    gamma: int | None,
    no_guesses: bool = False,
    strike: signal.Signals | None = None,
    off: Mapping[str, int] = MappingProxyType({}),
) -> Result:
    """`strike`: what is sent to the draft's process once three pieces have come; `off`: settings of what guesses."""
    off = AS_PUBLISHED if no_guesses else off
    rule = "ratio" if rule == "ratio" else "coupled"
    settings: dict[str, Any] = {"method": method, "window": window, "gamma": gamma, "rule": rule, **off}
    with engine.stream(prompt, params, decoding=DecodingConfig(**settings)) as stream:
        for done, _ in enumerate(stream, 1):
            if strike is not None and done == 3 and engine.draft_pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine.draft_pid, strike)
    return stream.result


def _drafted(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    method: str,
    window: str,
    gamma: int | None,
    no_guesses: bool = False,
    off: Mapping[str, int] = MappingProxyType({}),
) -> Result:
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


def _compare(what: str, reference: str, results: Sequence[Result], wanted: list[list[int]]) -> Finding:
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
    return Finding(what, reference, len(texts), len(texts) - len(wrong), first, dict(guessed))
