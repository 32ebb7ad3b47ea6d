"""Pacing: a runner whose every forward lasts a given time from call to return.

Emulates a model of known speed.  Only the time between call and return is filled: whatever the runtime spends between
forwards stays visible, which is what makes the emulation an honest measure of the runtime.  The core stays awake, as
with a model that computes on it, or one that is waited for on a GPU; and a forward ends in what every forward is made
of, small torch operations, so that torch's code is as near to the core as it is after a real one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import linear, softmax

from pearl.models.runner import Capabilities, Feed, ModelRunner, WrappedRunner

_NAP_SECONDS = 1e-5  # short ones: a core that slept through a forward would be slow after it, unlike one that works
_SPIN_SECONDS = 5e-4  # a nap seldom overshoots by more; the rest is computed away
_OPERATION_SECONDS = 5e-5  # one must not reach beyond the end
_WEIGHT = torch.ones(64, 64)


class PacedRunner(WrappedRunner):
    """Wraps a runner. `seconds`: how long each forward lasts, whatever it is fed."""

    def __init__(self, runner: ModelRunner, seconds: float) -> None:
        super().__init__(runner)
        self._seconds = seconds

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, launches=False)  # a paced forward is done when it returns

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        end = time.perf_counter() + self._seconds
        logits = self._runner.forward(feeds)
        self._runner.synchronize()
        while (left := end - time.perf_counter()) > 0:
            if left > _SPIN_SECONDS:
                time.sleep(_NAP_SECONDS)
            elif left > _OPERATION_SECONDS:
                softmax(linear(_WEIGHT[:1], _WEIGHT), -1)
        return logits
