"""Recordings: the launches of a forward of a fixed size as one CUDA graph, which saves their launch times.

A forward has `FED` rows or more when decoding (see `row_table`) and `PREFILL` rows in a piece of a
prompt, however many tokens are fed: the rows after the tokens are padding, discarded. Before each replay
the host fills a buffer with what differs between forwards: the tokens, their slots and positions.
"""

from collections.abc import Callable, Sequence

import torch

# Rows of a recorded forward. As long as reading the weights takes the most time, 16 rows cost as much as 1.
FED = 16
# Rows of a piece of a prompt; the coordinator cuts prompts at multiples of this number, too.
PREFILL = 512

# Logits [rows, vocab], and the features of every token fed, if any.
Rows = tuple[torch.Tensor, torch.Tensor | None]
# Records a function's launches, and returns a function that replays them in the same buffers.
Record = Callable[[Callable[[], Rows]], Callable[[], Rows]]


def joined(logits: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> Rows:
    """Concatenate the rows of a forward's pieces. The result is a copy, except for the logits of a single piece."""
    rows = logits[0]
    if len(logits) > 1:
        rows = torch.cat(list(logits))
    if not features:
        return rows, None
    return rows, torch.cat(list(features))


def not_recorded(work: Callable[[], Rows]) -> Callable[[], Rows]:
    """Return `work` itself: its kernels are launched anew each time."""
    return work


def record_on_gpu(device: torch.device) -> Record:
    """Return a recorder of CUDA graphs. The graphs share their memory, because one is replayed at a time.

    Graphs are captured on a stream of this runner's own. When a graph is freed, cuBLAS's workspaces for
    its stream are cleared; on torch's default stream for captures, which all runners share, recordings of
    other runners would still use them.
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
