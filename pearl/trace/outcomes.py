"""Whether each drafted token of a trace was accepted, rejected, or discarded (never judged).

An "outcome" (position, token) is what the target may commit where the draft expects another token; a "branch" is what
the draft prepares for it.  If the target commits that token, the branch becomes the main line of a new epoch.
"""

from __future__ import annotations

from typing import Any

from pearl.trace.recorder import Record

ACCEPTED, REJECTED, DISCARDED = "accepted", "rejected", "discarded"

_Outcome = tuple[int, int]  # position, token
_Line = tuple[int, _Outcome | None]  # a drafted token's epoch, and its branch's outcome (None: main line)


class Outcomes:
    """First pass all records of the target to `learn`; then the draft's in order, events to `read`, tokens to `of`."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], _Line] = {}  # (request, position) -> line of the pending token there
        self._branches: dict[tuple[int, _Line], list[int]] = {}  # (request, line) -> positions of a branch
        self._opened: dict[int, _Outcome] = {}  # request -> the outcome that opened its epoch
        self._epochs: dict[Any, int] = {}  # request -> the target's epoch at its last decision
        self._judged: dict[tuple[int, _Line, int], tuple[str, int]] = {}  # (request, line, position) -> (verdict, time)
        # Tokens that a target drew without waiting for the draft's: request -> position -> (token, time).
        self._drawn: dict[int, dict[int, tuple[int, int]]] = {}
        self._text: dict[int, dict[int, int]] = {}  # request -> position -> token, as the draft has the text
        self._prepared: dict[tuple[int, _Outcome], list[int]] = {}  # (request, outcome) -> tokens drafted for it

    def learn(self, record: Record) -> None:
        args = record.args
        match record.name:
            case "decide":
                if "epoch" in args:
                    self._epochs[args["event"]["request"]] = args["epoch"]
                self._learn_event(args["event"])
            case "sample" if args["request"] in self._drawn:
                for position, token in enumerate(args["tokens"], args["start"]):
                    self._drawn[args["request"]][position] = token, record.middle
            case "sample" if args["tokens"]:  # e.g. a bonus token, for which there may be a branch
                self._open_epoch(args["request"], args["start"], args["tokens"][0])
            case "judge":
                self._learn_judgement(args, record.middle)

    def _learn_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "Submit" and event["options"]["look_ahead"]:
            self._drawn[event["request"]] = {}
        if event["type"] != "DraftTokens":
            return
        request, line = event["request"], _line(event)
        positions = range(event["start"], event["start"] + len(event["tokens"]))
        if line[1] is not None and self._opened.get(request) != line[1]:
            self._branches.setdefault((request, line), []).extend(positions)
            return
        for key in ((request, position) for position in positions):
            if self._lines.get(key, line)[0] <= line[0]:  # not stale
                self._lines[key] = line

    def _learn_judgement(self, args: dict[str, Any], time: int) -> None:
        request, start, accepted = args["request"], args["start"], args["accepted"]
        is_corrected = args["correction"] is not None
        for position in range(start, start + accepted + is_corrected):
            line = self._lines.get((request, position), (-1, None))
            self._judged[request, line, position] = (ACCEPTED if position < start + accepted else REJECTED), time
        if is_corrected:
            self._open_epoch(request, start + accepted, args["correction"])

    def _open_epoch(self, request: int, position: int, token: int) -> None:
        """`token` was committed in a new epoch: its branch, including tokens still to come, becomes the main line."""
        self._opened[request] = outcome = position, token
        line = self._epochs.get(request, 0), outcome
        self._lines.update({(request, at): line for at in self._branches.get((request, line), ())})

    def read(self, event: dict[str, Any]) -> None:
        """Apply an event of the draft to its text, as `DraftMachine` does."""
        if event["type"] == "Begin":
            self._text.pop(event["request"], None)
            self._prepared = {key: each for key, each in self._prepared.items() if key[0] != event["request"]}
        if event["type"] != "Verdict":
            return
        request = event["request"]
        text = self._text.setdefault(request, {})
        for outcome in enumerate(event["tokens"], event["start"]):
            position, token = outcome
            if text.get(position) != token:
                text |= dict(enumerate([token, *self._prepared.get((request, outcome), [])], position))
                self._prepared = {key: each for key, each in self._prepared.items() if key[0] != request}

    def of(self, message: dict[str, Any]) -> list[tuple[str, int]]:
        """(verdict, time) of each token of a DraftTokens message; time 0 for a discarded token."""
        request, line, start, tokens = message["request"], _line(message), message["start"], message["tokens"]
        drawn, prefix = self._drawn.get(request, {}), self._drafted(request, line[1], start, tokens)
        matches = all(drawn.get(at, (None,))[0] == prefix.get(at) for at in range(message["known"], start))
        found: list[tuple[str, int]] = []
        for position, token in enumerate(tokens, start):
            known = self._judged.get((request, line, position))
            if known is None and position in drawn and matches:
                own, at = drawn[position]
                matches = own == token
                known = (ACCEPTED if matches else REJECTED), at
            found.append(known or (DISCARDED, 0))
        return found

    def _drafted(self, request: int, branch: _Outcome | None, start: int, tokens: list[int]) -> dict[int, int]:
        """Add drafted tokens to the draft's text, or to their branch; return the text up to them, by position."""
        text = self._text.setdefault(request, {})
        if branch is None:
            text |= dict(enumerate(tokens, start))
            return text
        prepared = self._prepared.setdefault((request, branch), [])
        prefix = text | dict(enumerate([branch[1], *prepared], branch[0]))
        prepared += tokens
        return prefix


def _line(message: dict[str, Any]) -> _Line:
    """The line that a DraftTokens message belongs to."""
    return message["epoch"], None if message["after"] is None else tuple(message["after"])
