"""Stop policies, which may end a draft's window early, and the window of tokens that a policy sees.

A policy decides by the draft's distributions and the text, never by time, so that one seed gives
one text.  The policy may look at the token that was drawn, because that token is sent and judged
like any other.  The policy decides only whether the *next* position is drafted too.  An exact rule
is exact at that position with or without a draft token.  If the draft withheld a token because of
what the policy saw, the text would be biased.  So the draft withholds tokens only under rules that
are not exact (see `RuleSpec.withholds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pearl.errors import RequestError
from pearl.protocol.events import Open
from pearl.spec.stops import FIXED, check_stop

if TYPE_CHECKING:
    from pearl.drafting.disco import Classifier

TOP = 10  # probabilities in `Features`
_FIRST_WINDOW = 5  # tokens; as in transformers, and in the DISCO paper's use of it


@dataclass(frozen=True, slots=True)
class Features:
    """What a stop policy sees of a drafted token.

    Probabilities are those of the draft model at temperature 1, before top-k, top-p and min-p.

    Attributes:
        top: the largest probabilities, descending; at most `TOP`.
        entropy: entropy of the whole distribution, in nats.
        chosen: probability of the token.
        index: index of the token in its window, from 0.
        position: position of the token in the generated text, from 0.
    """

    top: tuple[float, ...]
    entropy: float
    chosen: float
    index: int
    position: int


class StopPolicy(Protocol):
    """Decides whether one request's draft ends a window early.

    A subclass that learns nothing from finished windows need not define `end_window`.
    """

    def stop(self, features: Features) -> bool:
        """Return whether the window ends after this token."""
        ...

    def end_window(self, accepted: int) -> None:
        """Learn from a finished window, whose first `accepted` tokens were accepted."""
        return


class Threshold(StopPolicy):
    """Stops after a token to which the draft gave a probability below `confidence`."""

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence

    def stop(self, features: Features) -> bool:
        return features.chosen < self._confidence


class Heuristic(StopPolicy):
    """Adapts the window's length to acceptance, as transformers does.

    The first window has 5 tokens. A fully accepted window makes the next one 2 tokens longer; any
    other window makes it 1 token shorter.
    """

    def __init__(self) -> None:
        self.window = _FIRST_WINDOW

    def stop(self, features: Features) -> bool:
        return features.index + 1 >= self.window

    def end_window(self, accepted: int) -> None:
        if accepted >= self.window:
            self.window += 2
        else:
            self.window = max(1, self.window - 1)


def make_policy(command: Open, classifier: Classifier | None = None) -> StopPolicy | None:
    """Return the stop policy of a request; None if windows end only at their bound.

    Raises `RequestError` if the request asks for `disco` and there is no classifier.
    """
    options = command.options
    values = check_stop(options.draft_stop).values(options.stop_parameters)
    match options.draft_stop:
        case "threshold":
            return Threshold(**values)
        case "heuristic":
            return Heuristic()
        case "disco" if classifier is not None:
            return classifier
        case name if name != FIXED:
            raise RequestError(
                f"this draft has no stop policy {name}: it takes a file of its own, see --disco"
            )
    return None


class StopWindow:
    """The current window of a request: where it begins, what was drafted, and whether it ended.

    A window begins after a token that this draft did not draw (a correction or a bonus token), or
    where the policy ended the last window.  So windows do not depend on when verdicts come.

    Args:
        policy: decides whether the window ends.
        begin: length of the text when the request began.
    """

    def __init__(self, policy: StopPolicy, begin: int) -> None:
        self.policy = policy
        self._origin = begin
        self._start = begin
        self._drafted: list[int] = []  # from `_start` on
        self._is_stopped = False

    def see(self, start: int, tokens: Sequence[int], drafts: bool) -> None:
        """Follow the text, which continues with `tokens` at position `start`.

        If `tokens` differ from the tokens that were drafted there, the window ends. `drafts`:
        whether a token is drafted after `tokens`.
        """
        end = start + len(tokens)
        for position in range(max(start, self._start), end):
            index = position - self._start
            if index >= len(self._drafted) or tokens[position - start] != self._drafted[index]:
                self._begin(position + 1, index)
        if drafts and self._is_stopped and end >= self._start + len(self._drafted):
            self._begin(end, len(self._drafted))  # the whole window was accepted
        elif drafts and end >= self._start:
            # Later tokens were rolled back, and are drafted again.
            del self._drafted[end - self._start :]
            self._is_stopped = False

    def _begin(self, start: int, accepted: int) -> None:
        if self._drafted:
            self.policy.end_window(accepted)
        self._start = start
        self._drafted = []
        self._is_stopped = False

    def stops(self, position: int, token: int, row: Sequence[float]) -> bool:
        """Return whether the window ends after `token`, which was drafted for `position`.

        `row`: the result of `step.shape_of`.
        """
        index = position - self._start
        del self._drafted[index:]
        self._drafted.append(token)
        *top, entropy, chosen = row
        features = Features(tuple(top), entropy, chosen, index, position - self._origin)
        self._is_stopped = self.policy.stop(features)
        return self._is_stopped
