"""How many drafted tokens vLLM verifies in a step, and how many it waits for if some are missing.

This is pure arithmetic on measured times. vLLM's step is a barrier, because vLLM verifies what the
proposer has returned. So a drafted token that arrives just after the step has begun waits for the
whole step. And if vLLM delays the step to wait for the token, every request is delayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

from pearl.protocol.speeds import Speeds
from pearl.protocol.window import worthwhile

# Wait only if waiting multiplies the tokens per second by more than this, because a proposer that
# waits holds up all of vLLM.
_LEAST_GAIN = 1.15
# A window ends where the probability that all its tokens are accepted falls below this, because the
# draft's time is then better spent on branches.
_LEAST_REACHED = 0.2


@dataclass
class StepSpeeds(Speeds):
    """The speeds of a target that verifies at most `most` drafted tokens of a request in a step."""

    most: int = 1

    def best_window(self, beside: int = 0) -> int:
        """Return the window c, the number of tokens that the target feeds for a request in a step.

        These are the last committed token and the drafted tokens. Until speeds have been measured,
        c is the maximum that vLLM takes.
        """
        if not self.ratio:
            return self.most + 1
        acceptance = min(max(self.acceptance, 0.05), 0.98)
        reached = ceil(log(_LEAST_REACHED) / log(acceptance))
        return min(super().best_window(beside), self.most + 1, reached + 1)


def window_lengths(chances: Sequence[Sequence[float]], speeds: Speeds) -> list[int]:
    """Return how many drafted tokens of each request to verify in the next step.

    The lengths are chosen for the most tokens per second of all requests together.

    Args:
        chances: for each request and each of its drafted tokens, the probability that this token
            and all drafted tokens before it are accepted.
    """
    ranked = []
    for row, row_chances in enumerate(chances):
        for chance in row_chances:
            ranked.append((-chance, row))
    ranked.sort()
    rows = len(chances)
    sorted_chances = [-chance for chance, _ in ranked]
    count = worthwhile(sorted_chances, rows, float(rows), speeds.target.hoped)
    lengths = [0] * rows
    for _, row in ranked[:count]:
        lengths[row] += 1
    return lengths


def worth_waiting(speeds: Speeds, foreseen: float, most: int, rows: int, lacking: int) -> int:
    """Return how many drafted tokens to wait for, if some requests have none; 0 means not to wait.

    The estimate assumes that each step is in one of two states. In the first state, nothing is
    ready: to wait for n tokens costs n draft forwards, and all requests wait. In the second state,
    a window is ready, because all tokens of the previous step were accepted, or because the draft
    had prepared for the correction. The result is the n with the most tokens per second in the long
    run; it is 0 if this n gains less than 15% over not waiting.

    Args:
        foreseen: the share of rejections for which the draft has prepared a continuation.
        most: maximum number of drafted tokens in a window.
        rows: number of requests in the step.
        lacking: number of requests for which nothing is ready.
    """
    t_draft = speeds.t_draft
    if not t_draft or not speeds.t_target(rows) or not lacking:
        return 0
    acceptance = min(max(speeds.acceptance, 0.05), 0.98)
    ready_tokens = max(1, min(most, int(speeds.ratio) - 1))
    delay = t_draft * rows / lacking

    def step(tokens: int) -> float:
        return speeds.t_target(rows * (tokens + 1))

    rates = []
    ready = _State.of(ready_tokens, acceptance, foreseen, step(ready_tokens))
    for count in range(min(most, int(speeds.ratio)) + 1):
        bare = _State.of(count, acceptance, foreseen, step(count) + count * delay)
        rates.append(_rate(bare, ready))
    best = max(rates)
    return rates.index(best) if best > _LEAST_GAIN * rates[0] else 0


@dataclass(frozen=True)
class _State:
    """A kind of step.

    Attributes:
        tokens: the expected number of tokens that the step commits.
        becomes_ready: the probability that a window is ready after the step.
        seconds: the duration of the step, with the wait before it.
    """

    tokens: float
    becomes_ready: float
    seconds: float

    @staticmethod
    def of(drafted: int, acceptance: float, foreseen: float, seconds: float) -> _State:
        """Return the state of a step that verifies `drafted` tokens and takes `seconds`.

        A window is ready after the step in two cases. Either all drafted tokens are accepted, and
        the draft's next token is the target's own next token. Or a token is rejected, and the draft
        had prepared for that.
        """
        all_agree = acceptance ** (drafted + 1)
        tokens = (1 - all_agree) / (1 - acceptance)
        return _State(tokens, all_agree + (1 - all_agree) * foreseen, seconds)


def _rate(bare: _State, ready: _State) -> float:
    """Return the tokens per second in the long run.

    Each step is in state `ready` if a window is ready for it, otherwise in state `bare`.
    """
    stays_ready = ready.becomes_ready
    share = bare.becomes_ready / (1 - stays_ready + bare.becomes_ready)  # of steps with a window
    tokens = (1 - share) * bare.tokens + share * ready.tokens
    return tokens / ((1 - share) * bare.seconds + share * ready.seconds)
