"""What the papers say in closed form: tokens a step, run lengths, best windows, expected rejections.

Pure functions of plain numbers, with their sources.  Knows nothing of the runtime: `experiments.checks` sets the two
against each other.  Acceptance rates are `a`, of a draft token, i.i.d.; times are seconds (or any one unit).
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
    """Committed tokens of a target forward that verifies `gamma` draft tokens, its correction or bonus included.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", equation 1.
    """
    return geometric(a, gamma + 1)


def sd_improvement(a: float, gamma: int, cost: float) -> float:
    """How many times as fast as the target alone; `cost`: t_draft / t_target. Source: the same, theorem 3.8."""
    return sd_tokens_per_step(a, gamma) / (gamma * cost + 1)


def sd_best_gamma(a: float, t_draft: float, t_target: Callable[[int], float], delay: float = 0.0) -> int:
    """The gamma with the most tokens a second, where a step takes gamma drafts, one forward and two messages."""

    def rate(gamma: int) -> float:
        return sd_tokens_per_step(a, gamma) / (gamma * t_draft + t_target(gamma + 1) + 2 * delay)

    return max(range(1, MOST_GAMMA + 1), key=rate)


# ---- PEARL ----


def pearl_tokens_per_step(a: float, c: int) -> float:
    """Committed tokens a target step with the fixed window c. At t_target = c t_draft it is the speed-up over `ar` too.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a). Pre leads to post with probability a,
    post to post with a^c; the rest leads to pre. Source: the Markov chain of these two phases.
    """
    post = a / (1 + a - a**c)  # its stationary share of post-verify steps
    return 1 - post + post * geometric(a, c)


def pearl_foreseen_tokens_per_step(a: float, c: int, foreseen: float, filled: int | None = None) -> float:
    """The same where a share `foreseen` of the rejections has a window waiting: `pearl` with branches.

    Args:
        filled: draft tokens in such a window; None: c - 1, as many as there are after an acceptance.

    Three kinds of steps.  A pre-verify judges 1 token; a post-verify of a full window judges c; one behind a foreseen
    rejection is fed the correction and `filled` tokens, and judges m = filled + 1.  One that judges k yields
    (1 - a^k) / (1 - a) tokens and accepts all with probability a^k: then the next is a full window.  Otherwise the next
    is a window that was waiting, with probability `foreseen`, or else a pre-verify.  With r the share of steps that
    follow a rejection, 1 - r is that of full windows, and balance demands

        r = (1 - foreseen) r (1 - a) + foreseen r (1 - a^m) + (1 - r) (1 - a^c)
        r = (1 - a^c) / ((1 - foreseen) a + foreseen a^m + 1 - a^c)

    With foreseen = 0 that is the chain above; with foreseen = 1 and full windows every step judges c.

    Assumed: whether a rejection is foreseen is independent of all else; every foreseen window is filled as far; rows
    for branches cost the draft no time, for they are computed beside its own; and tokens behind a rejection are right
    as often as others.  A real draft fills a branch in the forwards between its outcome's row and the verdict: the less
    the nearer the rejection is to the window's end, and what follows a rejection is harder.  So with full windows this
    is a bound.
    """
    judged = c if filled is None else filled + 1
    right, waiting = a**c, a**judged
    rejected = (1 - right) / ((1 - foreseen) * a + foreseen * waiting + 1 - right) if right < 1 else 0.0
    behind = (1 - foreseen) + foreseen * geometric(a, judged)
    return rejected * behind + (1 - rejected) * geometric(a, c)


def pearl_lookup_ratio(hit: float, most: int) -> float:
    """Tokens of a draft forward that looks up `most` tokens, each right with probability `hit` where those before are.

    So many times as large is c, PEARL's bound on the speed-up. Source: a geometric distribution, cut off.
    """
    return geometric(hit, most + 1)


def pearl_improvement(a: float, window: int, ratio: float) -> float:
    """How many times as fast as the target alone, with any fixed window.

    A step lasts as long as a target forward; where all was accepted, until the next window is drafted.

    Args:
        ratio: t_target / t_draft, at least 1.

    Source: the chain of `pearl_tokens_per_step`.
    """
    post = a / (1 + a - a**window)
    late = max(window / ratio - 1, 0.0)  # how much longer a window takes to draft than a forward
    return pearl_tokens_per_step(a, window) / (1 + late * ((1 - post) * a + post * a**window))


def no_pre_verify_improvement(a: float, window: int, ratio: float) -> float:
    """The same without pre-verify. Source: renewals at corrections.

    After one the target waits for a whole window, and verifies it and the token behind it; from then on each step
    verifies one window, until one of its tokens is rejected.
    """
    late = max(window / ratio - 1, 0.0)
    if a == 1:
        return window / (1 + late)
    again = a ** (window + 1) / (1 - a**window)  # steps after the first
    tokens = geometric(a, window + 1) + again * geometric(a, window)
    seconds = window / ratio + 1 + late * a ** (window + 1) + again * (1 + late * a**window)
    return tokens / seconds


def no_post_verify_improvement(a: float, window: int, ratio: float) -> float:
    """The same of a fixed window without post-verify. Source: renewals, each with a pre-verify.

    Where that accepts, the target waits until the window is full and verifies the rest of it, with a bonus behind it.
    """
    tokens = 1 + a * geometric(a, window)
    return tokens / (1 - a + a * (max(window / ratio, 1.0) + 1))


def acceptance_of(mean_accepted: float) -> float:
    """Of tokens a run, its correction included: the inverse of `run_committed`."""
    return 1 - 1 / mean_accepted


def pearl_best_window(t_draft: float, t_target: float) -> float:
    """With constant forward times: their ratio. Source: PEARL (Liu et al. 2024), theorem 1."""
    return t_target / t_draft


def run_accepted(a: float) -> float:
    """Expected draft tokens accepted between two rejections. Source: PEARL, theorem 2 (a geometric distribution)."""
    return a / (1 - a)


def run_committed(a: float) -> float:
    """Expected tokens of a run, its correction included. Statements of theorem 2 that count one more say 1 + this."""
    return 1 / (1 - a)


# ---- rejections ----


def total_variation(one: Distribution, other: Distribution) -> float:
    return sum(abs(x - y) for x, y in zip(one, other, strict=True)) / 2


def expected_rejections(target: Sequence[Table], draft: Sequence[Table], first: int) -> float:
    """Rejections that decoding a text costs, every token of which is drafted and judged by the ratio rule.

    The sum over positions of the expected total variation distance between the two models' distributions, over texts
    of the target.  Exact, for models that look at the last token and the position alone: the text is a Markov chain.

    Args:
        target, draft: for each token of the text, row s is its distribution after token s.
        first: the last token of the prompt.

    Source: Yin et al. 2024, "A Theoretical Perspective for Speculative Decoding Algorithm", theorem 1.
    """
    return expected_relaxed_rejections(target, draft, first, 0.0)[0]


def expected_relaxed_rejections(
    target: Sequence[Table], draft: Sequence[Table], first: int, epsilon: float, corrects: bool = True
) -> tuple[float, float]:
    """The same by a rule that accepts with probability min(1, (target + epsilon) / draft), and its bias.

    Nothing is accepted where the target's probability is 0.

    Args:
        corrects: whether a rejected token is replaced from the residual, as by rule opt; else from the target: uno.

    Returns:
        Expected rejections, and the sum of the expected distances of what is committed from the target's distribution.
        Source: as above, section 4.2.
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
    """The same by rule batch: `candidates` tokens are judged behind the prompt and behind each rejection.

    From the expectation of one draft is taken off what the others save where there are others.  `after` is how likely
    the text stands at a token that replaced a rejected one (or at the prompt's last).  No number of candidates brings
    it to 0: only those places profit.  Source: as above, theorem 3.
    """
    states = [float(s == first) for s in range(len(target[0]))]
    after, expected = list(states), 0.0
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
    """How likely all candidates are rejected, and each token's share of that as the correction."""
    left, rejected = list(target), 1.0
    for _ in range(candidates):
        left = _excess(left, draft)
        total = sum(left)
        if total == 0:
            return 0.0, left
        rejected *= total
        left = [each / total for each in left]
    return rejected, [rejected * each for each in left]
