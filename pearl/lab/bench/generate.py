"""A process that runs `transformers`' own `generate` as an outside baseline, assisted if a draft is named.

Reads settings as JSON from the first line of standard input, prints {"ready": true} or {"error": message}, then answers
each request line with one line.  Pins itself to its cores before importing torch, which sizes its thread pools by them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from pearl.worker.startup import allow_expandable_segments


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    allow_expandable_segments(os.environ)  # as our own workers

    import torch
    import transformers

    from pearl.errors import PearlError
    from pearl.models.loading import load_model
    from pearl.worker.placement import occupy

    transformers.logging.set_verbosity_error()  # assisted generation warns about its own arguments
    if settings["cores"]:
        occupy(settings["cores"])

    def load(role: str) -> Any:
        device = torch.device(settings["device"])
        spread = "auto" if settings["spread"] and role == "target" else None
        return load_model(settings[role], device=device, dtype=settings[f"{role}_dtype"], device_map=spread).eval()

    try:
        model, assistant = load("target"), load("assistant") if settings["assistant"] else None
    except PearlError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_generate(model, assistant, json.loads(line))), flush=True)


class _ArrivalTimes:
    """A streamer that records the time and the number of tokens of each arrival."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        self.arrivals.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def _generate(model: Any, assistant: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    from pearl.metrics import Stopwatch

    prompt = torch.tensor([asked["prompt"]], device=model.device)
    clock = _ArrivalTimes()
    began = time.perf_counter()
    if asked["sampling"]["do_sample"]:
        torch.manual_seed(asked["seed"])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=asked["max_tokens"],
        assistant_model=assistant,
        streamer=clock,
        **asked["sampling"],
    )
    watch = Stopwatch()
    for now, count in clock.arrivals[1:]:  # the first entry is the prompt
        watch.committed(count, now)
    assert watch.first is not None
    return {
        "tokens": output[0, prompt.shape[1] :].tolist(),
        "first_seconds": watch.first - began,
        "late_seconds": watch.last - watch.first,
        "late_tokens": watch.generated - watch.in_first,
        "itl_p50": watch.token_latency(0.5),
        "itl_p99": watch.token_latency(0.99),
    }


if __name__ == "__main__":
    main()
