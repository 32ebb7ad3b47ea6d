"""Stop policies on recorded texts under the virtual clock, and the training of the classifier of policy `disco`.

Recorded are which draft tokens are right and the shape of the draft's distribution at each position.  After a wrong
token the draft would have other distributions; a policy is shown the recorded ones there.  That matters little: those
tokens are discarded, and a policy decides only how many there are.

Each token of the target's answers is an example for the classifier (Mamou et al. 2024).  Most texts train its layers;
on the held-out ones the threshold and the cap are chosen with which `sd` is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pearl.config.options import RequestOptions
from pearl.drafting.disco import INPUTS, Classifier, inputs
from pearl.drafting.stops import TOP, Doubtful, Features, Heuristic, StopPolicy, Threshold
from pearl.errors import ConfigError
from pearl.lab.studies.recorded_texts import RecordedText, RecordedTexts
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.workload import Text, VirtualDraft, run
from pearl.metrics import Sums
from pearl.spec.stops import CAP

STATIC = 5  # tokens: the DISCO paper's untuned window
_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, CAP)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEAST_TEXTS = 4
_HELD_OUT = 4  # every 4th text is held out
_UNITS = 32  # of the hidden layer
_STEPS, _RATE, _DECAY = 400, 0.01, 1e-3  # of AdamW on all examples at once
_QUANTILES = tuple(number / 20 for number in range(1, 20))  # of the confidences: thresholds to try
Policies = Callable[[RecordedText], StopPolicy | None]


class Oracle(StopPolicy):
    """Stops behind a wrong token, before one, and where the target's own token ends the text.

    So the target needs as few forwards as with endless windows, and no draft token follows a wrong one: where a draft
    forward takes less time than the target's, no policy is faster. `right`: by position in the answer.
    """

    def __init__(self, right: Sequence[bool]) -> None:
        self._right = right

    def stop(self, features: Features) -> bool:
        drawn = features.position
        return drawn + 2 >= len(self._right) or not (self._right[drawn] and self._right[drawn + 1])


@dataclass(frozen=True)
class Stopped:
    """Results of one policy. `drafted`: draft forwards; `totals.steps`: target forwards."""

    name: str
    totals: Sums
    drafted: int

    @property
    def speed(self) -> float:
        """Tokens per virtual second."""
        return self.totals.rate or 0.0

    @property
    def tokens_per_step(self) -> float:
        """After a text's first commit."""
        return float(self.totals.total("late_tokens") / self.totals.total("steps"))

    @property
    def window(self) -> int:
        """c or gamma as last used."""
        return self.totals.texts[-1].window

    @property
    def wasted(self) -> float | None:
        """Share of the drafted tokens that were not accepted."""
        return (
            1 - self.totals.total("num_accepted_draft_tokens") / self.drafted
            if self.drafted
            else None
        )


def stopped(
    recorded: RecordedTexts,
    timing: Timing,
    decoding: RequestOptions,
    policies: Policies = lambda text: None,
    name: str = "",
) -> Stopped:
    """Decode all texts by one method. `policies`: makes the policy of each text."""
    drafts = [
        VirtualDraft(len(text.prompt), text.features, policies(text)) for text in recorded.texts
    ]
    waiting = iter(drafts)
    texts = [Text(len(text.prompt), text.right) for text in recorded.texts]
    totals = run(texts, timing, decoding, draft=lambda: next(waiting))
    return Stopped(name, totals, sum(draft.calls for draft in drafts))


def _sd(gamma: int) -> RequestOptions:
    return RequestOptions("sd", "fixed", gamma)


def side_by_side(
    recorded: RecordedTexts,
    timing: Timing,
    classifier: Classifier | None,
) -> list[Stopped]:
    """The DISCO paper's table: `ar`; `sd` with 5 tokens, with the best window, and with each policy; `pearl` likewise.

    The best window and the best threshold are chosen on these texts, which favours them.
    """
    done = [stopped(recorded, timing, RequestOptions("ar"), name="ar")]

    def add(name: str, tried: Iterable[tuple[str, RequestOptions, Policies]]) -> None:
        """Append the fastest of `tried`, each with the end of its name."""
        found = [stopped(recorded, timing, one, made, name + end) for end, one, made in tried]
        done.append(max(found, key=lambda each: each.speed))

    none: Policies = lambda text: None  # noqa: E731
    add(f"sd, {STATIC} tokens", [("", _sd(STATIC), none)])
    add("sd, best static", [(f": {gamma}", _sd(gamma), none) for gamma in _GAMMAS])
    named: list[tuple[str, Policies]] = [("heuristic", lambda text: Heuristic())]
    if classifier is not None:
        named.append(("disco", lambda text: Doubtful(classifier)))
    named.append(("oracle", lambda text: Oracle(text.right)))
    thresholds: list[tuple[str, Policies]] = [
        (f": {least:g}", lambda text, least=least: Threshold(least))  # type: ignore[misc]
        for least in _THRESHOLDS
    ]
    for method, decoding in (("sd", _sd(CAP)), ("pearl", RequestOptions("pearl"))):
        if method == "pearl":
            add("pearl", [("", decoding, none)])
        add(f"{method}, best threshold", [(end, decoding, made) for end, made in thresholds])
        for policy, made in named:
            add(f"{method}, {policy}", [("", decoding, made)])
    return done


