"""Row tables by our GPU kernels in Triton's interpreter: bits of chains, trees and slots, and the check at load.

In float32, because of what `test_interpreter` shows; `test_gpu_path` compares bits of bfloat16 on a GPU.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pearl.models.feeds import Feed, paths
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.check import KernelsUnfit
from pearl.models.gpu.recordings import FED, Rows, not_recorded
from pearl.models.gpu.row_table import MOST_PARTS, lay_tables, numbers, numbers_of
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import feed_chain
from tests.kernels import (  # skips without Triton
    ONE_LAYER,
    ROWS,
    WINDOWS,
    fed_both,
    model_of,
    runner_of,
    shared,
    text,
)
from tests.kernels import no_prompts as no_prompts  # a fixture for all

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime.errors import OutOfResources  # isort: skip

from pearl.models.gpu import (
    attention_kernels,
    expert_kernels,
    tile_kernels,
    token_forward,
)


def test_tables() -> None:
    """Chains are cut where a table is full, trees are not; rows that look at parts of other lengths are other tiles."""
    feeds = [Feed(text(20), 1), Feed(text(14), 1, 1, (-1, *range(13))), Feed(text(2), 1, 2)]
    tables = lay_tables(feeds, [1020, 100, 0], ROWS)
    assert [
        [(piece.feed, piece.begin, piece.end, piece.row) for piece in table] for table in tables
    ] == [
        [(0, 0, 16, 0)],
        [(0, 16, 20, 0)],
        [(1, 0, 14, 0), (2, 0, 2, 14)],
    ]
    flat = numbers(feeds, tables[0], ROWS)
    assert flat[0] == 2
    assert flat[1 + 2 * ROWS : 1 + 3 * ROWS] == [16] * 4 + [9] * 12  # parts that each row sees
    # first, rows, feed, fed, slot, start, span, begin, parts, apart: position 1023 is the last with parts of 64
    assert flat[1 + 3 * ROWS :] == [
        0,
        4,
        0,
        16,
        0,
        1020,
        64,
        0,
        16,
        0,
        4,
        12,
        0,
        16,
        0,
        1020,
        128,
        0,
        9,
        0,
    ]
    assert FED == ROWS == expert_kernels.ROWS.value
    assert attention_kernels.MOST_PARTS.value == MOST_PARTS
    chain = numbers([Feed(text(40), 1)], lay_tables([Feed(text(40), 1)], [0], 64)[0], 64)
    assert chain[0] == 3  # tiles of 16 rows
    flat = numbers(
        feeds, tables[2], ROWS
    )  # the part before the tree for all its rows, then each row's own
    assert flat[1 + 3 * ROWS :][:20] == [
        0,
        14,
        0,
        14,
        1,
        100,
        64,
        0,
        1,
        0,
        0,
        14,
        0,
        14,
        1,
        100,
        64,
        1,
        2,
        1,
    ]
    tree = [Feed(text(64), 1, 0, (-1, *range(63)))]
    flat = numbers(tree, lay_tables(tree, [500], 64)[0], 64)
    assert len(flat) == numbers_of(64)
    assert torch.tensor(flat[-8:]).view(torch.uint8).tolist() == [
        *range(64)
    ]  # the path of the last node


@pytest.fixture(scope="module", params=["one layer", "experts"])
def runner(request: pytest.FixtureRequest) -> ForwardRunner:
    return shared(request.param)


@ONE_LAYER
def test_bits_depend_on_no_company_slot_or_cut(runner: ForwardRunner) -> None:
    runner.rollback(0)
    feed_chain(runner, text(60), 1, prompt=True)
    runner.fork(0, 1)
    (whole,) = runner.forward([Feed(text(ROWS, 1), ROWS)])
    for cut in ([1, 3, 12], [10, 6]):
        runner.rollback(0, 2)
        runner.rollback(60, 1)
        at, found = 0, []
        for count in cut:
            company = [Feed(text(2, count), 2, 2)] if at else []
            found.append(
                runner.forward([*company, Feed(text(ROWS, 1)[at : at + count], count, 1)])[-1]
            )
            at += count
        assert torch.equal(torch.cat(found), whole)


@ONE_LAYER
@pytest.mark.parametrize(("start", "count"), [(0, 16), (59, 9), (505, 16), (40, 40)])
def test_a_trees_nodes_have_the_bits_of_their_path(start: int, count: int) -> None:
    """In the first part, across two, over 512 positions, and more nodes than a small table has."""
    runner, order = shared("one layer"), random.Random(start)
    parents = [max(-1, node - order.choice((1, 1, 2, 5))) for node in range(count)]
    runner.rollback(0, 2)
    feed_chain(runner, text(start + 1), 1, 2, prompt=True)
    runner.rollback(start, 2)
    (nodes,) = (
        rows.clone() for rows in runner.forward([Feed(text(count, 1), count, 2, tuple(parents))])
    )
    runner.rollback(start, 2)
    for leaf in {*range(count)} - {*parents}:
        path = list(paths(parents)[leaf])
        alone = feed_chain(runner, [text(count, 1)[node] for node in path], len(path), 2)
        assert torch.equal(nodes[path], alone), path
        runner.rollback(start, 2)


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("name", ["one layer", WINDOWS])
def test_parts_of_two_blocks_and_the_end_of_the_cache(name: str) -> None:
    """All 16 parts of 64 positions, then parts of 128; a chain and a tree over that border, which ends the cache."""
    both = runner_of(name, context=1030), runner_of(name, kernels=False, context=1030)
    for runner in both:
        feed_chain(runner, text(1015), 1, prompt=True)
        feed_chain(runner, text(1022, 5), 1, 1, prompt=True)
    parents = (*range(-1, 7), 0)  # the last node is not the deepest
    _, nodes = fed_both(both, Feed(text(7, 2), 7), Feed(text(9, 1), 9, 1, parents))
    (rows,) = fed_both(both, Feed(text(8, 3), 8))  # to the last position
    both[0].rollback(1022)
    both[0].rollback(1022, 1)
    alone = both[0].forward([Feed(text(8, 3), 8), Feed(text(8, 1), 8, 1)])
    assert torch.equal(alone[0], rows)
    assert torch.equal(alone[1], nodes[:8])


@pytest.mark.usefixtures("unchecked_tables")
def test_a_tile_of_a_tree_may_begin_with_a_deep_node() -> None:
    """Its last rows, at the tree's root, see a block of positions that the window of the first does not reach."""
    both = runner_of("mistral", context=300), runner_of("mistral", kernels=False, context=300)
    for runner in both:
        feed_chain(runner, text(184), 1, prompt=True)
    fed_both(both, Feed(text(19, 1), 19, 0, (*range(-1, 16), -1, 0)))


