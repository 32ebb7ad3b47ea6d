"""Texts that a pair of first-order models writes under the rule joint."""

from typing import Any

import torch

from pearl.config import RequestOptions
from pearl.lab.studies.simulate import Outcome, Timing
from pearl.spec.rules import Parameters
from tests.options import drawn_by
from tests.virtual import decoded, first_order

TARGET = torch.tensor([[30, 18, 12, 4], [40, 12, 10, 2], [18, 28, 12, 6], [16, 16, 16, 16]]) / 64
DRAFT = torch.tensor([[20, 30, 8, 6], [30, 20, 10, 4], [16, 16, 28, 4], [4, 4, 8, 48]]) / 64


def parameters(tau: float = 0.5, depth: int = 3, width: int = 4) -> Parameters:
    return (("tau", tau), ("depth", float(depth)), ("width", float(width)))


PAIR = first_order(TARGET, DRAFT)


def decode(
    decoding: RequestOptions, seed: int = 3, tokens: int = 120, ratio: float = 4.0, **more: Any
) -> Outcome:
    sampling = drawn_by(1.0, seed=seed, shaping=more.pop("shaping", None))
    return decoded(PAIR, 4, decoding, sampling, tokens, Timing(1.0, lambda _: ratio), **more)
