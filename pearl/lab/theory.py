"""The papers' closed forms: tokens per step, run lengths, speed-ups.

Pure functions of numbers, which must not know the runtime: a test compares the two.  `a` is the i.i.d.
acceptance rate of a draft token; times are in any one unit.
"""

from __future__ import annotations


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


# ---- PEARL ----


def pearl_tokens_per_step(a: float, c: int) -> float:
    """Committed tokens per target step with the fixed window c; at t_target = c t_draft also the speed-up over `ar`.

    A pre-verify step yields 1 token, a post-verify step (1 - a^c) / (1 - a). Pre leads to post with probability a,
    post to post with a^c; the rest leads to pre. Source: the Markov chain of these two phases.
    """
    post = a / (1 + a - a**c)  # stationary share of post-verify steps
    return 1 - post + post * geometric(a, c)


def acceptance_of(mean_accepted: float) -> float:
    """The acceptance rate, from the tokens of a run with its correction: the inverse of `run_committed`."""
    return 1 - 1 / mean_accepted


def run_committed(a: float) -> float:
    """Expected tokens of a run with its correction: a geometric distribution. Some statements of it count one more.

    Source: PEARL (Liu et al. 2024), theorem 2.
    """
    return 1 / (1 - a)
