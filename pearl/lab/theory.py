"""The papers' closed forms: tokens per step, run lengths, best windows, expected rejections.

Pure functions of numbers, which must not know the runtime: a test compares the two.  `a` is the i.i.d.
acceptance rate of a draft token; times are in any one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Distribution = Sequence[float]
Table = Sequence[Distribution]  # row s: after token s
MOST_GAMMA = 64


def geometric(a: float, n: int) -> float:
    """1 + a + ... + a**(n-1)."""
    return float(n) if a == 1 else (1 - a**n) / (1 - a)


# ---- speculative decoding ----


def sd_tokens_per_step(a: float, gamma: int) -> float:
    """Committed tokens per target forward that verifies `gamma` draft tokens, correction or bonus included.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", equation 1.
    """
    return geometric(a, gamma + 1)


def sd_improvement(a: float, gamma: int, cost: float) -> float:
    """Speed-up over the target alone; `cost`: t_draft / t_target. Source: Leviathan et al., theorem 3.8."""
    return sd_tokens_per_step(a, gamma) / (gamma * cost + 1)


def sd_best_gamma(a: float, t_draft: float, t_target: Callable[[int], float], delay: float = 0.0) -> int:
    """The fastest gamma, if a step takes gamma draft forwards, a target forward and two messages."""

    def rate(gamma: int) -> float:
        return sd_tokens_per_step(a, gamma) / (gamma * t_draft + t_target(gamma + 1) + 2 * delay)

    return max(range(1, MOST_GAMMA + 1), key=rate)


# ---- PEARL ----


def pearl_tokens_per_step(a: float, c: int) -> float:
    """Committed tokens per target step with the fixed window c; at t_target = c t_draft also the speed-up over `ar`.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a). Pre leads to post with probability a,
    post to post with a^c; the rest leads to pre. Source: the Markov chain of these two phases.
    """
    post = a / (1 + a - a**c)  # stationary share of post-verify steps
    return 1 - post + post * geometric(a, c)


def pearl_improvement(a: float, window: int, ratio: float) -> float:
    """Speed-up over the target alone with any fixed window.

    A step lasts as long as a target forward; after a full acceptance, until the next window is drafted if that is
    later.

    Args:
        ratio: t_target / t_draft, at least 1.

    Source: the chain of `pearl_tokens_per_step`.
    """
    post = a / (1 + a - a**window)
    late = max(window / ratio - 1, 0.0)  # by how much drafting a window outlasts a target forward
    return pearl_tokens_per_step(a, window) / (1 + late * ((1 - post) * a + post * a**window))


def no_pre_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without pre-verify. Source: renewals at corrections.

    After a correction the target waits for a whole window and verifies it with the token behind it; then each step
    verifies one window, until a token is rejected.
    """
    late = max(window / ratio - 1, 0.0)
    if a == 1:
        return window / (1 + late)
    again = a ** (window + 1) / (1 - a**window)  # steps of a renewal after its first
    tokens = geometric(a, window + 1) + again * geometric(a, window)
    seconds = window / ratio + 1 + late * a ** (window + 1) + again * (1 + late * a**window)
    return tokens / seconds


def no_post_verify_improvement(a: float, window: int, ratio: float) -> float:
    """`pearl_improvement` without post-verify. Source: renewals, each with a pre-verify.

    If that accepts, the target waits until the window is full, verifies the rest and draws a bonus token.
    """
    tokens = 1 + a * geometric(a, window)
    return tokens / (1 - a + a * (max(window / ratio, 1.0) + 1))


def acceptance_of(mean_accepted: float) -> float:
    """The acceptance rate, from the tokens of a run with its correction: the inverse of `run_committed`."""
    return 1 - 1 / mean_accepted


def run_committed(a: float) -> float:
    """Expected tokens of a run with its correction: a geometric distribution. Some statements of it count one more.

    Source: PEARL (Liu et al. 2024), theorem 2.
    """
    return 1 / (1 - a)


# ---- rejections ----


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
