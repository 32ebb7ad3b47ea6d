"""Measures stop policies on recorded texts, and trains the classifier of policy `disco`.

Time is virtual. A recorded text says which draft tokens are right, and has the features of the
draft's distribution at each position. In a real run the draft goes on from its own wrong tokens, so
the features after a wrong token would differ from the recorded ones. That matters little: tokens
after a wrong one are discarded, and a policy only decides how many there are.

Each token of the target's answers is an example for the classifier (Mamou et al. 2024). Three of
four texts train its layers. The other texts are held out: they choose the threshold and the cap
with which `sd` is fastest.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch

from pearl.config.options import RequestOptions
from pearl.drafting.disco import INPUTS, Classifier, inputs
from pearl.drafting.stops import TOP, Features, Heuristic, StopPolicy, Threshold
from pearl.errors import ConfigError
from pearl.lab.studies.recorded_texts import RecordedText, RecordedTexts
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.workload import TextPlan, VirtualDraft, decode
from pearl.metrics import Sums
from pearl.spec.stops import CAP

STATIC = 5  # tokens: the DISCO paper's untuned window
_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, CAP)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEAST_TEXTS = 4
_HELD_OUT = 4  # every 4th text is held out
_UNITS = 32  # width of the hidden layer
# Settings of AdamW; each step takes all examples at once.
_STEPS = 400
_RATE = 0.01
_DECAY = 1e-3
_QUANTILES = 20  # thresholds to try are quantiles of the confidences
Policies = Callable[[RecordedText], StopPolicy | None]


class Oracle(StopPolicy):
    """Stops if the next draft token is wrong, which the recorded text tells.

    It also stops after a wrong token, and before the answer's last token, which the target adds
    itself. So the target needs as few forwards as with endless windows, and no draft token follows
    a wrong one. No policy is faster if a draft forward takes less time than a target forward.

    Args:
        right: item i says whether the draft's token for position i of the answer is right.
    """

    def __init__(self, right: Sequence[bool]) -> None:
        self._right = right

    def stop(self, features: Features) -> bool:
        position = features.position
        is_last = position + 2 >= len(self._right)
        return is_last or not (self._right[position] and self._right[position + 1])


@dataclass(frozen=True)
class Stopped:
    """Results of one method with one stop policy.

    Attributes:
        totals: sums over the texts; `totals.total("steps")` is the number of target forwards.
        drafted: number of draft forwards.
    """

    name: str
    totals: Sums
    drafted: int

    @property
    def speed(self) -> float:
        """Tokens per virtual second."""
        return self.totals.rate or 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens per target forward, after a text's first commit."""
        return float(self.totals.total("late_tokens") / self.totals.total("steps"))

    @property
    def window(self) -> int:
        """The window of the last text, in tokens: c or gamma."""
        return self.totals.texts[-1].window

    @property
    def wasted(self) -> float | None:
        """Share of the drafted tokens that were not accepted."""
        if not self.drafted:
            return None
        return 1 - self.totals.total("num_accepted_draft_tokens") / self.drafted


class Tried(NamedTuple):
    """A method with its stop policy.

    Attributes:
        policies: function that makes the policy for a text; it returns None for no policy.
    """

    name: str
    decoding: RequestOptions
    policies: Policies = lambda text: None


def stopped(recorded: RecordedTexts, timing: Timing, tried: Tried) -> Stopped:
    """Decode all texts with one method and stop policy, in virtual time."""
    drafts = []
    texts = []
    for text in recorded.texts:
        drafts.append(VirtualDraft(len(text.prompt), text.features, tried.policies(text)))
        texts.append(TextPlan(len(text.prompt), text.right))
    totals = decode(texts, timing, tried.decoding, draft=iter(drafts).__next__)
    return Stopped(tried.name, totals, sum(draft.calls for draft in drafts))


def _fastest(recorded: RecordedTexts, timing: Timing, tried: Iterable[Tried]) -> Stopped:
    results = map(partial(stopped, recorded, timing), tried)
    return max(results, key=attrgetter("speed"))


def _sd(gamma: int) -> RequestOptions:
    return RequestOptions("sd", "fixed", gamma)


def _static() -> list[Tried]:
    """Return method sd with each of the static windows to try."""
    return [Tried(f"sd, best static: {gamma}", _sd(gamma)) for gamma in _GAMMAS]


def side_by_side(
    recorded: RecordedTexts,
    timing: Timing,
    classifier: Classifier | None,
) -> list[Stopped]:
    """Return the results for the DISCO paper's table.

    The rows are `ar`, `sd` with 5 tokens, `sd` with the best window, `sd` with each policy,
    `pearl`, and `pearl` with each policy. The best window and the best threshold are chosen on
    these texts, which favours their rows. Without a classifier there are no rows of policy disco.
    """
    rows = [
        [Tried("ar", RequestOptions("ar"))],
        [Tried(f"sd, {STATIC} tokens", _sd(STATIC))],
        _static(),
    ]
    rows += _with_policies("sd", _sd(CAP), classifier)
    rows.append([Tried("pearl", RequestOptions("pearl"))])
    rows += _with_policies("pearl", RequestOptions("pearl"), classifier)
    return [_fastest(recorded, timing, tried) for tried in rows]


