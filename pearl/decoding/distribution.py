"""A draft distribution, from the device that it was drawn on to the device that judges with it.

Imports neither torch nor NumPy until one is needed: the codec, which a command line imports too, makes these of bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from pearl.errors import RemoteProtocolError

if TYPE_CHECKING:
    import torch

_SPARSE_SHARE = 8  # a distribution with fewer than vocab / 8 possible tokens travels sparse: exact, and smaller
_MOST_SPARSE = 2  # of a vocabulary half: a sparse one of more tokens takes more bytes than a dense one
_MOST = 1.001  # of a probability, however it was rounded


class Form(Enum):
    """How a distribution is held."""

    TENSOR = "tensor"  # torch.Tensor [vocab] float32, on any device; never on the wire
    SPARSE = "sparse"  # (ids, probs) of the possible tokens: bytes of int32 LE and of float32 LE
    FRAME = "frame"  # bytes of float32 LE over the vocabulary
    CHANNEL = "channel"  # announced; the tensor follows over the tensor channel (the sender keeps it until then)


class Distribution:
    """What a draft token was drawn from, float32 over the target's vocabulary.

    It changes its form in place on its way, so the message that carries it stays the same object: TENSOR on the draft's
    device, TENSOR on the host (`to_host`), SPARSE, FRAME or CHANNEL on the wire (`pack`), TENSOR again in the target
    (`unpack`, or `hold` for what has come over the channel).
    """

    __slots__ = ("data", "form")

    def __init__(self, data: Any, form: Form = Form.TENSOR) -> None:
        self.data, self.form = data, form

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Distribution) and (self.form, self.data) == (other.form, other.data)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Distribution({self.form.value})"

    @property
    def tensor(self) -> torch.Tensor:
        """[vocab], float32."""
        assert self.form is Form.TENSOR, self.form
        found: torch.Tensor = self.data
        return found

    @property
    def is_sparse(self) -> bool:
        """Whether few tokens are possible; waits for the device that holds the tensor."""
        if self.form is not Form.TENSOR:
            return self.form is Form.SPARSE
        return int(self.data.count_nonzero()) < self.data.numel() // _SPARSE_SHARE

    def hold(self, tensor: torch.Tensor) -> None:
        """Become this tensor [vocab]."""
        self.data, self.form = tensor, Form.TENSOR

    def to_host(self) -> None:
        """Copy the tensor to the host, from a GPU into pinned memory; wait for it."""
        probs = self.tensor
        if not probs.is_cpu:
            import torch

            self.data = probs.to("cpu", non_blocking=True)
            torch.cuda.current_stream(probs.device).synchronize()

    def announce(self) -> None:
        """Mark the tensor as one that follows over the tensor channel."""
        self.tensor  # noqa: B018  # it must be one
        self.form = Form.CHANNEL

    def pack(self) -> None:
        """Become bytes: SPARSE where few tokens are possible, otherwise FRAME. What is bytes, or announced, stays."""
        if self.form is not Form.TENSOR:
            return
        import numpy as np

        weights = self.data.numpy()
        possible = weights > 0  # booleans are counted five times faster than floats
        if np.count_nonzero(possible) < len(weights) // _SPARSE_SHARE:
            ids = np.flatnonzero(possible)
            self.data, self.form = (ids.astype(np.int32).tobytes(), weights[ids].tobytes()), Form.SPARSE
        else:
            self.data, self.form = weights.tobytes(), Form.FRAME

    @property
    def size(self) -> int:
        """Bytes that it takes as it is; 0: it has not come yet."""
        if self.form is Form.SPARSE:
            return len(self.data[0]) + len(self.data[1])
        if self.form is Form.TENSOR:
            return int(self.data.nbytes)
        return len(self.data) if self.form is Form.FRAME else 0

    def check(self, vocab_size: int) -> None:
        """Look at what a peer sent inline, without making room for it.

        Raises `RemoteProtocolError` where it is no distribution over this vocabulary, or takes more bytes than a dense
        one. A broken draft model says NaN.
        """
        import numpy as np

        if self.form is Form.FRAME:
            weights = np.frombuffer(self.data, np.float32)
            is_sound = weights.size == vocab_size
        elif self.form is Form.SPARSE:
            ids, weights = np.frombuffer(self.data[0], np.uint32), np.frombuffer(self.data[1], np.float32)
            # What was negative is largest.
            is_sound = 0 < ids.size <= vocab_size // _MOST_SPARSE and bool(ids.max() < vocab_size)
        else:
            return
        if not is_sound or not are_probabilities(weights):
            raise RemoteProtocolError(f"draft sent what is no distribution over {vocab_size} tokens")

    def unpack(self, vocab_size: int) -> None:
        """Become a tensor [vocab_size] on the host of what a peer sent inline; what is announced stays.

        Raises as `check`.
        """
        import numpy as np

        self.check(vocab_size)
        if self.form is Form.FRAME:
            probs = np.frombuffer(self.data, np.float32).copy()
        elif self.form is Form.SPARSE:
            probs = np.zeros(vocab_size, np.float32)
            probs[np.frombuffer(self.data[0], np.uint32)] = np.frombuffer(self.data[1], np.float32)
        else:
            return
        import torch

        self.hold(torch.from_numpy(probs))


def are_probabilities(values: Any) -> bool:
    """Whether each row of an array or tensor lies in [0, 1], up to rounding, and is not 0 all over: rules draw from it.

    A NaN is the minimum and the maximum of what it is in.
    """
    largest = values.amax(-1) if hasattr(values, "amax") else values.max(-1)
    return bool(values.min() >= 0 and largest.min() > 0 and largest.max() <= _MOST)
