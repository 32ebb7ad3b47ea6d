"""The papers' closed forms: tokens per step, run lengths, speed-ups.

Pure functions of numbers, which must not know the runtime: a test compares the two.  `a` is the i.i.d.
acceptance rate of a draft token; times are in any one unit.
"""

from __future__ import annotations


def sd_tokens_per_step(a: float, gamma: int) -> float:
    """Committed tokens per target forward that verifies `gamma` draft tokens, correction or bonus included.

    (1 - a^(gamma + 1)) / (1 - a). Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
    Decoding", equation 1.
    """
    if a == 1:
        return gamma + 1.0
    return (1 - a ** (gamma + 1)) / (1 - a)


def sd_improvement(a: float, gamma: int, cost: float) -> float:
    """Speed-up over the target alone; `cost`: t_draft / t_target. Source: Leviathan et al., theorem 3.8."""
    return sd_tokens_per_step(a, gamma) / (gamma * cost + 1)


def acceptance_of(mean_accepted: float) -> float:
    """The acceptance rate, from the expected tokens of a run with its correction: 1 / (1 - a), of a geometric law.

    Source: PEARL (Liu et al. 2024), theorem 2; some statements of it count one token more.
    """
    return 1 - 1 / mean_accepted
