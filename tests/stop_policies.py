"""Stop policies for tests: a known classifier, and a policy that notes what it is told."""

from typing import Any

from pearl.drafting.disco import INPUTS, Classifier
from pearl.drafting.stops import Features, StopPolicy


def classifier(**changes: Any) -> Classifier:
    """Return a classifier with the confidence sigmoid(8 (p - 1/4)).

    Here p is the largest probability. So it stops drafting at p <= 1/4, unless `changes` has
    another threshold.
    """
    first = (1.0, *[0.0] * (INPUTS - 1))
    values = {
        "target": "embedded",
        "draft": "embedded-draft",
        "threshold": 0.5,
        "cap": 4,
        "examples": 10,
        "accepted": 0.5,
        "mean": (0.25, *[0.0] * (INPUTS - 1)),
        "scale": (1.0,) * INPUTS,
        "hidden": (first, tuple(-x for x in first)),
        "hidden_bias": (0.0, 0.0),
        "out": (8.0, -8.0),
        "out_bias": 0.0,
    }
    return Classifier(**(values | changes))


class Noted(StopPolicy):
    """Stops after windows of `most` tokens, and notes what it is asked and told."""

    def __init__(self, most: int = 99) -> None:
        self.most, self.asked, self.heard = most, list[tuple[int, int]](), list[int]()

    def stop(self, features: Features) -> bool:
        self.asked.append((features.position, features.index))
        return features.index + 1 == self.most

    def end_window(self, accepted: int) -> None:
        self.heard.append(accepted)
