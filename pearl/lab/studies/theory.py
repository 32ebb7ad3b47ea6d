"""The papers' closed forms: tokens per step, run lengths, speed-ups, and SSSD's roofline.

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


# SSSD's device and model, an Ascend 910B4 and Llama 2 7B in 16 bits, which has no grouped heads.
_FLOPS = 280e12  # a second
_BANDWIDTH = 0.8e12  # bytes a second
_WIDTH = 4096
_LAYERS = 32
_WEIGHTS = 6.6e9


def free_in_theory(batch: int) -> float:
    """Tokens of a sequence, its last one included, up to which a product of width by width costs no more there."""
    return 1 / (_BANDWIDTH / _FLOPS - 2 / _WIDTH) / batch


def roofline_seconds(batch: int, fed: int, context: int) -> float:
    """Time there of a forward that feeds `fed` tokens to each of `batch` sequences, each with `context` tokens cached.

    An operation takes what it computes or what it reads, if that is more.
    """
    products = max(2 * _WEIGHTS * batch * fed / _FLOPS, 2 * _WEIGHTS / _BANDWIDTH)
    pairs = context * _WIDTH * _LAYERS * batch
    return products + max(4 * pairs * fed / _FLOPS, 4 * pairs / _BANDWIDTH)
