"""Forwards of few tokens, recorded once and replayed: a GPU's way to be rid of the time that starting kernels takes.

A recording has fixed shapes: so many tokens, and a look at so many positions.  Both are rounded up, so that there are
few of them: rows that nobody asked for are computed and dropped, positions beyond the text are masked.  What changes
from replay to replay, where the tokens start and which they are, stands in a buffer that each forward fills.

Ranks that share a model record what they tell each other along with the rest, all of them at the same forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pearl.models.runner import Tokens

MOST_FED = 16  # tokens; more of them keep a GPU busy without
_LEAST_END = 256  # positions

Step = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # (start [1], ids [n], end) -> logits [n, vocab]
Record = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]  # work -> what does it again, same buffers


def fed_rounded(fed: int) -> int:
    """The next power of two: a row more costs nothing where the weights are what is waited for."""
    return 1 << (fed - 1).bit_length()


def end_rounded(end: int) -> int:
    """A quarter more at most, or a few hundred: attention takes as long as it looks far."""
    step = max(_LEAST_END, 1 << max(0, end.bit_length() - 3))
    return -(-end // step) * step


class Graphs:
    """The recordings of one model.

    Args:
        step: a forward, whose shapes and `end` alone decide what it does.
        room: positions of the cache.
        record: makes one recording; doing the work more often than once changes nothing.
    """

    def __init__(self, step: Step, room: int, record: Record) -> None:
        self._step, self._room, self._record = step, room, record
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def forward(self, tokens: Tokens, start: int, device: torch.device) -> torch.Tensor:
        """Logits [at least len(tokens), vocab] in a buffer that the next forward overwrites."""
        count = len(tokens)
        fed = fed_rounded(count)
        end = min(end_rounded(start + fed), self._room)
        ids = [0] * fed if isinstance(tokens, torch.Tensor) else [*tokens, *[0] * (fed - count)]
        given = torch.tensor([start, *ids], pin_memory=device.type == "cuda")
        if (fed, end) not in self._known:
            self._known[fed, end] = self._recorded(given.to(device), end)
        buffer, replay = self._known[fed, end]
        buffer.copy_(given, non_blocking=True)
        if isinstance(tokens, torch.Tensor):
            buffer[1 : 1 + count] = tokens
        return replay()

    def _recorded(self, buffer: torch.Tensor, end: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        def work() -> torch.Tensor:
            return self._step(buffer[:1], buffer[1:], end)

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