# ---- training ----


@dataclass(frozen=True)
class Trained:
    """A trained classifier and its results on the held-out texts.

    Attributes:
        held_out: tokens.
        accuracy: share of held-out tokens for which "confidence > 1/2" predicts acceptance correctly.
        base: the same of always predicting the more frequent outcome.
        best, static: `sd` with the classifier, and with the best static window.
    """

    classifier: Classifier
    held_out: int
    accuracy: float
    base: float
    best: Stopped
    static: Stopped


def examples(texts: Sequence[RecordedText]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [tokens, INPUTS] and labels [tokens] float32: 1 if the draft's token is the target's."""
    rows = [inputs(features) for text in texts for features in features_of(text)]
    labels = [float(right) for text in texts for right in text.right]
    return torch.tensor(rows).view(-1, INPUTS), torch.tensor(labels)


def features_of(text: RecordedText) -> list[Features]:
    """The features of each token of the answer, except its index in a window (0)."""
    rows = enumerate(text.features)
    return [Features(tuple(row[:TOP]), row[TOP], row[TOP + 1], 0, number) for number, row in rows]


def fit(
    seen: torch.Tensor, labels: torch.Tensor, target: str, draft: str, seed: int = 0
) -> Classifier:
    """Fit the layers by maximum likelihood; threshold 1/2 and the largest cap. A seed gives one classifier."""
    mean, scale = seen.mean(0), seen.std(0, correction=0).clamp_min(1e-3)
    whitened = (seen - mean) / scale
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(_UNITS, INPUTS, generator=generator) / INPUTS**0.5).requires_grad_()
    out = (torch.randn(_UNITS, generator=generator) / _UNITS**0.5).requires_grad_()
    hidden_bias, out_bias = (
        torch.zeros(_UNITS, requires_grad=True),
        torch.zeros(1, requires_grad=True),
    )
    optimizer = torch.optim.AdamW(
        [hidden, hidden_bias, out, out_bias], lr=_RATE, weight_decay=_DECAY
    )
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
        hidden=tuple(tuple(row) for row in hidden.tolist()),
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
    """Train on recorded texts. Raises `ConfigError` if there are too few."""
    if len(recorded.texts) < LEAST_TEXTS:
        raise ConfigError(
            f"{len(recorded.texts)} texts are too few to train on and to hold some out: at least {LEAST_TEXTS}"
        )
    learned, held_out = split(recorded)
    tell("training")
    classifier = fit(*examples(learned.texts), recorded.target, recorded.draft, seed)
    confidences = [
        classifier.confidence(each) for text in held_out.texts for each in features_of(text)
    ]
    right = [good for text in held_out.texts for good in text.right]
    predicted = [
        (confidence > 0.5) == good for confidence, good in zip(confidences, right, strict=True)
    ]

    def tried(**settings: float) -> Stopped:
        policy = Doubtful(classifier.model_copy(update=settings))
        return stopped(held_out, timing, _sd(CAP), lambda text: policy)

    tell("which threshold and which cap are fastest")
    ranked = sorted(confidences)
    thresholds = sorted({0.0, *(ranked[int(share * len(ranked))] for share in _QUANTILES)})
    threshold = max(thresholds, key=lambda each: tried(threshold=each).speed)
    by_cap = {cap: tried(threshold=threshold, cap=cap) for cap in _GAMMAS}
    cap = max(by_cap, key=lambda each: by_cap[each].speed)
    static = max(
        (stopped(held_out, timing, _sd(gamma)) for gamma in _GAMMAS), key=lambda each: each.speed
    )
    base = max(sum(right), len(right) - sum(right)) / len(right)
    kept = classifier.model_copy(update={"threshold": threshold, "cap": cap})
    return Trained(kept, len(right), sum(predicted) / len(right), base, by_cap[cap], static)


def split(recorded: RecordedTexts) -> tuple[RecordedTexts, RecordedTexts]:
    """(texts to train on, texts held out)."""
    held_out = recorded.texts[_HELD_OUT - 1 :: _HELD_OUT]
    others = [text for number, text in enumerate(recorded.texts, 1) if number % _HELD_OUT]
    return replace(recorded, texts=others), replace(recorded, texts=held_out)
