"""Forwards in a few fixed sizes, recorded once and replayed: on a GPU that saves the kernels' launch times.

A piece has one of two numbers of rows, `FED` for decoding and `PREFILL` for prompts, however many tokens are fed.  Its
first token's position determines how many positions it looks at: when decoding one of a few numbers, each with its
recording; a prompt's piece all up to its end, with our kernels (`prompts`) in one recording for all, else unrecorded.
Rows beyond the tokens are padding, discarded; positions that a row must not see are masked.  So the same kernels
compute a token's row over the same shapes in every forward, and its logits are the same bits.  A forward that crosses a
limit is split there.

What differs between replays (the tokens and their position) is in a buffer that each forward fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pearl.models.feeds import Feed

if TYPE_CHECKING:
    from pearl.models.gpu.prefill import Prompts

FED = 16  # rows of a recorded forward; 16 cost as much as 1 where reading the weights takes longest
PREFILL = (
    512  # rows of a piece of a longer forward; the coordinator cuts prompts at multiples of it too
)
MOST_OFF = 0.25  # relative error of a row, from which on our kernels are refused; rounding makes a few hundredths
_LEAST_VISIBLE = 512  # positions


class Piece(NamedTuple):
    """The inputs of a piece, on the device.

    Attributes:
        start: [1], position of the first token.
        ids: [n]
        fed: [1], how many rows there are before the padding; None for a prompt.
    """

    start: torch.Tensor
    ids: torch.Tensor
    fed: torch.Tensor | None


Rows = tuple[
    torch.Tensor, torch.Tensor | None
]  # logits [rows, vocab], and features of every token fed, if any
Step = Callable[
    [Piece, int, int, int], Rows
]  # (piece, slot, end, rows) -> logits of the first rows, all features
Record = Callable[
    [Callable[[], Rows]], Callable[[], Rows]
]  # work -> its replay, in the same buffers


def visible(position: int) -> int:
    """How many positions the row of `position` looks at: the next power of two, at least `_LEAST_VISIBLE`."""
    return max(_LEAST_VISIBLE, 1 << position.bit_length())


def ends(context: int, room: int) -> list[int]:
    """Every number of positions that a recorded forward may look at, the largest first."""
    return sorted({min(visible(position), room) for position in range(context)}, reverse=True)


def pieces(start: int, count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Split a forward of `count` tokens from position `start` on into pieces of up to `rows`: (start, stop) of each."""
    end = start + count
    while start < end:
        stop = min(
            end, visible(start), start + FED if rows == FED else start - start % PREFILL + PREFILL
        )
        yield start, stop
        start = stop


class Graphs:
    """The recordings of one model.

    Args:
        step: computes a piece; its kernels depend on shapes, `end` and `rows` only.
        room: positions of the cache.
        record: makes one recording; it may run the work several times.

    Attributes:
        prompts: computes prompts by our kernels, where there are.
    """

    def __init__(self, step: Step, room: int, record: Record) -> None:
        self._step, self._room, self.recorder = step, room, record
        self.prompts: Prompts | None = None
        self._known: dict[
            tuple[int, int], tuple[torch.Tensor, Callable[[], Rows]]
        ] = {}  # by slot and end

    def forward(self, feed: Feed, start: int, device: torch.device) -> tuple[Rows, int]:
        """What a feed asks for, perhaps in buffers that the next forward overwrites; and the end of the positions that
        were written to the cache.
        """
        end = start + len(feed.tokens)
        found, seen, written, size = [], list[torch.Tensor](), 0, PREFILL if feed.prompt else FED
        for begin, stop in pieces(start, len(feed.tokens), size):
            rows = min(stop - begin, max(0, stop - (end - feed.rows)))
            piece = replace(feed, tokens=feed.tokens[begin - start : stop - start], rows=rows)
            if size == FED:
                logits, features = self._few(piece, begin, visible(begin), device)
            elif self.prompts is not None:
                logits, features = self.prompts.forward(piece, begin)
            else:
                logits, features = self._many(piece, begin, device)
            found.append(logits.clone() if stop < end else logits)
            seen += [] if features is None else [features.clone() if stop < end else features]
            written = begin + size
        return (
            torch.cat(found) if len(found) > 1 else found[0],
            torch.cat(seen) if seen else None,
        ), written

    def _few(self, feed: Feed, start: int, end: int, device: torch.device) -> Rows:
        """Of a chain of at most `FED` tokens, recorded."""
        count, end = len(feed.tokens), min(end, self._room)
        known = [0] * count if isinstance(feed.tokens, torch.Tensor) else list(feed.tokens)
        given = torch.tensor(
            [start, count, *known, *[0] * (FED - count)], pin_memory=device.type == "cuda"
        )
        if (feed.slot, end) not in self._known:
            self.record(feed.slot, end, device)
        buffer, replay = self._known[feed.slot, end]
        buffer.copy_(given, non_blocking=True)
        if isinstance(feed.tokens, torch.Tensor):
            buffer[2 : 2 + count] = feed.tokens
        logits, features = replay()
        return logits[count - feed.rows : count], None if features is None else features[:count]

    def _many(self, feed: Feed, start: int, device: torch.device) -> Rows:
        """Of a chain of at most `PREFILL` tokens, in torch's operations."""
        count = len(feed.tokens)
        known = [0] * count if isinstance(feed.tokens, torch.Tensor) else list(feed.tokens)
        given = torch.tensor(
            [start, *known, *[0] * (PREFILL - count)], pin_memory=device.type == "cuda"
        )
        buffer = given.to(device, non_blocking=True)
        if isinstance(feed.tokens, torch.Tensor):
            buffer[1 : 1 + count] = feed.tokens
        piece = Piece(buffer[:1], buffer[1:], None)
        logits, features = self._step(piece, feed.slot, start + PREFILL, count if feed.rows else 0)
        return logits[len(logits) - feed.rows :], None if features is None else features[:count]

    def record(self, slot: int, end: int, device: torch.device) -> None:
        """Record the forward that looks at `end` positions of a slot. Writes to its first `FED` positions.

        Done before any text: it takes 40 to 150 ms on a GPU, and waits for all its other work.
        """
        buffer = torch.zeros(2 + FED, dtype=torch.long, device=device)
        piece = Piece(buffer[:1], buffer[2:], buffer[1:2])

        def work() -> Rows:
            return self._step(piece, slot, end, FED)

        self._known[slot, end] = buffer, self.recorder(work)


def record_on_gpu(device: torch.device) -> Record:
    """Records CUDA graphs, which share their memory: one is replayed at a time.

    They are captured on a stream of this runner's own: a graph that is freed clears cuBLAS's workspaces for its stream,
    which other runners' recordings would use on torch's default, one stream for all.
    """
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            aside.wait_stream(now)
            with torch.cuda.stream(aside):
                work()  # libraries set themselves up at the first call, which must not be recorded
            now.wait_stream(aside)
            with torch.cuda.graph(
                graph, pool=pool, stream=aside, capture_error_mode="thread_local"
            ):  # others go on
                rows = work()

        def replay() -> Rows:
            graph.replay()
            return rows

        return replay

    return record
