"""`transformers`' own `generate` as an outside baseline, assisted if a draft is named; runs in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

_loaded: dict[str, Any] = {}  # the model, and the assistant or None


def load(settings: dict[str, Any], cores: Sequence[int], gpus: Sequence[int]) -> None:
    """Load the models. The process is pinned before it imports torch, which sizes its thread pools by its cores.

    Raises `ModelError`.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as our own workers

    import torch
    import transformers

    from pearl.models.checkpoints.loading import load_model
    from pearl.worker.placement import occupy

    transformers.logging.set_verbosity_error()  # assisted generation warns about its own arguments
    if cores:
        occupy(cores)
    device = torch.device("cuda:0" if gpus else "cpu")
    for role in ("target", "assistant"):
        is_spread = len(gpus) > 1 and role == "target"
        _loaded[role] = settings[role] and load_model(
            settings[role], device=device, dtype=settings[f"{role}_dtype"], is_spread=is_spread
        )


class _ArrivalTimes:
    """A streamer that records the time and the number of tokens of each arrival."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def generate(prompt: Sequence[int], max_tokens: int, seed: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `systems.Decoded`."""
    import torch

    from pearl.metrics import Stopwatch, fold
    from pearl.protocol.request import Counts
    from pearl.protocol.speeds import Speeds

    ids = torch.tensor([prompt], device=_loaded["target"].device)
    clock = _ArrivalTimes()
    began = time.perf_counter()
    if sampling["do_sample"]:
        torch.manual_seed(seed)
    output = _loaded["target"].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        assistant_model=_loaded["assistant"],
        streamer=clock,
        **sampling,
    )
    watch = Stopwatch(submitted=began, begun=began)
    for now, count in clock.arrivals[1:]:  # the first entry is the prompt
        watch.committed(count, now)
    tokens = tuple(output[0, len(prompt) :].tolist())
    return {"tokens": tokens, "statistics": fold(Counts(), watch, Speeds(), len(prompt), 0)}
