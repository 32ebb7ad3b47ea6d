"""Steps of `prove_gpu` that compare forwards and drafted texts; the sizes and figures of all its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from bench_forward import synchronize
from random_models import FAMILIES, random_family, random_model

from pearl.config.options import RequestOptions
from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import Ahead
from pearl.lab.bench.exactness import compare_cuts
from pearl.models.forward.linear_layers import Rounding
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import FED, Record, Rows, ends, record_on_gpu
from pearl.models.gpu.row_table import SIZES
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.models.transformers.runner import HFRunner
from pearl.protocol.events import Draft, Drafted, Open
from pearl.spec.methods import DRAFT_LOOKUP

_TOLERANCE = (
    2.0  # bound on our difference from transformers, times that of transformers from a wider dtype
)
_NEAR = (
    5.0  # times that bound, relative to a row's root mean square: nearer logits may change places
)
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
        starts: tokens in the cache when forwards are compared: around the ends of recordings.
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
    def record(self) -> Record | None:
        """In a rehearsal nothing is recorded, each replay computes."""
        return (lambda work: work) if self.rehearses else None

    @property
    def wider(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float32 else torch.float32

    def bound(self, words: str) -> str:
        """The bound of a figure; none in a rehearsal."""
        return "" if self.rehearses else words

    def ours(self, model: Any, context: int, **options: Any) -> ForwardRunner:
        given = {"record": self.record, "kernels": None if self.rehearses else True} | options
        return ForwardRunner(model, context, **given)

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
class Figure:
    """One result of a step.

    Attributes:
        must: its bound, in words; empty: none.
        summary: what the short table says of it; empty: nothing, unless it has failed.
    """

    what: str
    value: float
    unit: str = ""
    must: str = ""
    passed: bool = True
    detail: str = ""
    summary: str = ""

    def __str__(self) -> str:
        mark = (
            "" if not self.must else f"  must be {self.must}: {'pass' if self.passed else 'FAIL'}"
        )
        return f"{self.what}: {self.value:.4g} {self.unit}{f' ({self.detail})' if self.detail else ''}{mark}"


def none_of(what: str, count: int, detail: str = "", summary: str = "") -> Figure:
    """A count that must be 0."""
    return Figure(what, count, "", "0", count == 0, detail, summary)


def rows(scale: Scale) -> Iterator[Figure]:
    """Logits are the same bits however a text is cut, in tables of any size, beside others, whole weights or not."""
    seen = differ = 0
    for rounding, records in (("", False), *((each, True) for each in ROUNDINGS)):
        began = time.perf_counter()
        runner = scale.runner(scale.wide, scale.cut, records=records, slots=3, rounding=rounding)
        name = f"{rounding or 'whole'}, {'recorded' if records else 'eager'}"
        yield Figure(f"{name}: loaded", time.perf_counter() - began, "s")
        yield (table := _table_of(scale, runner, name))
        found = compare_cuts(runner, name, scale.cut, piece=int(table.value))
        yield none_of(
            f"{found.what}: of {found.count} rows differ", found.count - found.equal, found.first
        )
        count, others = _beside_others(runner)
        yield none_of(f"{name}, three slots in one forward: of {count} rows differ", others)
        seen, differ = seen + found.count + count, differ + found.count - found.equal + others
    words = f"{differ} of {seen} rows differ; 3 slots, trees, 16, 8 and 4 bits"
    yield none_of("all in all", differ, f"of {seen}", words)


def _table_of(scale: Scale, runner: ForwardRunner, name: str) -> Figure:
    """Rows of the largest table, fewer where our kernels are not used or larger ones have been given up."""
    most, must = runner._decode.most if runner._decode else FED, scale.bound(f"{max(SIZES)}")
    passed, summary = not must or most == max(SIZES), "" if name else f"tables of up to {most} rows"
    return Figure(f"{name or 'bfloat16'}: rows of a table", most, "", must, passed, summary=summary)


def _beside_others(runner: ForwardRunner) -> tuple[int, int]:
    """Rows of two chains and a tree in one forward, and how many differ from those of each fed alone: the longest chain
    in pieces, the tree's path as a chain.
    """
    tokens, nodes = tokens_of(runner, 300), min(20, runner.capabilities.tree_nodes)
    count = max(2, nodes) - 1
    tree = path = Feed(tokens[50 : 50 + count], count, 2)
    if nodes:  # another first node before the path
        tree = Feed(tokens[49 : 50 + count], count, 2, (-1, -1, *range(1, count)))
    chain, other, cut = Feed(tokens[:20], 20), Feed(tokens[30:39], 9, 1), range(0, 20, 5)
    made = []
    for forwards in (
        [[chain, other, tree]],
        [[Feed(tokens[at : at + 5], 5)] for at in cut] + [[other], [path]],
    ):
        for slot, start in enumerate((100, 250, 37)):
            runner.rollback(0, slot)
            feed_chain(runner, tokens[:start], 1, slot, prompt=True)
        made.append(torch.cat([found for feeds in forwards for found in runner.forward(feeds)]))
    return len(made[0]), int((made[0] != made[1]).any(-1).sum())


def tokens_of(runner: ModelRunner, count: int) -> list[int]:
    return [(7 + 5 * i + i * i) % runner.vocab_size for i in range(count)]


def families(scale: Scale) -> Iterator[Figure]:
    """Tiny models of other families: ours against transformers, bounded by what that is off from a wider dtype."""
    context, worst = 400, 0.0
    for name in FAMILIES:
        models: list[Any] = [random_family(name, scale.device, scale.dtype) for _ in range(3)]
        ours, theirs = scale.ours(models[0], context), HFRunner(models[1], context)
        exact, tokens = HFRunner(models[2].to(scale.wider), context), tokens_of(ours, context)
        off = rounding = 0.0
        at, has = (
            0,
            ours._decode is not None
            and ours._graphs is not None
            and ours._graphs.prompts is not None,
        )
        for count in (300, 1, 5, 16, 40):  # a prompt, and what follows it
            given = tokens[at : at + count], min(count, 40), 0, at == 0
            mine, other, right = (feed_chain(runner, *given) for runner in (ours, theirs, exact))
            off, rounding, at = (
                max(off, _distance(mine, other)),
                max(rounding, _distance(other, right)),
                at + count,
            )
        most = _TOLERANCE * rounding
        yield Figure(
            f"{name}: our kernels", float(has), "", scale.bound("1"), has or scale.rehearses
        )
        yield Figure(
            f"{name}: off from transformers", off, "of the norm", f"at most {most:.2g}", off <= most
        )
        worst = max(worst, off / rounding)
    words = f"{len(FAMILIES)} families, off by {worst:.2f} of transformers' own error"
    yield Figure(f"off from transformers, over that from {scale.wider}", worst, summary=words)


def recordings(scale: Scale) -> Iterator[Figure]:
    """Number, time and memory of the recordings made when a model is loaded; none is made later."""
    made: list[tuple[float, float]] = []
    plain = scale.record or record_on_gpu(scale.device)

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        before, began = _reserved(scale), time.perf_counter()
        replay = plain(work)
        synchronize(scale.device)
        made.append((time.perf_counter() - began, _reserved(scale) - before))
        return replay

    context = 8192
    runner = scale.runner(scale.wide, context, record=record)
    decode, graphs_ = runner._decode, runner._graphs
    expected = len(SIZES) if decode is not None else len(ends(context, runner._room))
    expected += graphs_ is not None and graphs_.prompts is not None  # one for all pieces of prompts
    memory = sum(size for _, size in made) / 1e6
    yield _table_of(scale, runner, "")
    is_right, summary = len(made) == expected, f"{len(made)} recordings"
    yield Figure("recordings at load", len(made), "", f"{expected}", is_right, summary=summary)
    yield Figure(
        "one takes at most", max((seconds for seconds, _ in made), default=0.0) * 1e3, "ms"
    )
    yield Figure("all take", memory, "MB", summary=f"{memory:.0f} MB")
    count = len(made)
    feed_chain(runner, [5] * 700, 1, prompt=True)
    for fed in (3, 40):
        feed_chain(runner, [5] * fed, 1)
    yield none_of("made amid a text", len(made) - count)


def _reserved(scale: Scale) -> float:
    free, total = (0, 0) if scale.rehearses else torch.cuda.mem_get_info(scale.device)
    return float(total - free)


def graphs(scale: Scale) -> Iterator[Figure]:
    """Recorded forwards of 1 to 64 tokens against eager ones, ours and those of transformers, also in a wider dtype."""
    context = max(scale.starts) + max(SIZES)
    recorded, eager = (
        scale.runner(scale.wide, context),
        scale.runner(scale.wide, context, records=False),
    )
    theirs, exact = (
        scale.theirs(scale.wide, context),
        scale.theirs(scale.wide, context, scale.wider),
    )
    tokens = tokens_of(recorded, context)
    differ = seen = 0
    worst = rounding = 0.0
    gaps: list[
        float
    ] = []  # between the likeliest tokens, in rows where ours and theirs are not the same
    for start in scale.starts:
        for runner in (recorded, eager, theirs, exact):
            runner.rollback(0)
            feed_chain(runner, tokens[:start], 1)
        for fed in (1, 2, 3, 5, 8, 13, FED, 33, max(SIZES)):
            ours, plain, other, right = (
                _fed(runner, start, tokens[start : start + fed])
                for runner in (recorded, eager, theirs, exact)
            )
            differ += int((ours != plain).any(-1).sum())
            worst, rounding = (
                max(worst, _distance(ours, other)),
                max(rounding, _distance(other, right)),
            )
            top = other.topk(2).values
            gap = (top[:, 0] - top[:, 1]) / other.square().mean(-1).sqrt()
            gaps += gap[ours.argmax(-1) != other.argmax(-1)].tolist()
        with torch.inference_mode():
            recorded._slots.keys[..., start:, :] = torch.nan
        recorded._slots.wrote(0, recorded._room)
        recorded.rollback(start - 1)
        seen += int((~_fed(recorded, start - 1, tokens[:4]).isfinite()).any(-1).sum())
    most = _TOLERANCE * rounding
    bound = (
        f"at most {most:.2g}",
        worst <= most,
        f"transformers' own from {scale.wider}: {rounding:.2g}",
    )
    yield none_of(
        "rows whose recorded bits are not the eager ones",
        differ,
        summary=f"{differ} rows unlike eager",
    )
    yield Figure("largest difference from transformers", worst, "of the norm", *bound)
    off = worst / rounding
    yield Figure(
        "that over transformers' own", off, summary=f"off by {off:.2f} of transformers' error"
    )
    swapped = sum(gap > _NEAR * most for gap in gaps)
    yield none_of("rows with another likeliest token, no near tie", swapped)
    yield none_of("rows that see a NaN after a rollback", seen)


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference of two rows, as a share of the norm of the other."""
    return float(((some - others).norm(dim=-1) / others.norm(dim=-1)).max())


