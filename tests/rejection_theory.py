"""How often rules reject, and by how much they bias the text, in closed form (Yin et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

Distribution = Sequence[float]
Table = Sequence[Distribution]  # row s: after token s


def total_variation(one: Distribution, other: Distribution) -> float:
    return sum(abs(x - y) for x, y in zip(one, other, strict=True)) / 2


def expected_rejections(target: Sequence[Table], draft: Sequence[Table], first: int) -> float:
    """Expected rejections in a text if the ratio rule judges every token.

    The sum over positions of the expected total variation distance between the models' distributions, over texts of
    the target.  Exact for models that depend on the last token and the position only (Markov chains).

    Args:
        target, draft: for each token of the text, row s is its distribution after token s.
        first: the last token of the prompt.

    Source: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm", theorem 1.
    """
    return expected_relaxed_rejections(target, draft, first, 0.0)[0]


def expected_relaxed_rejections(
    target: Sequence[Table], draft: Sequence[Table], first: int, epsilon: float, corrects: bool = True
) -> tuple[float, float]:
    """(expected rejections, bias) of a rule that accepts with probability min(1, (target + epsilon) / draft).

    A token of target probability 0 is never accepted.  The bias is the sum over positions of the expected distance
    between the distribution of the committed token and the target's.  Source: Yin et al. 2024, section 4.2.

    Args:
        target, draft, first: see `expected_rejections`.
        corrects: replace a rejected token by a sample of the residual (rule opt), else of the target (rule uno).
    """
    states = [float(s == first) for s in range(len(target[0]))]
    rejections = bias = 0.0
    for p_rows, q_rows in zip(target, draft, strict=True):
        laws: list[Distribution] = []
        for share, p, q in zip(states, p_rows, q_rows, strict=True):
            accepted = [min(y, x + epsilon) if x else 0.0 for x, y in zip(p, q, strict=True)]
            rejected, rest = max(0.0, 1 - sum(accepted)), _excess(p, q) if corrects else list(p)
            part = rejected / total if (total := sum(rest)) else 0.0
            laws.append([one + part * other for one, other in zip(accepted, rest, strict=True)])
            rejections += share * rejected
            bias += share * total_variation(laws[-1], p)
        states = _after(states, laws)
    return rejections, bias


def expected_batch_rejections(target: Sequence[Table], draft: Sequence[Table], first: int, candidates: int) -> float:
    """Expected rejections of rule batch, which judges `candidates` tokens behind the prompt and behind each rejection.

    The ratio rule's expectation, less what the further candidates save at these places.  They never save all: other
    positions have one candidate.  Source: Yin et al. 2024, theorem 3.
    """
    states = [float(s == first) for s in range(len(target[0]))]
    after, expected = list(states), 0.0  # after[s]: probability that s replaced a rejected token, or ends the prompt
    for p_rows, q_rows in zip(target, draft, strict=True):
        distances = [total_variation(p, q) for p, q in zip(p_rows, q_rows, strict=True)]
        judged = [_judged_in_turn(p, q, candidates) for p, q in zip(p_rows, q_rows, strict=True)]
        expected += sum(share * distance for share, distance in zip(states, distances, strict=True))
        for share, distance, (rejected, _) in zip(after, distances, judged, strict=True):
            expected -= share * (distance - rejected)
        elsewhere = [share - root for share, root in zip(states, after, strict=True)]
        at_others = _after(elsewhere, [_excess(p, q) for p, q in zip(p_rows, q_rows, strict=True)])
        after = [one + other for one, other in zip(_after(after, [rest for _, rest in judged]), at_others, strict=True)]
        states = _after(states, p_rows)
    return expected


def _after(states: Sequence[float], rows: Sequence[Distribution]) -> list[float]:
    return [sum(share * row[t] for share, row in zip(states, rows, strict=True)) for t in range(len(rows))]


def _excess(one: Distribution, other: Distribution) -> list[float]:
    return [max(x - y, 0.0) for x, y in zip(one, other, strict=True)]


def _judged_in_turn(target: Distribution, draft: Distribution, candidates: int) -> tuple[float, list[float]]:
    """(probability that all candidates are rejected, the same by the token that becomes the correction)."""
    left, rejected = list(target), 1.0
    for _ in range(candidates):
        left = _excess(left, draft)
        total = sum(left)
        if total == 0:
            return 0.0, left
        rejected *= total
        left = [each / total for each in left]
    return rejected, [rejected * each for each in left]
