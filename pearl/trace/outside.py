"""What a trace says of PEARL's proposer in another engine, such as vLLM.

It tells whether drafted windows were ready, and how long the engine's steps waited.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pearl.trace.reading import Slice

_AT_ONCE = 1e-3  # seconds


@dataclass(frozen=True)
class Proposals:
    """The calls of the proposer in one run.

    Attributes:
        calls: number of steps after which the proposer was called.
        at_once: number of calls that returned within 1 ms.
        rows: number of requests, summed over all calls.
        ready: how many of `rows` had a drafted window ready.
        rejected: how many of `rows` had a drafted token rejected in the step before the call.
        foreseen: for how many of `rejected` the draft had prepared tokens after the right token.
    """

    calls: int
    at_once: int
    rows: int
    ready: int
    rejected: int
    foreseen: int

    def __str__(self) -> str:
        return (
            f"ready {_share(self.ready, self.rows)}, after rejections {_share(self.foreseen, self.rejected)}; "
            f"proposed within 1 ms {_share(self.at_once, self.calls)}"
        )


def proposals(slices: Iterable[Slice]) -> Proposals | None:
    """Count the proposer's calls in the target's slices.

    Returns None if there are no calls, as in a trace of PEARL's own target.
    """
    calls = [piece for piece in slices if piece.name == "propose" and piece.args["rows"]]
    if not calls:
        return None
    totals = dict.fromkeys(("rows", "ready", "rejected", "foreseen"), 0)
    at_once = 0
    for call in calls:
        at_once += call.args["seconds"] <= _AT_ONCE
        for name in totals:
            totals[name] += call.args[name]
    return Proposals(len(calls), at_once, **totals)


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%} of {total}" if total else "-"
