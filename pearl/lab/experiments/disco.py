"""Training the classifier of stop policy `disco` on recorded texts.

Each token of the target's answers is an example: what the draft's distribution there looks like, and whether its token
is the target's.  Most texts train the two layers; on the others, held out, the confidence up to which drafting ends and
the most tokens of a window are tried in the simulator, and those with which `sd` is fastest are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pearl.drafting.disco import INPUTS, Classifier, inputs
from pearl.drafting.proposer import TOP, Features
from pearl.errors import ConfigError
from pearl.lab.experiments.stops import Policies, Stopped, bounded, check_features, split, stopped
from pearl.lab.simulate import Timing
from pearl.models.recorded import RecordedText, RecordedTexts
from pearl.spec.stops import CAP

LEAST_TEXTS = 4
_HELD_OUT = 4  # each such text
_UNITS = 32  # of the hidden layer
_STEPS, _RATE, _DECAY = 400, 0.01, 1e-3  # of AdamW, over all examples at once
_SHARES = tuple(share / 20 for share in range(1, 20))  # of the confidences: thresholds that are tried
_CAPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, CAP)


@dataclass(frozen=True)
class Trained:
    """What came of training.

    Attributes:
        examples, held_out: tokens.
        accuracy: share of the held-out tokens of which confidence above 1/2 says rightly whether they are accepted.
        base: the same of whoever always says what is more frequent.
        best: `sd` with the classifier on the held-out texts.
        static: `sd` with the best static window there.
    """

    classifier: Classifier
    examples: int
    held_out: int
    accuracy: float
    base: float
    best: Stopped
    static: Stopped


def examples(texts: Sequence[RecordedText]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [tokens, INPUTS] and labels [tokens] float32: 1 where the target's token is the draft's."""
    rows = [inputs(features) for text in texts for features in features_of(text)]
    labels = [float(right) for text in texts for right in text.right]
    return torch.tensor(rows).view(-1, INPUTS), torch.tensor(labels)


def features_of(text: RecordedText) -> list[Features]:
    """One for each token of the answer, as a policy would see it; the place in a window is unknown."""
    assert text.features is not None
    rows = (row.tolist() for row in text.features)
    return [Features(tuple(row[:TOP]), row[TOP], row[TOP + 1], 0, number) for number, row in enumerate(rows)]


def fit(seen: torch.Tensor, labels: torch.Tensor, target: str, draft: str, seed: int = 0) -> Classifier:
    """The two layers by maximum likelihood, with threshold 1/2 and the largest cap. One seed gives one classifier."""
    mean, scale = seen.mean(0), seen.std(0, correction=0).clamp_min(1e-3)
    whitened = (seen - mean) / scale
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(_UNITS, INPUTS, generator=generator) / INPUTS**0.5).requires_grad_()
    out = (torch.randn(_UNITS, generator=generator) / _UNITS**0.5).requires_grad_()
    hidden_bias, out_bias = torch.zeros(_UNITS, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.AdamW([hidden, hidden_bias, out, out_bias], lr=_RATE, weight_decay=_DECAY)
    for _ in range(_STEPS):
        logits = torch.relu(whitened @ hidden.T + hidden_bias) @ out + out_bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return Classifier(
        target=target,
        draft=draft,
        threshold=0.5,
        cap=CAP,
        examples=len(labels),
        accepted=float(labels.mean()),
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        hidden=tuple(tuple(row) for row in hidden.tolist()),
        hidden_bias=tuple(hidden_bias.tolist()),
        out=tuple(out.tolist()),
        out_bias=out_bias.item(),
    )


class _Foreseen:
    """`Doubtful` with confidences that are computed once for all thresholds."""

    def __init__(self, confidences: Sequence[float], threshold: float, cap: int) -> None:
        self._confidences, self._threshold, self._cap = confidences, threshold, cap

    def stop(self, features: Features) -> bool:
        known = self._confidences[min(features.position, len(self._confidences) - 1)]
        return features.index + 1 >= self._cap or known <= self._threshold

    def confidence(self, features: Features) -> None:
        pass

    def end_window(self, accepted: int) -> None:
        pass


def train(
    recorded: RecordedTexts, timing: Timing, seed: int = 0, tell: Callable[[str], None] = lambda what: None
) -> Trained:
    """Raises `ConfigError` where the texts are too few, or lack what is to be learned from."""
    check_features(recorded)
    if len(recorded.texts) < LEAST_TEXTS:
        raise ConfigError(
            f"{len(recorded.texts)} texts are too few to train on and to hold some out: at least {LEAST_TEXTS}"
        )
    learned, held_out = split(recorded, _HELD_OUT)
    tell("training")
    header = recorded.header
    classifier = fit(*examples(learned.texts), header.target, header.draft, seed)
    confidences = [[classifier.confidence(each) for each in features_of(text)] for text in held_out.texts]
    ranked = sorted(confidence for some in confidences for confidence in some)
    right = [good for text in held_out.texts for good in text.right]
    said = [confidence > 0.5 for some in confidences for confidence in some]
    accuracy = sum(one == other for one, other in zip(said, right, strict=True)) / len(right)

    def tried(threshold: float, cap: int) -> Stopped:
        waiting = iter(confidences)
        policies: Policies = lambda text: _Foreseen(next(waiting), threshold, cap)  # noqa: E731
        return stopped(held_out, timing, bounded(CAP), policies, policy="disco")

    tell("which threshold and which cap are fastest")
    thresholds = sorted({0.0, *(ranked[int(share * len(ranked))] for share in _SHARES)})
    by_threshold = {threshold: tried(threshold, CAP) for threshold in thresholds}
    threshold = max(by_threshold, key=lambda each: by_threshold[each].totals.tokens_per_second)
    by_cap = {cap: tried(threshold, cap) for cap in _CAPS}
    cap = max(by_cap, key=lambda each: by_cap[each].totals.tokens_per_second)
    statics = [stopped(held_out, timing, bounded(gamma)) for gamma in _CAPS]
    static = max(statics, key=lambda each: each.totals.tokens_per_second)
    kept = classifier.model_copy(update={"threshold": threshold, "cap": cap})
    base = max(sum(right), len(right) - sum(right)) / len(right)
    return Trained(kept, classifier.examples, len(right), accuracy, base, by_cap[cap], static)