@ONE_LAYER
def test_two_trees_in_one_table() -> None:
    """Behind a chain; one is deep, and has more nodes than a tile has rows. Then the table held other trees."""
    runner, starts = shared("one layer"), (50, 60, 100)
    shapes = (-1, 0, 0, 1, 2, 4, -1, 5), (*range(-1, 19), 3, 10)
    trees = [
        Feed(text(len(parents), slot), len(parents), slot, parents)
        for slot, parents in enumerate(shapes, 1)
    ]
    found = []
    for feeds in ([Feed(text(7), 7), *trees], trees[1:], trees[:1], [Feed(text(20, 2), 20, 2)]):
        for slot, start in enumerate(starts):
            runner.rollback(0, slot)
            feed_chain(runner, text(start, slot), 1, slot, prompt=True)
        found.append(runner.forward(feeds))
    (_, few, many), (many_alone,), (few_alone,), (path,) = found
    assert torch.equal(few, few_alone)
    assert torch.equal(many, many_alone)
    assert torch.equal(many[:20], path)


@pytest.mark.usefixtures("small_tables")
def test_features_of_a_tree_behind_another_feed() -> None:
    runner = KernelRunner(model_of(WINDOWS), 100, slots=2, record=not_recorded, taps=(2, 0, 1))
    tree, found = Feed(text(4, 1), 1, 1, (-1, 0, 0, 2)), []
    for beside in ([Feed(text(3), 1)], []):
        feed_chain(runner, text(20, 2), 1, 1, prompt=True)
        runner.forward([*beside, tree])
        found.append(runner.features(1))
        runner.rollback(0, 1)
    assert torch.equal(*found)


@pytest.mark.usefixtures("small_tables")
def test_all_feeds_are_one_forward() -> None:
    ran: list[int] = []  # the size of each table that is computed

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        def replay() -> Rows:
            logits, features = work()
            ran.append(len(logits))
            return logits, features

        return replay

    runner = KernelRunner(model_of("one layer"), 100, slots=4, record=record)
    feed_chain(runner, text(20), 1, prompt=True)
    runner.fork(0, 3)
    ran.clear()
    feeds = Feed(text(3), 1), Feed(text(4, 2), 4, 1), Feed(text(5, 1), 5, 3, (-1, 0, 0, 1, -1))
    together = runner.forward(feeds)
    assert ran == [ROWS]
    for slot, length in ((0, 20), (1, 0), (3, 20)):
        runner.rollback(length, slot)
    for feed, rows in zip(feeds, together, strict=True):
        assert torch.equal(runner.forward([feed])[0], rows)


