"""Emulates a model of known speed: every forward lasts a given time from call to return.

Only the forwards are lengthened, so the runtime's own time between them stays visible.  The core
stays awake, as it does when it computes a real model or waits for a GPU.  A forward ends with small
torch operations, so that torch's code is in the core's caches, as after a real forward.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import linear, softmax

from pearl.models.runner import Feed, ModelRunner

_NAP_SECONDS = 1e-5  # short: a core that sleeps through a forward is slow after it
_SPIN_SECONDS = 5e-4  # time after the last nap, by which naps may overshoot; torch computes in it
_OPERATION_SECONDS = 5e-5  # time of one torch operation
_WEIGHT = torch.ones(64, 64)


def pace(runner: ModelRunner, seconds: float) -> None:
    """Make each forward of the runner last `seconds` from now on, whatever the runner is fed."""
    forward = runner.forward

    def paced(feeds: Sequence[Feed]) -> list[torch.Tensor]:
        end = time.perf_counter() + seconds
        logits = forward(feeds)
        runner.synchronize()
        while (seconds_left := end - time.perf_counter()) > 0:
            if seconds_left > _SPIN_SECONDS:
                time.sleep(_NAP_SECONDS)
            elif seconds_left > _OPERATION_SECONDS:
                softmax(linear(_WEIGHT[:1], _WEIGHT), -1)
        return logits

    runner.forward = paced  # type: ignore[method-assign]
    # A paced forward is done when it returns.
    runner.capabilities = replace(runner.capabilities, launches=False)
