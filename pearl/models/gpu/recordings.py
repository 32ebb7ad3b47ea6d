"""Forwards of a few fixed sizes, recorded once and replayed, which saves a GPU's kernel launch times.

A piece has `FED` rows when decoding and `PREFILL` rows in a prompt, however many tokens are fed: the
rows after the tokens are padding, discarded. The position of its first token decides how many
positions it attends to. When decoding that is one of a few numbers, each with its recording. A
prompt's piece attends up to its own end: in one recording with our kernels (`prefill`), unrecorded
without them. Positions that a row must not see are masked.

So the same kernels compute a token's row over the same shapes in every forward, and its logits have
the same bits. A forward that crosses a limit is split there. Each forward fills a buffer with what
differs between replays: the tokens and their position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pearl.models.feeds import Feed, Tokens

if TYPE_CHECKING:
    from pearl.models.gpu.prefill import Prompts

FED = 16  # rows of a recorded forward; 16 cost as much as 1 where reading the weights takes longest
# Rows of a piece of a longer forward; the coordinator cuts prompts at multiples of it too.
PREFILL = 512
# Relative error of a row from which on our kernels are refused; rounding makes a few hundredths.
MOST_OFF = 0.25
_LEAST_VISIBLE = 512  # positions


class PieceInputs(NamedTuple):
    """The inputs of a piece, on the device.

    Attributes:
        start: [1], position of the first token.
        ids: [n]
        fed: [1], number of rows before the padding; None for a prompt.
    """

    start: torch.Tensor
    ids: torch.Tensor
    fed: torch.Tensor | None


# Logits [rows, vocab], and the features of every token fed, if any.
Rows = tuple[torch.Tensor, torch.Tensor | None]
# (piece, slot, end, rows) -> logits of the first rows, all features.
Step = Callable[[PieceInputs, int, int, int], Rows]
# piece -> its hidden states by torch's operations, at position 0 of slot 0.
Reference = Callable[[PieceInputs], torch.Tensor]
# work -> its replay, in the same buffers.
Record = Callable[[Callable[[], Rows]], Callable[[], Rows]]


def visible(position: int) -> int:
    """Return how many positions the row of `position` attends to.

    That is the next power of two, and at least `_LEAST_VISIBLE`: 1024 at position 600.
    """
    return max(_LEAST_VISIBLE, 1 << position.bit_length())


def ends(context: int, room: int) -> list[int]:
    """Return every number of positions that a recorded forward may attend to, the largest first."""
    return sorted({min(visible(position), room) for position in range(context)}, reverse=True)


def pieces(start: int, count: int, rows: int) -> Iterator[tuple[int, int]]:
    """Split a forward of `count` tokens from position `start` on into pieces of up to `rows`.

    Yields:
        (start, stop) of each piece.
    """
    end = start + count
    while start < end:
        limit = start + FED
        if rows != FED:
            limit = start - start % PREFILL + PREFILL
        stop = min(end, visible(start), limit)
        yield start, stop
        start = stop


def sample_ids(count: int, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a text by which kernels are checked."""
    return tuple((7 + 11 * position) % vocab_size for position in range(count))


