"""Steps of `prove_gpu` that compare forwards and drafted texts; the sizes and figures of all its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from bench_forward import synchronize
from random_models import FAMILIES, random_family, random_model

from pearl.config.options import RequestOptions
from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import DraftThread
from pearl.lab.bench.exactness import compare_cuts
from pearl.models.cpu.runner import CpuRunner
from pearl.models.forward.linear_layers import Rounding
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import FED, PREFILL, Rows, record_on_gpu
from pearl.models.gpu.row_table import SIZES
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.models.transformers.runner import HFRunner
from pearl.protocol.events import Draft, Drafted, Open
from pearl.spec.methods import METHODS

# Bound on our difference from transformers, times that of transformers from a wider dtype.
_TOLERANCE = 2.0
# Times that bound, relative to a row's root mean square: nearer logits may change places.
_NEAR = 5.0
_LEAST_BUSY = 0.9  # share of the time that a chain keeps its device busy
_SAMPLINGS = {
    "greedy": RequestOptions(rule="coupled"),
    "coupled": RequestOptions(rule="coupled", temperature=1.0, seed=3),
    "ratio, top-p": RequestOptions(rule="ratio", temperature=0.8, top_p=0.9, seed=3),
}
ROUNDINGS: tuple[Rounding, ...] = ("", "int8", "int4")


@dataclass(frozen=True)
class Scale:
    """Sizes of the steps.

    Attributes:
        wide: shape of few layers, for steps that hold two models at once. timed: shapes whose forwards are timed.
        pairs: shapes of the engine's targets: with a draft that equals it, and one that differs. A draft has a quarter
            of the layers.
        starts: tokens in the cache when forwards are compared: where parts become longer.
        prompts: their lengths. chain, text, cut: tokens of a chain, of a text, and of a sequence cut at random.
    """

    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    wide: str = "7b-4-layers"
    timed: tuple[str, ...] = ("7b", "1b")
    pairs: tuple[str, str] = ("7b", "1b")
    starts: tuple[int, ...] = (250, 506, 2042)
    prompts: tuple[int, ...] = (500, 2000)
    chain: int = 600
    text: int = 128
    cut: int = 1500
    repeats: int = 20

    @property
    def rehearses(self) -> bool:
        return self.device.type == "cpu"

    @property
    def wider(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float32 else torch.float32

    def bound(self, words: str) -> str:
        """The bound of a figure; none in a rehearsal."""
        return "" if self.rehearses else words

    def ours(self, model: Any, context: int, **options: Any) -> ForwardRunner:
        """In a rehearsal by our C, which records nothing."""
        if not self.rehearses:
            return KernelRunner(model, context, **options)
        for name in ("record", "records"):
            options.pop(name, None)
        return CpuRunner(model, context, **options)

    def runner(self, shape: str, context: int, **options: Any) -> ForwardRunner:
        return self.ours(random_model(shape, self.device, self.dtype), context, **options)

    def theirs(self, shape: str, context: int, dtype: torch.dtype | None = None) -> HFRunner:
        """dtype: in which the same weights are computed."""
        model: Any = random_model(shape, self.device, self.dtype)
        return HFRunner(model.to(dtype or self.dtype), context)


REHEARSAL = Scale(
    torch.device("cpu"), torch.float32, "tiny", ("tiny",), ("tiny-8-layers", "tiny-8-layers"), (250, 506), (60, 520),
    24, 16, 300, 2,
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """One result of a step.

    Attributes:
        must: its bound, in words; empty: none.
        summary: its words in the short table; empty: it is not in it, unless it has failed.
    """

    what: str
    value: float
    unit: str = ""
    must: str = ""
    passed: bool = True
    detail: str = ""
    summary: str = ""

    def __str__(self) -> str:
        words = f"{self.what}: {self.value:.4g} {self.unit}"
        if self.detail:
            words += f" ({self.detail})"
        if self.must:
            words += f"  must be {self.must}: {'pass' if self.passed else 'FAIL'}"
        return words


def none_of(what: str, count: int, detail: str = "", summary: str = "") -> Measurement:
    """Return a count that must be 0."""
    return Measurement(what, count, "", "0", count == 0, detail, summary)


def rows(scale: Scale) -> Iterator[Measurement]:
    """Logits are the same bits however a text is cut, in tables of any size, with other texts, whole weights or not."""
    total = 0
    differ = 0
    cases: list[tuple[Rounding, bool]] = [("", False)]
    cases += [(rounding, True) for rounding in ROUNDINGS]
    for rounding, records in cases:
        began = time.perf_counter()
        runner = scale.runner(scale.wide, scale.cut, records=records, slots=3, rounding=rounding)
        name = f"{rounding or 'whole'}, {'recorded' if records else 'eager'}"
        yield Measurement(f"{name}: loaded", time.perf_counter() - began, "s")
        table = _table_of(scale, runner, name)
        yield table
        cuts = compare_cuts(runner, name, scale.cut, piece=int(table.value))
        differing_cuts = cuts.count - cuts.equal
        yield none_of(f"{cuts.what}: of {cuts.count} rows differ", differing_cuts, cuts.first)
        count, differing = _with_others(runner)
        yield none_of(f"{name}, three slots in one forward: of {count} rows differ", differing)
        total += cuts.count + count
        differ += differing_cuts + differing
    words = f"{differ} of {total} rows differ; 3 slots, trees, 16, 8 and 4 bits"
    yield none_of("all in all", differ, f"of {total}", words)


def _table_of(scale: Scale, runner: ForwardRunner, name: str) -> Measurement:
    """Return the rows of the largest table, fewer where larger ones have been given up."""
    most = FED if scale.rehearses else runner.capabilities.tree_nodes
    must = scale.bound(f"{max(SIZES)}")
    return Measurement(
        f"{name or 'bfloat16'}: rows of a table",
        most,
        must=must,
        passed=not must or most == max(SIZES),
        summary="" if name else f"tables of up to {most} rows",
    )


def _with_others(runner: ForwardRunner) -> tuple[int, int]:
    """Return (rows of two chains and a tree in one forward, how many differ from those of each fed alone).

    Alone, the longest chain is fed in pieces, and the tree's path as a chain.
    """
    tokens = tokens_of(runner, 300)
    nodes = min(20, runner.capabilities.tree_nodes)
    count = max(2, nodes) - 1
    path = Feed(tokens[50 : 50 + count], count, 2)
    tree = path
    if nodes:  # another first node before the path
        tree = Feed(tokens[49 : 50 + count], count, 2, (-1, -1, *range(1, count)))
    short = Feed(tokens[30:39], 9, 1)
    pieces = [[Feed(tokens[start : start + 5], 5)] for start in range(0, 20, 5)]
    together = _after_prompts(runner, tokens, [[Feed(tokens[:20], 20), short, tree]])
    alone = _after_prompts(runner, tokens, [*pieces, [short], [path]])
    return len(together), int((together != alone).any(-1).sum())


def _after_prompts(
    runner: ForwardRunner, tokens: Sequence[int], forwards: Sequence[Sequence[Feed]]
) -> torch.Tensor:
    """Return the logits of all forwards, after a prompt in each of three slots."""
    for slot, start in enumerate((100, 250, 37)):
        runner.rollback(0, slot)
        feed_chain(runner, tokens[:start], 1, slot, prompt=True)
    rows: list[torch.Tensor] = []
    for feeds in forwards:
        rows += runner.forward(feeds)
    return torch.cat(rows)


def tokens_of(runner: ModelRunner, count: int) -> list[int]:
    return [(7 + 5 * i + i * i) % runner.vocab_size for i in range(count)]


def families(scale: Scale) -> Iterator[Measurement]:
    """Compare tiny models of other families with transformers, bounded by its own difference from a wider dtype."""
    context = 400
    worst = 0.0
    for name in FAMILIES:
        models: list[Any] = [random_family(name, scale.device, scale.dtype) for _ in range(3)]
        ours = scale.ours(models[0], context)
        theirs = HFRunner(models[1], context)
        exact = HFRunner(models[2].to(scale.wider), context)
        tokens = tokens_of(ours, context)
        off = 0.0
        rounding = 0.0
        start = 0
        for count in (300, 1, 5, 16, 40):  # a prompt, and texts after it
            fed = tokens[start : start + count]
            ours_rows, theirs_rows, exact_rows = (
                feed_chain(runner, fed, min(count, 40), 0, start == 0)
                for runner in (ours, theirs, exact)
            )
            off = max(off, _distance(ours_rows, theirs_rows))
            rounding = max(rounding, _distance(theirs_rows, exact_rows))
            start += count
        has_prompts = ours.capabilities.prompt_piece == PREFILL
        must = scale.bound("1")
        passed = has_prompts or scale.rehearses
        yield Measurement(f"{name}: our kernels of prompts", float(has_prompts), "", must, passed)
        most = _TOLERANCE * rounding
        what = f"{name}: off from transformers"
        yield Measurement(what, off, "of the norm", f"at most {most:.2g}", off <= most)
        worst = max(worst, off / rounding)
    words = f"{len(FAMILIES)} families, off by {worst:.2f} of transformers' own error"
    yield Measurement(f"off from transformers, over that from {scale.wider}", worst, summary=words)


def recordings(scale: Scale) -> Iterator[Measurement]:
    """Measure number, time and memory of the recordings made when a model is loaded; none is made later."""
    milliseconds: list[float] = []
    sizes: list[float] = []
    plain = None if scale.rehearses else record_on_gpu(scale.device)

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        assert plain is not None
        reserved = _reserved(scale)
        began = time.perf_counter()
        replay = plain(work)
        synchronize(scale.device)
        milliseconds.append((time.perf_counter() - began) * 1e3)
        sizes.append(_reserved(scale) - reserved)
        return replay

    context = 8192
    runner = scale.runner(scale.wide, context, record=record)
    expected = 0 if scale.rehearses else len(SIZES) + 1  # one for all pieces of prompts
    count = len(sizes)
    memory = sum(sizes) / 1e6
    yield _table_of(scale, runner, "")
    yield Measurement(
        "recordings at load",
        count,
        must=f"{expected}",
        passed=count == expected,
        summary=f"{count} recordings",
    )
    yield Measurement("one takes at most", max(milliseconds, default=0.0), "ms")
    yield Measurement("all take", memory, "MB", summary=f"{memory:.0f} MB")
    feed_chain(runner, [5] * 700, 1, prompt=True)
    for fed in (3, 40):
        feed_chain(runner, [5] * fed, 1)
    yield none_of("made amid a text", len(sizes) - count)


def _reserved(scale: Scale) -> float:
    if scale.rehearses:
        return 0.0
    free, total = torch.cuda.mem_get_info(scale.device)
    return float(total - free)


def graphs(scale: Scale) -> Iterator[Measurement]:
    """Compare recorded forwards of 1 to 64 tokens with eager ones, ours and transformers', also in a wider dtype."""
    context = max(scale.starts) + max(SIZES)
    recorded = scale.runner(scale.wide, context)
    eager = scale.runner(scale.wide, context, records=False)
    theirs = scale.theirs(scale.wide, context)
    exact = scale.theirs(scale.wide, context, scale.wider)
    tokens = tokens_of(recorded, context)
    differ = 0
    not_finite = 0
    worst = 0.0
    rounding = 0.0
    gaps: list[float] = []  # between the two likeliest tokens, where ours and theirs differ
    for start in scale.starts:
        for runner in (recorded, eager, theirs, exact):
            runner.rollback(0)
            feed_chain(runner, tokens[:start], 1)
        for count in (1, 2, 3, 5, 8, 13, FED, 33, max(SIZES)):
            fed = tokens[start : start + count]
            ours_rows = _fed(recorded, start, fed)
            theirs_rows = _fed(theirs, start, fed)
            differ += int((ours_rows != _fed(eager, start, fed)).any(-1).sum())
            worst = max(worst, _distance(ours_rows, theirs_rows))
            rounding = max(rounding, _distance(theirs_rows, _fed(exact, start, fed)))
            top = theirs_rows.topk(2).values
            gap = (top[:, 0] - top[:, 1]) / theirs_rows.square().mean(-1).sqrt()
            gaps += gap[ours_rows.argmax(-1) != theirs_rows.argmax(-1)].tolist()
        with torch.inference_mode():
            recorded.slots.keys[..., start:, :] = torch.nan
        recorded.slots.wrote(0, recorded.slots.keys.shape[3])
        recorded.rollback(start - 1)
        not_finite += int((~_fed(recorded, start - 1, tokens[:4]).isfinite()).any(-1).sum())
    most = _TOLERANCE * rounding
    words = f"{differ} rows unlike eager"
    yield none_of("rows whose recorded bits are not the eager ones", differ, summary=words)
    yield Measurement(
        "largest difference from transformers",
        worst,
        "of the norm",
        f"at most {most:.2g}",
        worst <= most,
        f"transformers' own from {scale.wider}: {rounding:.2g}",
    )
    off = worst / rounding
    words = f"off by {off:.2f} of transformers' error"
    yield Measurement("that over transformers' own", off, summary=words)
    swapped = sum(gap > _NEAR * most for gap in gaps)
    yield none_of("rows with another likeliest token, no near tie", swapped)
    yield none_of("rows that see a NaN after a rollback", not_finite)


