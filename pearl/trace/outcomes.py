"""Finds out for each drafted token whether it was accepted, rejected, or discarded (never judged).

This file compares drafted tokens with the text that the target committed. An "outcome" (position,
token) is a token that the target may commit at a position where the draft expects another token. A
"branch" is the continuation that the draft prepares for an outcome.
"""

from collections import ChainMap, defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

from pearl.trace.recorder import TraceRecord

ACCEPTED = "accepted"
REJECTED = "rejected"
DISCARDED = "discarded"


class _Committed(NamedTuple):
    """A committed token, and its source (`Provenance`)."""

    token: int
    source: str


class _Outcome(NamedTuple):
    """A token that the target may commit at a position where the draft expects another token."""

    position: int
    token: int


_NOTHING = _Committed(-1, "")
_Text = ChainMap[int, int]  # tokens by position


def messages(decision: dict[str, Any], command: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of type `kind` that a decision sends.

    A decision is an event that a worker's state machine has handled, and the resulting commands.

    Args:
        command: "Send" for messages to the other worker, "Deliver" for messages to a front.
    """
    for step in decision.get("commands", ()):
        if step["type"] == command and step["message"]["type"] == kind:
            yield step["message"]


class Outcomes:
    """Finds out what became of drafted tokens.

    First pass all records of the target to `learn`. Then go through the draft's records in order:
    pass events to `read`, and messages with drafted tokens to `of`.
    """

    def __init__(self) -> None:
        #: request -> position -> the token committed there
        self._committed: defaultdict[int, dict[int, _Committed]] = defaultdict(dict)
        #: request -> position -> token, as the draft has the text
        self._text: defaultdict[int, dict[int, int]] = defaultdict(dict)
        #: request -> outcome -> position -> token: the branch for the outcome, on top of the draft's text
        self._prepared: defaultdict[int, dict[_Outcome, _Text]] = defaultdict(dict)

    def learn(self, record: TraceRecord) -> None:
        for message in messages(record.args, "Deliver", "Committed"):
            text = self._committed[message["request"]]
            tokens = zip(message["tokens"], message["provenance"], strict=True)
            for position, (token, source) in enumerate(tokens, message["start"]):
                text[position] = _Committed(token, source)

    def read(self, event: dict[str, Any]) -> None:
        """Apply an event to the text as the draft knows it, just as `DraftMachine` has done."""
        if event["type"] == "Begin":
            self._text.pop(event["request"], None)
            self._prepared.pop(event["request"], None)
        if event["type"] != "Verdict":
            return
        request = event["request"]
        text = self._text[request]
        for position, token in enumerate(event["tokens"], event["start"]):
            if text.get(position) != token:
                text[position] = token
                prepared = self._prepared.pop(request, {}).get(_Outcome(position, token), _Text())
                text |= prepared.maps[0]

    def of(self, message: dict[str, Any]) -> list[str]:
        """Return what became of each token of a DraftTokens message, in order."""
        request = message["request"]
        start = message["start"]
        count = len(message["tokens"])
        text: MutableMapping[int, int] = self._text[request]
        is_right = True
        branch = _Outcome(-1, -1)
        if message["after"] is not None:
            branch = _Outcome(*message["after"])
            is_right = self._at(request, branch.position).token == branch.token
            text = self._prepared[request].setdefault(branch, _Text({}, text))
        text.update(enumerate(message["tokens"], start))
        outcomes = []
        for position in range(message["known"], start + count):
            if position in text and position != branch.position:
                outcome = DISCARDED
                if is_right:
                    outcome = self._outcome(request, position, text[position])
                is_right = outcome == ACCEPTED
                outcomes.append(outcome)
        return outcomes[len(outcomes) - count :]

    def _at(self, request: int, position: int) -> _Committed:
        return self._committed[request].get(position, _NOTHING)

    def _outcome(self, request: int, position: int, token: int) -> str:
        """Return what became of a drafted token, given that all tokens before it were committed."""
        committed = self._at(request, position)
        # Either nothing was committed there, or the target committed a token without looking at a draft token.
        if committed.source in ("", "bonus"):
            return DISCARDED
        if token == committed.token and committed.source != "corrected":
            return ACCEPTED
        return REJECTED
