"""Numbers that belong to token ids, as packed bytes: biases, log probabilities. The layouts in words are WIRE.md's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from pearl.config import LEAST_LOGPROB, MAX_BIASES, MAX_LOGPROBS, MOST_BIAS
from pearl.protocol.messages import Logprobs

_BIAS = struct.Struct("<id")  # token id, what is added to its logit
_LOGPROBS = struct.Struct("<H")  # how many of the likeliest each token has


def biases(value: object) -> tuple[tuple[int, float], ...]:
    """Of distinct tokens."""
    if type(value) is not bytes or len(value) % _BIAS.size or len(value) > MAX_BIASES * _BIAS.size:
        raise ValueError(f"must be the bytes of at most {MAX_BIASES} pairs (int32 LE, float64 LE)")
    pairs = tuple(_BIAS.iter_unpack(value))
    if any(token < 0 or not abs(bias) <= MOST_BIAS for token, bias in pairs):
        raise ValueError(f"must have token ids and biases from {-MOST_BIAS:g} to {MOST_BIAS:g}")
    if len({token for token, _ in pairs}) < len(pairs):
        raise ValueError("has a token twice")
    return pairs


def pack_biases(pairs: Sequence[tuple[int, float]]) -> bytes:
    return b"".join(_BIAS.pack(*pair) for pair in pairs)


def logprobs(value: bytes) -> tuple[Logprobs, ...]:
    """Of as many tokens as there are bytes; each has a float32, and `count` times (int32, float32)."""
    if not value:
        return ()
    count = _LOGPROBS.unpack_from(value)[0] if len(value) >= _LOGPROBS.size else MAX_LOGPROBS + 1
    if count > MAX_LOGPROBS:
        raise ValueError(f"must begin with a number of at most {MAX_LOGPROBS}")
    each = struct.Struct("<f" + "if" * count)
    if (len(value) - _LOGPROBS.size) % each.size:
        raise ValueError(f"must have {each.size} bytes a token")
    told = []
    for logprob, *pairs in each.iter_unpack(memoryview(value)[_LOGPROBS.size :]):
        ids, values = pairs[::2], pairs[1::2]
        if not all(LEAST_LOGPROB <= each <= 0 for each in (logprob, *values)) or any(id < 0 for id in ids):
            raise ValueError(f"must have token ids, and logarithms from {LEAST_LOGPROB:g} to 0")
        told.append(Logprobs(logprob, tuple(zip(ids, values, strict=True))))
    return tuple(told)


def pack_logprobs(told: Sequence[Logprobs]) -> bytes:
    if not told:
        return b""
    count = len(told[0].top)
    each = struct.Struct("<f" + "if" * count)
    rows = (each.pack(one.logprob, *chain.from_iterable(one.top)) for one in told)
    return _LOGPROBS.pack(count) + b"".join(rows)
