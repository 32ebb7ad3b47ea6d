"""Recordings: a forward of a fixed size as one CUDA graph, which saves the time of many launches.

A decoding forward has `FED` rows or a few times as many (see `row_table`); a forward of a piece of
a prompt has `PREFILL` rows. If fewer tokens are fed, the other rows are padding, whose results are
discarded. Before each replay the host fills a buffer with the tokens, their slots and their
positions, because only these differ between forwards.
"""

from collections.abc import Callable, Sequence

import torch

# Rows of a recorded forward. As long as reading the weights takes the most time, 16 rows cost as much as 1.
FED = 16
# Rows of a piece of a prompt; the coordinator cuts prompts at multiples of this number, too.
PREFILL = 512

# Logits [rows, vocab], and the hidden states of each fed token that a head reads; None if no head
# reads.
Rows = tuple[torch.Tensor, torch.Tensor | None]
# Records a function's launches, and returns a function that replays them in the same buffers.
Record = Callable[[Callable[[], Rows]], Callable[[], Rows]]


def joined(logits: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> Rows:
    """Concatenate the logits of a forward's pieces, and the hidden states of the pieces.

    The results are copies, with one exception: the logits of a single piece are not copied.
    """
    rows = logits[0]
    if len(logits) > 1:
        rows = torch.cat(list(logits))
    if not features:
        return rows, None
    return rows, torch.cat(list(features))


def not_recorded(work: Callable[[], Rows]) -> Callable[[], Rows]:
    """Return `work` itself. Nothing is recorded, so each call launches its kernels."""
    return work


def record_on_gpu(device: torch.device) -> Record:
    """Return a recorder of CUDA graphs. The graphs share their memory, because one is replayed at a time.

    Each recorder captures its graphs on a stream of its own, for this reason: when a graph is
    freed, cuBLAS clears its workspaces for the graph's stream. On torch's default stream for
    captures, which all runners share, recordings of other runners would still use these workspaces.
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