def _distance(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest difference of two rows, as a share of the reference's norm."""
    return float(((rows - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def _fed(runner: ModelRunner, start: int, tokens: Sequence[int]) -> torch.Tensor:
    runner.rollback(start)
    with torch.inference_mode():
        return feed_chain(runner, tokens, len(tokens))


def chains(scale: Scale) -> Iterator[Measurement]:
    """Chained forwards draft the tokens of single ones, and keep the device busy."""
    prompt = tuple(range(5, 25))
    runner = scale.runner(scale.wide, len(prompt) + scale.chain + 1)
    differ = 0
    for name, sampling in _SAMPLINGS.items():
        options = sampling.resolved()
        single = draft_text(runner, prompt, scale.chain, False, options)
        chained = draft_text(runner, prompt, scale.chain, True, options)
        with_lookup = options.changed(draft_lookup=METHODS["pearl"].draft_lookup)
        looked_up = draft_text(runner, prompt, scale.chain, True, with_lookup)
        for what, drafted in (("chained", chained), ("with lookup", looked_up)):
            pairs = zip(single.tokens, drafted.tokens, strict=True)
            count = sum(token != other for token, other in pairs)
            differ += count
            yield none_of(f"{name}, {what}: tokens that differ", count)
        must = scale.bound(f"at least {_LEAST_BUSY:.0%}")
        milliseconds = chained.seconds * 1e3
        summary = f"{name}: {chained.busy:.0%} busy, {milliseconds:.2f} ms a token"
        yield Measurement(
            f"{name}: the chain is busy",
            100 * chained.busy,
            "%",
            must,
            not must or chained.busy >= _LEAST_BUSY,
            summary=summary if name == "greedy" else "",
        )
        detail = f"one by one {single.seconds * 1e3:.2f} ms"
        yield Measurement(f"{name}: a token, chained", milliseconds, "ms", detail=detail)
    yield none_of("all in all, tokens that differ", differ, summary=f"{differ} tokens differ")


class DraftedText(NamedTuple):
    """Drafted tokens, the share of the time in which the device computed, and seconds per token."""

    tokens: list[int]
    busy: float
    seconds: float


def draft_text(
    runner: ModelRunner, prompt: Sequence[int], count: int, chained: bool, options: RequestOptions
) -> DraftedText:
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chained))
    runner.rollback(0)
    text = list(prompt)
    end = len(prompt) + count
    fed = 0
    worked = 0.0
    began = 0.0
    with closing(DraftThread(executor, lambda: True)) as draft_thread:
        draft_thread.execute(Open(tuple(prompt), options))
        while len(text) < end:
            event = draft_thread.execute(Draft(fed, tuple(text[fed:]), end - len(text)))
            assert isinstance(event, Drafted)
            if len(text) == len(prompt):  # the prompt's forward is not part of the chain
                began = time.perf_counter()
            else:
                worked += event.seconds + event.draw
            fed = len(text) + event.cached
            text.extend(event.tokens)
    seconds = time.perf_counter() - began
    return DraftedText(text[len(prompt) :], worked / seconds, seconds / (count - 1))


FORWARDS: dict[str, Callable[[Scale], Iterator[Measurement]]] = {
    "rows": rows, "recordings": recordings, "graphs": graphs, "families": families, "chains": chains,
}  # fmt: skip
