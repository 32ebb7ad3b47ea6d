"""Whether each drafted token of a trace was accepted, rejected, or discarded (never judged), by how the text went on.

An "outcome" (position, token) is what the target may commit where the draft expects another token; a "branch" is what
the draft prepares for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pearl.trace.recorder import Record

ACCEPTED, REJECTED, DISCARDED = "accepted", "rejected", "discarded"

_Outcome = tuple[int, int]  # position, token


def messages(decision: dict[str, Any], command: str, kind: str) -> Iterator[dict[str, Any]]:
    """Messages of a kind that a decision sends to the other worker ("Send") or to a front ("Deliver")."""
    found = (each["message"] for each in decision.get("commands", ()) if each["type"] == command)
    return (message for message in found if message["type"] == kind)


class Outcomes:
    """First pass all records of the target to `learn`; then the draft's in order, events to `read`, tokens to `of`."""

    def __init__(self) -> None:
        #: request -> position -> the token committed there, and its source
        self._committed: dict[int, dict[int, tuple[int, str]]] = {}
        self._text: dict[
            int, dict[int, int]
        ] = {}  # request -> position -> token, as the draft has the text
        self._prepared: dict[
            tuple[int, _Outcome], list[int]
        ] = {}  # (request, outcome) -> tokens drafted for it

    def learn(self, record: Record) -> None:
        for message in messages(record.args, "Deliver", "Committed"):
            text = self._committed.setdefault(message["request"], {})
            tokens = zip(message["tokens"], message["provenance"], strict=True)
            for position, (token, source) in enumerate(tokens, message["start"]):
                text[position] = token, source

    def read(self, event: dict[str, Any]) -> None:
        """Apply an event of the draft to its text, as `DraftMachine` does."""
        if event["type"] == "Begin":
            self._text.pop(event["request"], None)
            self._prepared = {
                key: each for key, each in self._prepared.items() if key[0] != event["request"]
            }
        if event["type"] != "Verdict":
            return
        request = event["request"]
        text = self._text.setdefault(request, {})
        for outcome in enumerate(event["tokens"], event["start"]):
            position, token = outcome
            if text.get(position) != token:
                text |= dict(
                    enumerate([token, *self._prepared.get((request, outcome), [])], position)
                )
                self._prepared = {
                    key: each for key, each in self._prepared.items() if key[0] != request
                }

    def of(self, message: dict[str, Any]) -> list[str]:
        """What became of each token of a DraftTokens message."""
        request, start, tokens = message["request"], message["start"], message["tokens"]
        branch = None if message["after"] is None else tuple(message["after"])
        prefix = self._drafted(request, branch, start, tokens)
        final = self._committed.get(request, {})
        is_right = branch is None or final.get(branch[0], (None,))[0] == branch[1]
        for position in range(message["known"], start):
            if position in prefix and (branch is None or position != branch[0]):
                is_right = is_right and self._fate(request, position, prefix[position]) == ACCEPTED
        found: list[str] = []
        for position, token in enumerate(tokens, start):
            fate = self._fate(request, position, token) if is_right else DISCARDED
            is_right = fate == ACCEPTED
            found.append(fate)
        return found

    def _fate(self, request: int, position: int, token: int) -> str:
        """What became of a token that follows the text as committed."""
        committed, source = self._committed.get(request, {}).get(position, (-1, ""))
        if source in (
            "",
            "bonus",
        ):  # nothing was committed there, or without looking at a draft token
            return DISCARDED
        return ACCEPTED if token == committed and source != "corrected" else REJECTED

    def _drafted(
        self, request: int, branch: _Outcome | None, start: int, tokens: list[int]
    ) -> dict[int, int]:
        """Add drafted tokens to the draft's text, or to their branch; return the text up to them, by position."""
        text = self._text.setdefault(request, {})
        if branch is None:
            text |= dict(enumerate(tokens, start))
            return text
        prepared = self._prepared.setdefault((request, branch), [])
        prefix = text | dict(enumerate([branch[1], *prepared], branch[0]))
        prepared += tokens
        return prefix
