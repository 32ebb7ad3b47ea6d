"""What a draft worker needs of whoever guesses, and of the policy that says where to stop guessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import HiddenStates

if TYPE_CHECKING:  # checking a stop policy's file does not need torch
    import torch

    from pearl.drafting.step import Step

TOP = 10  # probabilities in `Features`


class Proposer(Protocol):
    """Proposes the tokens that follow a text. `Open` names the slot of a request's text.

    Attributes:
        device: what it computes on.
        chains: whether `launch` returns before the device is done, and takes the last `Step` in place of a token
            that the host does not know yet.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def chains(self) -> bool: ...

    def measure(self, brief: bool) -> tuple[float, float]:
        """Measure seconds a proposal and seconds a token of a long prefix; forgets all texts.

        `brief`: in little time.
        """
        ...

    def open(self, command: Open) -> None:
        """Get ready for a request. Raises `RequestError` where it cannot be served."""
        ...

    def chained(self, request: int) -> bool:
        """Whether this request's forwards may be launched before the host knows the tokens to feed."""
        ...

    def awaits(self, command: Draft, delay: float) -> bool:
        """Whether to await the token that `command` requests before the next forward is launched.

        That forward can then be fed guesses behind the token, which has to gain more than the `delay` in seconds for
        which the device idles.
        """
        ...

    def rollback(self, length: int, request: int) -> None:
        """Forget all but the first `length` tokens of the request's text."""
        ...

    def see(self, states: HiddenStates) -> None:
        """Read the target's hidden states before the next proposal. Raises `RemoteProtocolError`."""
        ...

    def launch(self, command: Draft, after: Step | None = None) -> Step:
        """Take in the command's tokens, which continue the text, and start on a proposal of up to `budget` tokens.

        Args:
            after: what was launched last; its token stands in place of the command's one token.
        """
        ...

    def launch_together(self, commands: Sequence[Draft]) -> list[Step | Drafted]:
        """As `launch` of each, in one forward. An event in place of one: nothing can be drawn for it."""
        ...

    def collect(self, launched: Step) -> Drafted:
        """Wait for a proposal, and only for that. Raises `NumericalError` where the logits were not finite."""
        ...


@dataclass(frozen=True, slots=True)
class Features:
    """What a stop policy sees of a drafted token. Probabilities are the draft's own: at temperature 1, unfiltered.

    Attributes:
        top: the largest, descending; at most `TOP`.
        entropy: of the whole distribution, nats.
        chosen: of the token.
        index: in its window, from 0.
        position: in the generated text, from 0.
    """

    top: tuple[float, ...]
    entropy: float
    chosen: float
    index: int
    position: int


class StopPolicy(Protocol):
    """Where one request's draft ends a window before its bound. See `pearl.drafting.stops`.

    A subclass that learns nothing from a window leaves `end_window` out.
    """

    def stop(self, features: Features) -> bool:
        """Whether the window ends behind this token."""
        ...

    def end_window(self, accepted: int) -> None:
        """Learn that a window is over, and that its first `accepted` tokens were accepted."""
        return
