"""`transformers`' own `generate` in a process of its own, as an outside baseline; assisted where a draft is named.

Reads its settings as JSON from the first line of standard input, says "ready", then answers each line with one.  The
process is pinned to its cores before torch starts, so that torch sizes its threads by them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])

    import torch
    import transformers

    from pearl.errors import PearlError
    from pearl.models.loading import load_model

    transformers.logging.set_verbosity_error()  # of what its own assisted generation passes to itself
    if settings["cores"]:
        torch.set_num_threads(len(settings["cores"]))

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


class _Clock:
    """A streamer that notes when how many tokens came."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        self.came.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        pass


def _generate(model: Any, assistant: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    prompt = torch.tensor([asked["prompt"]], device=model.device)
    clock = _Clock()
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
    (_, _), (first, _), *rest = clock.came  # the first put is the prompt
    last = rest[-1][0] if rest else first
    return {
        "tokens": output[0, prompt.shape[1] :].tolist(),
        "first_seconds": first - began,
        "late_seconds": last - first,
        "late_tokens": sum(count for _, count in rest),
    }


if __name__ == "__main__":
    main()
