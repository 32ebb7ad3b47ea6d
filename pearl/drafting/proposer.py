"""What a draft worker asks of whoever guesses, and of the policy that says where to stop guessing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pearl.protocol.events import Draft, Drafted, Open

if TYPE_CHECKING:  # who checks a file of a stop policy starts without it
    import torch

TOP = 10  # probabilities in `Features`


class Launched(Protocol):
    """A proposal asked of a device and not waited for.

    Attributes:
        command: what asked for it.
    """

    @property
    def command(self) -> Draft: ...

    @property
    def done(self) -> bool:
        """Whether `collect` would not wait."""
        ...

    @property
    def following(self) -> torch.Tensor | None:
        """[1], on the device: the last token proposed, for the next forward to be fed before the host knows it.

        None where the host knows it by now.
        """
        ...


class Proposer(Protocol):
    """Proposes the tokens that follow a text. What it is told of a request names its slot in `Open`.

    Attributes:
        device: what it computes on.
        chains: whether `launch` returns before the device is done, and takes what was launched before it in place of a
            token that the host does not know yet.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def chains(self) -> bool: ...

    def measure(self, brief: bool) -> tuple[float, float]:
        """Seconds that a proposal takes, and seconds a token of a long prefix; forgets all texts.

        `brief`: in little time.
        """
        ...

    def open(self, command: Open) -> None:
        """Get ready for a request. Raises `RequestError` where it cannot be served."""
        ...

    def chained(self, request: int) -> bool:
        """Whether this request's forwards may be launched one after the other, before the host knows what to feed."""
        ...

    def awaits(self, command: Draft, delay: float) -> bool:
        """Whether to await the token that `command` asks for before the next forward is launched: it is then fed
        guesses of what follows, which gains more than `delay` costs, the seconds for which the device idles.
        """
        ...

    def rollback(self, length: int, request: int) -> None:
        """Forget all but the first `length` tokens of the request's text."""
        ...

    def launch(self, command: Draft, after: Launched | None = None) -> Launched:
        """Take in the command's tokens, which continue the text, and start on a proposal of up to `budget` tokens.

        Args:
            after: what was launched last; its token stands in place of the command's one token.
        """
        ...

    def launch_together(self, commands: Sequence[Draft]) -> list[Launched | Drafted]:
        """As `launch` of each, in one forward. An event in its place: nothing can be drawn for this one."""
        ...

    def collect(self, launched: Launched) -> Drafted:
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
    """Where one request's draft ends a window before its bound. See `pearl.drafting.stops`."""

    def stop(self, features: Features) -> bool:
        """Whether the window ends behind this token."""
        ...

    def confidence(self, features: Features) -> float | None:
        """How likely the target accepts this token, in [0, 1]; None where the policy has no opinion."""
        ...

    def told(self, accepted: int) -> None:
        """A window is over: its first `accepted` tokens were accepted."""
        ...
