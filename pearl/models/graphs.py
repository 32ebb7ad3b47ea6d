"""Forwards in a few fixed sizes, recorded once and replayed: on a GPU that saves the time that kernels take to start.

A piece has one of two numbers of rows, `FED` for decoding (recorded) and `PREFILL` for prompts, and looks at one of a
few numbers of positions, which the position of its first token decides.  Rows beyond the tokens are padding, discarded;
positions beyond a row's own are masked.  So whatever the forward that a token comes in, the same kernels compute its
row, over the same shapes: its logits are the same bits.  A forward that crosses a limit is cut there.

What changes from replay to replay, where the tokens start and which they are, stands in a buffer that each forward
fills.  Ranks that share a model record their exchanges with the rest, all of them at the same forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pearl.models.runner import Tokens

FED = 16  # rows of a recorded forward; 16 cost what 1 costs where reading the weights takes longest
PREFILL = 512  # rows of a piece of a longer forward; the coordinator cuts prompts at multiples of it too
_LEAST_VISIBLE = 512  # positions

# (start [1], ids [n], end, rows) -> logits [rows, vocab]
Step = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
Record = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]  # work -> what does it again, same buffers


def visible(position: int) -> int:
    """How many positions the row of `position` looks at: the next power of two, at least `_LEAST_VISIBLE`."""
    return max(_LEAST_VISIBLE, 1 << position.bit_length())


def pieces(start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Cut a forward of `count` tokens from position `start` on into (rows, start, stop)."""
    rows, end = FED if count <= FED else PREFILL, start + count
    while start < end:
        stop = min(end, visible(start))
        if rows == PREFILL:
            stop = min(stop, start - start % PREFILL + PREFILL)
        yield rows, start, stop
        start = stop


class Graphs:
    """The recordings of one model.

    Args:
        step: computes a piece; shapes, `end` and `rows` alone decide what it does.
        room: positions of the cache.
        record: makes one recording; doing the work more often than once changes nothing.
    """

    def __init__(self, step: Step, room: int, record: Record) -> None:
        self._step, self._room, self._record = step, room, record
        self._known: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}  # by the positions looked at

    def forward(self, tokens: Tokens, start: int, rows: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """Logits [rows, vocab] of the last `rows` tokens, and up to which position the cache was written.

        The logits may stand in a buffer that the next forward overwrites.
        """
        found, written, first = [], 0, start
        wanted = start + len(tokens) - rows  # the first position whose logits are asked for
        for size, begin, stop in pieces(start, len(tokens)):
            piece = tokens[begin - first : stop - first]
            asked = min(stop - begin, max(0, stop - wanted))
            logits = self._piece(piece, begin, size, asked, device)
            found.append(logits.clone() if stop < first + len(tokens) else logits)
            written = begin + size
        return (found[0] if len(found) == 1 else torch.cat(found)), written

    def _piece(self, tokens: Tokens, start: int, size: int, rows: int, device: torch.device) -> torch.Tensor:
        count, end = len(tokens), min(visible(start), self._room)
        ids = [0] * size if isinstance(tokens, torch.Tensor) else [*tokens, *[0] * (size - count)]
        given = torch.tensor([start, *ids], pin_memory=device.type == "cuda")
        if size == FED:
            if end not in self._known:
                self._known[end] = self._recorded(given.to(device), end)
            buffer, work = self._known[end]
            buffer.copy_(given, non_blocking=True)
        else:
            buffer = given.to(device, non_blocking=True)
        if isinstance(tokens, torch.Tensor):
            buffer[1 : 1 + count] = tokens
        if size == FED:
            return work()[count - rows : count]
        # The rows of one piece are asked for from its end; the step gives those from its start.
        return self._step(buffer[:1], buffer[1:], end, count if rows else 0)[count - rows :]

    def _recorded(self, buffer: torch.Tensor, end: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        def work() -> torch.Tensor:
            return self._step(buffer[:1], buffer[1:], end, FED)

        return buffer, self._record(work)


def record_on_gpu(device: torch.device) -> Record:
    """Recordings as CUDA graphs, which share their memory: one is replayed at a time. Unproven: no GPU was at hand."""
    pool, aside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            aside.wait_stream(now)
            with torch.cuda.stream(aside):
                work()  # libraries set themselves up at the first call, which must not be recorded
            now.wait_stream(aside)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # other threads go on
                logits = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    return record