def relative_errors(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row's difference from the reference, relative to the reference's."""
    return (rows - reference).norm(dim=1) / reference.norm(dim=1)


def joined(logits: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> Rows:
    """Concatenate the rows of a forward's pieces, copying all but a single piece's logits."""
    rows = logits[0]
    if len(logits) > 1:
        rows = torch.cat(list(logits))
    if not features:
        return rows, None
    return rows, torch.cat(list(features))


def fill(buffer: torch.Tensor, scalars: Sequence[int], tokens: Tokens) -> None:
    """Fill a buffer on the device with `scalars`, the ids of tokens, and zeros."""
    numbers = list(scalars)
    numbers += [0] * len(tokens) if isinstance(tokens, torch.Tensor) else tokens
    numbers += [0] * (len(buffer) - len(numbers))
    buffer.copy_(torch.tensor(numbers, pin_memory=buffer.is_cuda), non_blocking=True)
    if isinstance(tokens, torch.Tensor):
        start = len(scalars)
        buffer[start : start + len(tokens)] = tokens


class Graphs:
    """The recordings of one model.

    Args:
        step: computes a piece; its kernels depend on shapes, `end` and `rows` only.
        room: positions of the cache.
        record: makes one recording; it may run the work several times.
        device: where the inputs are.

    Attributes:
        prompts: computes prompts by our kernels, if there are any.
    """

    def __init__(self, step: Step, room: int, record: Record, device: torch.device) -> None:
        self._step = step
        self._room = room
        self.recorder = record
        self._device = device
        self.prompts: Prompts | None = None
        # (buffer, replay) by (slot, end).
        self._known: dict[tuple[int, int], tuple[torch.Tensor, Callable[[], Rows]]] = {}

    def forward(self, feed: Feed, start: int) -> tuple[Rows, int]:
        """Compute a feed at position `start` of its slot.

        Returns:
            (rows, end): logits are valid until the next forward, and features are a copy; end is the
            cache length written, padding included.
        """
        end = start + len(feed.tokens)
        size = PREFILL if feed.prompt else FED
        written = 0
        logits: list[torch.Tensor] = []
        features: list[torch.Tensor] = []
        for begin, stop in pieces(start, len(feed.tokens), size):
            rows = min(stop - begin, max(0, stop - (end - feed.rows)))
            piece = replace(feed, tokens=feed.tokens[begin - start : stop - start], rows=rows)
            if size == FED:
                piece_logits, piece_features = self._few(piece, begin, visible(begin))
            elif self.prompts is not None:
                piece_logits, piece_features = self.prompts.forward(piece, begin)
            else:
                piece_logits, piece_features = self._many(piece, begin)
            if stop < end:
                piece_logits = piece_logits.clone()
            logits.append(piece_logits)
            if piece_features is not None:
                features.append(piece_features[: stop - begin].clone())
            written = begin + size
        return joined(logits, features), written

    def _few(self, feed: Feed, start: int, end: int) -> Rows:
        """Replay the forward of a chain of at most `FED` tokens; return the features of all rows."""
        end = min(end, self._room)
        count = len(feed.tokens)
        if (feed.slot, end) not in self._known:
            self.record(feed.slot, end)
        buffer, replay = self._known[feed.slot, end]
        fill(buffer, (start, count), feed.tokens)
        logits, features = replay()
        return logits[count - feed.rows : count], features

    def _many(self, feed: Feed, start: int) -> Rows:
        """Compute a chain of at most `PREFILL` tokens by torch's operations; as `_few`."""
        buffer = torch.empty(1 + PREFILL, dtype=torch.long, device=self._device)
        fill(buffer, (start,), feed.tokens)
        piece = PieceInputs(buffer[:1], buffer[1:], None)
        rows = len(feed.tokens) if feed.rows else 0
        logits, features = self._step(piece, feed.slot, start + PREFILL, rows)
        return logits[len(logits) - feed.rows :], features

    def record(self, slot: int, end: int) -> None:
        """Record the forward that attends to `end` positions of a slot, and write to its first `FED`.

        This is done before any text: it takes 40 to 150 ms on a GPU, and waits for all its other work.
        """
        buffer = torch.zeros(2 + FED, dtype=torch.long, device=self._device)
        piece = PieceInputs(buffer[:1], buffer[2:], buffer[1:2])

        def work() -> Rows:
            return self._step(piece, slot, end, FED)

        self._known[slot, end] = buffer, self.recorder(work)


def record_on_gpu(device: torch.device) -> Record:
    """Return a recorder of CUDA graphs, which share their memory: one is replayed at a time.

    Graphs are captured on a stream of this runner's own: a graph that is freed clears cuBLAS's
    workspaces for its stream, and on torch's default, one stream for all, other runners' recordings
    would use them.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                work()  # libraries set themselves up at the first call, which must not be recorded
            current.wait_stream(stream)
            # Other threads go on using the GPU.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                rows = work()

        def replay() -> Rows:
            graph.replay()
            return rows

        return replay

    return record
