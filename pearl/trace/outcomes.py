"""The outcome of each drafted token: accepted, rejected or discarded."""

from __future__ import annotations

from typing import Any

from pearl.trace.recorder import Record

ACCEPTED, REJECTED, DISCARDED = "accepted", "rejected", "discarded"

_Outcome = tuple[int, int]  # position, token
_Line = tuple[int, _Outcome | None]  # of a drafted token: its epoch, and the outcome that its branch prepares for


class Outcomes:
    """First call `learn` for each of the target's records; then `read` and `of` in the order of the draft's."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], _Line] = {}  # request, position -> the line of the token to judge there
        self._branches: dict[tuple[int, _Line], list[int]] = {}  # request, line -> positions of a branch
        self._opened: dict[int, _Outcome] = {}  # request -> the outcome that opened its epoch
        self._epochs: dict[Any, int] = {}  # request -> the target's, at the last decision
        self._judged: dict[tuple[int, _Line, int], tuple[str, int]] = {}  # request, line, position -> outcome, time
        # The draws of a target that runs ahead of its draft: request -> position -> token, time.
        self._drawn: dict[int, dict[int, tuple[int, int]]] = {}
        self._text: dict[int, dict[int, int]] = {}  # request -> position -> the token in the draft's text
        self._prepared: dict[tuple[int, _Outcome], list[int]] = {}  # request, outcome -> tokens drafted for it

    def learn(self, record: Record) -> None:
        args = record.args
        match record.name:
            case "decide":
                self._epochs[args["event"].get("request")] = args["epoch"]
                self._learn_event(args["event"])
            case "sample" if args["request"] in self._drawn:
                for position, token in enumerate(args["tokens"], args["start"]):
                    self._drawn[args["request"]][position] = token, record.middle
            case "sample" if args["tokens"]:  # after a full window, say; a branch may have prepared for it
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
        """The branch prepared for this outcome, later tokens included, becomes the main line."""
        self._opened[request] = outcome = position, token
        line = self._epochs.get(request, 0), outcome
        self._lines.update({(request, at): line for at in self._branches.get((request, line), ())})

    def read(self, event: dict[str, Any]) -> None:
        """Update the draft's text as `DraftMachine` does."""
        if event["type"] == "Begin":
            self._text.pop(event["request"], None)
            self._prepared.clear()
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
        """The outcome of each token of a DraftTokens, and when; 0: never, or before it was drafted."""
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
        """Note drafted tokens; the text before them, by position."""
        text = self._text.setdefault(request, {})
        if branch is None:
            text |= dict(enumerate(tokens, start))
            return text
        prepared = self._prepared.setdefault((request, branch), [])
        prefix = text | dict(enumerate([branch[1], *prepared], branch[0]))
        prepared += tokens
        return prefix


def _line(message: dict[str, Any]) -> _Line:
    """Of a DraftTokens."""
    return message["epoch"], None if message["after"] is None else tuple(message["after"])
