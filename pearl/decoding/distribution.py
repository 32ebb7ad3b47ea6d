"""A draft distribution in its three forms: a tensor on a device, packed bytes on the wire, or announced.

The draft makes tensors `[vocab]` float32 over the target's vocabulary. Each travels as a `PackedRow`, or as an
`AnnouncedRow` while the tensor itself goes over the tensor channel; the target makes tensors of both. All are
immutable. Imports neither torch nor NumPy until one is needed, because the command line imports the codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pearl.errors import RemoteProtocolError

if TYPE_CHECKING:
    import torch

# A distribution with fewer than vocab / 8 possible tokens travels sparse: exact, and smaller.
_SPARSE_SHARE = 8
# A sparse distribution over more than vocab / 2 tokens takes more bytes than a dense one.
_MAX_SPARSE_SHARE = 2
_MAX_PROBABILITY = 1.001  # allows for rounding


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A distribution as bytes.

    Attributes:
        probs: float32 LE, of each token of `ids` or of the whole vocabulary.
        ids: int32 LE, the possible tokens; None: `probs` is dense.
    """

    probs: bytes
    ids: bytes | None = None

    def unpack(self, vocab_size: int) -> torch.Tensor:
        """Return the tensor [vocab_size] on the host.

        Raises `RemoteProtocolError` where this is no distribution over `vocab_size` tokens (a broken draft model may
        send NaN) or takes more bytes than a dense one.
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
    """A message's place for a distribution whose tensor follows over the tensor channel."""


def pack(probs: torch.Tensor) -> PackedRow:
    """Pack a tensor [vocab] on the host, sparse where few tokens are possible."""
    import numpy as np

    weights = probs.numpy()
    possible = weights > 0  # NumPy counts booleans five times faster than floats
    if np.count_nonzero(possible) >= len(weights) // _SPARSE_SHARE:
        return PackedRow(weights.tobytes())
    ids = np.flatnonzero(possible)
    return PackedRow(weights[ids].tobytes(), ids.astype(np.int32).tobytes())


def is_sparse(probs: torch.Tensor) -> bool:
    """Return whether `pack` would make it sparse; waits for the device that holds it."""
    return int(probs.count_nonzero()) < probs.numel() // _SPARSE_SHARE


def are_probabilities(values: Any) -> bool:
    """Return whether each row of an array or tensor lies in [0, 1] up to rounding and is not all zero.

    False where there is a NaN, which is then both minimum and maximum.
    """
    largest = getattr(values, "amax", values.max)(-1)
    return bool(values.min() >= 0 and largest.min() > 0 and largest.max() <= _MAX_PROBABILITY)
