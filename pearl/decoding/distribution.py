"""A draft distribution: as a tensor, as bytes in a message, or announced in a message.

The draft makes a tensor [vocab] float32 over the target's vocabulary. A message holds either the
distribution's bytes (`PackedRow`), or an `AnnouncedRow`; the tensor then follows over the tensor
channel. The target turns both into tensors again. All forms are immutable. The command line imports
this file together with the codec, so torch and NumPy are imported only on use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pearl.errors import RemoteProtocolError

if TYPE_CHECKING:
    import torch

# A distribution with fewer than vocab / 8 possible tokens is sent sparse: also exact, and smaller.
_SPARSE_SHARE = 8
# A sparse distribution over more than vocab / 2 tokens takes more bytes than a dense one.
_MAX_SPARSE_SHARE = 2
_MAX_PROBABILITY = 1.001  # allows for rounding


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A distribution as bytes.

    Attributes:
        probs: float32 LE, the probability of each token of `ids`, or of each token of the vocabulary if `ids` is None.
        ids: int32 LE, the tokens of a sparse distribution; None for a dense one.
    """

    probs: bytes
    ids: bytes | None = None

    def unpack(self, vocab_size: int) -> torch.Tensor:
        """Return the distribution as a tensor [vocab_size] on the host.

        Raises `RemoteProtocolError` if the bytes are no distribution over `vocab_size` tokens (a
        broken draft model may send NaN), or if a sparse distribution takes more bytes than a dense
        one would.
        """
        import numpy as np
        import torch

        probs = np.frombuffer(self.probs, np.float32)
        if self.ids is None:
            is_sound = probs.size == vocab_size
        else:
            ids = np.frombuffer(self.ids, np.uint32)  # unsigned: negative ids exceed a vocabulary
            is_sound = 0 < ids.size <= vocab_size // _MAX_SPARSE_SHARE
            is_sound = is_sound and bool(ids.max() < vocab_size)
        if not is_sound or not are_probabilities(probs):
            raise RemoteProtocolError(
                f"draft sent what is no distribution over {vocab_size} tokens"
            )
        if self.ids is None:
            return torch.from_numpy(probs.copy())
        dense = np.zeros(vocab_size, np.float32)
        dense[ids] = probs
        return torch.from_numpy(dense)


@dataclass(frozen=True, slots=True)
class AnnouncedRow:
    """Stands in a message for a distribution whose tensor follows over the tensor channel."""


def pack(probs: torch.Tensor) -> PackedRow:
    """Pack a distribution [vocab] that is on the host, sparse if few tokens are possible."""
    import numpy as np

    weights = probs.numpy()
    possible = weights > 0  # NumPy counts booleans five times faster than floats
    if np.count_nonzero(possible) >= len(weights) // _SPARSE_SHARE:
        return PackedRow(weights.tobytes())
    ids = np.flatnonzero(possible)
    return PackedRow(weights[ids].tobytes(), ids.astype(np.int32).tobytes())


def is_sparse(probs: torch.Tensor) -> bool:
    """Return whether `pack` would make `probs` sparse; waits for the device of `probs`."""
    return int(probs.count_nonzero()) < probs.numel() // _SPARSE_SHARE


def are_probabilities(values: Any) -> bool:
    """Return whether the values lie in [0, 1] up to rounding, and no row is 0 everywhere.

    `values` is an array or tensor [..., vocab]. If it has a NaN, the result is False, because the
    minimum and the maximum are then NaN.
    """
    largest = getattr(values, "amax", values.max)(-1)
    return bool(values.min() >= 0 and largest.min() > 0 and largest.max() <= _MAX_PROBABILITY)