def _with_policies(
    method: str, decoding: RequestOptions, classifier: Classifier | None
) -> list[list[Tried]]:
    """Return for each stop policy the variants to try.

    Policy threshold has a variant for each of `_THRESHOLDS`. All other policies have one variant.
    In the table, a policy has the row of its fastest variant.
    """
    thresholds = []
    for least in _THRESHOLDS:
        name = f"{method}, best threshold: {least:g}"
        thresholds.append(Tried(name, decoding, partial(_threshold, least)))
    rows = [thresholds, [Tried(f"{method}, heuristic", decoding, lambda text: Heuristic())]]
    if classifier is not None:
        rows.append([Tried(f"{method}, disco", decoding, lambda text: classifier)])
    rows.append([Tried(f"{method}, oracle", decoding, lambda text: Oracle(text.right))])
    return rows


def _threshold(least: float, text: RecordedText) -> StopPolicy:
    return Threshold(least)


# ---- training ----


@dataclass(frozen=True)
class Trained:
    """A trained classifier and its results on the held-out texts.

    Attributes:
        held_out: number of held-out tokens.
        accuracy: share of held-out tokens for which "confidence > 1/2" predicts acceptance correctly.
        base: the accuracy of always predicting the more frequent outcome.
        best: results of `sd` with the classifier.
        static: results of `sd` with the best static window.
    """

    classifier: Classifier
    held_out: int
    accuracy: float
    base: float
    best: Stopped
    static: Stopped


def examples(texts: Sequence[RecordedText]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [tokens, INPUTS] and labels [tokens] float32: 1 if the draft's token is the target's."""
    rows: list[Sequence[float]] = []
    labels: list[float] = []
    for text in texts:
        rows += map(inputs, features_of(text))
        labels += map(float, text.right)
    return torch.tensor(rows).view(-1, INPUTS), torch.tensor(labels)


def features_of(text: RecordedText) -> list[Features]:
    """Return the features of each token of the answer.

    The token's index in its window is set to 0, because the classifier does not read it.
    """
    features = []
    for position, row in enumerate(text.features):
        features.append(Features(tuple(row[:TOP]), row[TOP], row[TOP + 1], 0, position))
    return features


def fit(
    rows: torch.Tensor, labels: torch.Tensor, target: str, draft: str, seed: int = 0
) -> Classifier:
    """Fit the classifier's layers by maximum likelihood; the result is deterministic for a seed.

    The classifier's threshold is 1/2, and its cap is `CAP`.
    """
    mean = rows.mean(0)
    scale = rows.std(0, correction=0).clamp_min(1e-3)
    whitened = (rows - mean) / scale
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(_UNITS, INPUTS, generator=generator) / INPUTS**0.5).requires_grad_()
    out = (torch.randn(_UNITS, generator=generator) / _UNITS**0.5).requires_grad_()
    hidden_bias = torch.zeros(_UNITS, requires_grad=True)
    out_bias = torch.zeros(1, requires_grad=True)
    weights = [hidden, hidden_bias, out, out_bias]
    optimizer = torch.optim.AdamW(weights, lr=_RATE, weight_decay=_DECAY)
    for _ in range(_STEPS):
        logits = torch.relu(whitened @ hidden.T + hidden_bias) @ out + out_bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Classifier(
        target=target,
        draft=draft,
        threshold=0.5,
        cap=CAP,
        examples=len(labels),
        accepted=float(labels.mean()),
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        hidden=tuple(map(tuple, hidden.tolist())),
        hidden_bias=tuple(hidden_bias.tolist()),
        out=tuple(out.tolist()),
        out_bias=out_bias.item(),
    )


def train(
    recorded: RecordedTexts,
    timing: Timing,
    seed: int = 0,
    tell: Callable[[str], None] = lambda what: None,
) -> Trained:
    """Train a classifier on recorded texts; choose its threshold and cap. Raises `ConfigError` for too few texts."""
    if len(recorded.texts) < LEAST_TEXTS:
        raise ConfigError(
            f"{len(recorded.texts)} texts are too few to train on and to hold some out: at least {LEAST_TEXTS}"
        )
    learned, held_out = split(recorded)
    tell("training")
    rows, labels = examples(learned.texts)
    classifier = fit(rows, labels, recorded.target, recorded.draft, seed)
    confidences: list[float] = []
    labels_held_out = []
    for text in held_out.texts:
        confidences += map(classifier.confidence, features_of(text))
        labels_held_out += text.right
    count = len(labels_held_out)
    accepted = sum(labels_held_out)
    hits = 0
    for confidence, label in zip(confidences, labels_held_out, strict=True):
        hits += (confidence > 0.5) == label

    def tried(**settings: float) -> Stopped:
        policy = classifier.model_copy(update=settings)
        return stopped(held_out, timing, Tried("", _sd(CAP), lambda text: policy))

    tell("which threshold and which cap are fastest")
    ranked = sorted(confidences)
    thresholds = {0.0}
    for number in range(1, _QUANTILES):
        thresholds.add(ranked[int(number / _QUANTILES * count)])
    threshold = max(sorted(thresholds), key=lambda value: tried(threshold=value).speed)
    by_cap = {cap: tried(threshold=threshold, cap=cap) for cap in _GAMMAS}
    cap = max(by_cap, key=lambda cap: by_cap[cap].speed)
    return Trained(
        classifier=classifier.model_copy(update={"threshold": threshold, "cap": cap}),
        held_out=count,
        accuracy=hits / count,
        base=max(accepted, count - accepted) / count,
        best=by_cap[cap],
        static=_fastest(held_out, timing, _static()),
    )


def split(recorded: RecordedTexts) -> tuple[RecordedTexts, RecordedTexts]:
    """Return (texts to train on, texts held out)."""
    learned = list(recorded.texts)
    held_out = learned[_HELD_OUT - 1 :: _HELD_OUT]
    del learned[_HELD_OUT - 1 :: _HELD_OUT]
    return replace(recorded, texts=learned), replace(recorded, texts=held_out)