def _fed(runner: ModelRunner, start: int, tokens: Sequence[int]) -> torch.Tensor:
    runner.rollback(start)
    with torch.inference_mode():
        return feed_chain(runner, tokens, len(tokens))


def chains(scale: Scale) -> Iterator[Figure]:
    """Chained forwards draft the tokens of single ones, and keep the device busy."""
    prompt = tuple(range(5, 25))
    runner = scale.runner(scale.wide, len(prompt) + scale.chain + 1)
    differ = 0
    for name, chosen in _SAMPLINGS.items():
        options = chosen.resolved()
        single, _, apart = draft_text(runner, prompt, scale.chain, False, options)
        chained, busy, together = draft_text(runner, prompt, scale.chain, True, options)
        looked_up, _, _ = draft_text(
            runner, prompt, scale.chain, True, options.changed(draft_lookup=DRAFT_LOOKUP)
        )
        pairs = ((single, chained), "chained"), ((single, looked_up), "with lookup")
        found = {what: sum(a != b for a, b in zip(*both, strict=True)) for both, what in pairs}
        differ += sum(found.values())
        for what, count in found.items():
            yield none_of(f"{name}, {what}: tokens that differ", count)
        must = scale.bound(f"at least {_LEAST_BUSY:.0%}")
        is_busy, summary = (
            not must or busy >= _LEAST_BUSY,
            f"{name}: {busy:.0%} busy, {together * 1e3:.2f} ms a token",
        )
        summary = summary if name == "greedy" else ""
        yield Figure(f"{name}: the chain is busy", 100 * busy, "%", must, is_busy, summary=summary)
        detail = f"one by one {apart * 1e3:.2f} ms"
        yield Figure(f"{name}: a token, chained", together * 1e3, "ms", detail=detail)
    yield none_of("all in all, tokens that differ", differ, summary=f"{differ} tokens differ")


def draft_text(
    runner: ModelRunner, prompt: Sequence[int], count: int, chained: bool, options: RequestOptions
) -> tuple[list[int], float, float]:
    """The tokens, the share of the time in which the device computed, and seconds per token."""
    executor = DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chained))
    runner.rollback(0)
    text, fed, worked, began = [*prompt], 0, 0.0, 0.0
    with closing(Ahead(executor, lambda: True)) as ahead:
        ahead.execute(Open(tuple(prompt), options))
        while len(text) < len(prompt) + count:
            event = ahead.execute(Draft(fed, tuple(text[fed:]), len(prompt) + count - len(text)))
            assert isinstance(event, Drafted)
            if len(text) == len(prompt):  # the prompt's forward is not part of the chain
                began = time.perf_counter()
            else:
                worked += event.seconds + event.draw
            fed = len(text) + event.cached
            text.extend(event.tokens)
    took = time.perf_counter() - began
    return text[len(prompt) :], worked / took, took / (count - 1)


FORWARDS: dict[str, Callable[[Scale], Iterator[Figure]]] = {
    "rows": rows, "recordings": recordings, "graphs": graphs, "families": families, "chains": chains,
}  # fmt: skip