@ONE_LAYER
def test_bits_do_not_depend_on_the_size_of_the_table() -> None:
    """Chains and a tree in three slots: in two tables of 64 rows, then 16 rows at a time."""
    runner = shared("one layer")
    feeds = [
        Feed(text(40, 1), 40),
        Feed(text(9, 2), 9, 1),
        Feed(text(18, 3), 18, 2, (-1, *range(16), 0)),
    ]
    found = []
    for together in (True, False):
        for slot in range(3):
            runner.rollback(0, slot)
            feed_chain(runner, text(50, slot), 1, slot, prompt=True)
        if together:
            assert len(lay_tables(feeds, [50] * 3, runner.capabilities.tree_nodes)) == 2
            found.append(runner.forward(feeds))
            assert runner.length(0) == 90
        else:
            alone = [feed_chain(runner, text(40, 1)[at : at + 10], 10) for at in range(0, 40, 10)]
            tree = Feed(text(18, 3)[:16], 16, 2, (-1, *range(15)))
            found.append(
                [torch.cat(alone), feed_chain(runner, text(9, 2), 9, 1), *runner.forward([tree])]
            )
    (chain, other, tree), (chain_alone, other_alone, tree_alone) = found
    assert torch.equal(chain, chain_alone)
    assert torch.equal(other, other_alone)
    assert torch.equal(tree[:16], tree_alone)


@ONE_LAYER
def test_bits_do_not_depend_on_the_size_of_the_table_behind_five_parts() -> None:
    runner = shared("one layer")
    runner.rollback(0)
    feed_chain(runner, text(270), 1, prompt=True)
    whole = feed_chain(runner, text(40, 1), 40)
    runner.rollback(270)
    apart = [feed_chain(runner, text(40, 1)[at : at + 10], 10) for at in range(0, 40, 10)]
    assert torch.equal(torch.cat(apart), whole)


_FORWARD = token_forward.Decode.forward


def other_bits(work: Callable[[], Rows]) -> Callable[[], Rows]:
    def replay() -> Rows:
        logits, features = work()
        if len(logits) > ROWS:
            logits = logits * (1 + 1e-6)
        return logits, features

    return replay


def wrong_rows(work: Callable[[], Rows]) -> Callable[[], Rows]:
    def replay() -> Rows:
        logits, features = work()
        return logits.roll(1, 1), features

    return replay


def by_length(self: token_forward.Decode, feeds: Sequence[Feed]) -> list[Any]:
    found = zip(_FORWARD(self, feeds), feeds, strict=True)
    return [(rows * (1 + 1e-6 * (len(feed.tokens) == 1)), more) for (rows, more), feed in found]


def by_tree(self: token_forward.Decode, feeds: Sequence[Feed]) -> list[Any]:
    found = zip(_FORWARD(self, feeds), feeds, strict=True)
    return [(rows * (1 + 1e-6 * (feed.parents is not None)), more) for (rows, more), feed in found]


def test_kernels_that_are_wrong_are_refused() -> None:
    with pytest.raises(KernelsUnfit, match="wrong rows"):
        runner_of("one layer", context=100, record=wrong_rows)


@pytest.mark.parametrize("planted", [by_length, by_tree])
def test_rows_that_depend_on_their_company_are_refused(
    planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_forward.Decode, "forward", planted)
    with pytest.raises(KernelsUnfit, match="depend on their company"):
        runner_of("one layer", context=100)


def test_larger_tables_with_other_bits_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = runner_of("one layer", context=100, record=other_bits)
    assert "other bits" in caplog.text
    assert found.capabilities.tree_nodes == ROWS


_ADD_WARPS = tile_kernels.add_warps


@triton.jit
def otherwise_for_64(found):  # type: ignore[no-untyped-def]
    ROWS: tl.constexpr = found.shape[2]
    return tl.sum(found, 0) if ROWS == 64 else _ADD_WARPS(found)


def test_a_kernel_that_adds_in_another_order_for_64_rows_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tile_kernels, "add_warps", otherwise_for_64)
    with caplog.at_level("INFO"):
        found = runner_of("one layer", context=100)
    assert "other bits" in caplog.text
    assert found.capabilities.tree_nodes == ROWS


@pytest.mark.usefixtures("unchecked_tables")
def test_larger_tables_that_do_not_fit_the_gpu_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = []

    def record(work: Any) -> Any:
        made.append(work)
        if len(made) > 1:
            raise OutOfResources(245_760, 101_376, "shared memory")
        return work

    with caplog.at_level("INFO"):
        found = KernelRunner(model_of("one layer"), 100, record=record)
    assert found.capabilities.tree_nodes == ROWS
    assert "tables have 16 rows at most here" in caplog.text


def test_kernels_that_do_not_compile_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.models.gpu.autotune.candidates", lambda product, fewer: [])
    with pytest.raises(KernelsUnfit, match="no cut fits"):
        runner_of("one layer")


@ONE_LAYER
def test_a_row_does_not_see_a_nan_that_a_rollback_removed() -> None:
    """A tile looks at positions beyond its rows' own, and 0 times NaN is not 0."""
    runner = shared("one layer")
    runner.rollback(0)
    feed_chain(runner, text(20), 1)
    wanted = feed_chain(runner, text(4, 1), 4)
    with torch.inference_mode():
        runner.slots.keys[..., 20:24, :] = torch.nan
        runner.slots.values[..., 20:24, :] = torch.nan
    runner.rollback(20)
    assert torch.equal(feed_chain(runner, text(4, 1), 4), wanted)
