"""The papers' closed forms: tokens per step, run lengths, speed-ups, and SSSD's roofline.

All functions take and return plain numbers, and must not know the runtime: a test compares them
with what the runtime does. `a` is the i.i.d. acceptance rate of a draft token.
"""


def sd_tokens_per_step(a: float, gamma: int) -> float:
    """Return the expected tokens that a target forward over `gamma` draft tokens commits, with correction or bonus.

    The formula is (1 - a^(gamma + 1)) / (1 - a). Source: Leviathan et al. 2023, "Fast Inference from Transformers via
    Speculative Decoding", equation 1.
    """
    if a == 1:
        return gamma + 1.0
    return (1 - a ** (gamma + 1)) / (1 - a)


def sd_improvement(a: float, gamma: int, cost: float) -> float:
    """Return the speed-up over the target alone: tokens per step / (gamma * cost + 1), with cost = t_draft / t_target.

    Source: Leviathan et al., theorem 3.8.
    """
    return sd_tokens_per_step(a, gamma) / (gamma * cost + 1)


def acceptance_of(mean_accepted: float) -> float:
    """Return the acceptance rate a for which runs have `mean_accepted` = 1 / (1 - a) tokens on average.

    A run is consecutive accepted draft tokens and the target's correction after them.

    Source: PEARL (Liu et al. 2024), theorem 2; some statements of this theorem count one token more.
    """
    return 1 - 1 / mean_accepted


# SSSD's device is an Ascend 910B4; its model is Llama 2 7B in 16 bits, without grouped heads.
_FLOPS = 280e12  # operations a second
_BANDWIDTH = 0.8e12  # bytes a second
_WIDTH = 4096
_LAYERS = 32
_WEIGHTS = 6.6e9


def free_in_theory(batch: int) -> float:
    """Return how many tokens per sequence, the last committed one included, are free in theory.

    The device is SSSD's. Tokens are free if their product with a square weight matrix takes no
    longer to compute than its operands and result take to read and write.
    """
    return 1 / (_BANDWIDTH / _FLOPS - 2 / _WIDTH) / batch


def roofline_seconds(batch: int, fed: int, context: int) -> float:
    """Return the seconds of a forward on SSSD's device, with `fed` tokens for each of `batch` sequences.

    Each sequence has `context` cached tokens. An operation takes the time of its computation or of its reads, whichever
    is longer.
    """
    products = max(2 * _WEIGHTS * batch * fed / _FLOPS, 2 * _WEIGHTS / _BANDWIDTH)
    pairs = context * _WIDTH * _LAYERS * batch
    return products + max(4 * pairs * fed / _FLOPS, 4 * pairs / _BANDWIDTH)
