"""The texts of a trace as recorded texts: what was committed, what the draft drafted there, and its runners-up.

A trace tells of each drafted token the four likeliest others and, in eighths, its share among the likeliest
(`events.Seen`): all that branches go by.  What a lookup finds is a matter of the tokens themselves.  So a trace can be
decoded again with look-ahead, lookup and branches, alone and together, whichever of them it was recorded with.

Only what was drafted behind the committed text counts: off it the draft would have said something else.  A position at
which nothing was drafted (the target ran ahead, say) borrows what the draft made of another position, by seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pearl.drafting.branches import RIVALS
from pearl.models.recorded import Header, RecordedText, RecordedTexts
from pearl.protocol.sequence import common_prefix
from pearl.trace.reading import Slice, Trace

_MOST_IDS = 1 << 20  # a row spans the vocabulary
_ROW = 64  # tokens of a row that is made up: what branches and shares are of is the head of it


@dataclass(frozen=True)
class Told:
    """What a trace says of a drafted token; see `events.Seen`."""

    token: int
    share: int
    rivals: tuple[int, ...]

    def rank(self, token: int) -> int | None:
        """Of `token`: 0 where it was drafted, from 1 on among the rivals; None where it is none of these."""
        head = (self.token, *self.rivals)
        return head.index(token) if token in head else None


@dataclass
class Retold:
    """One request. `told`: what was drafted behind the committed text, by absolute position."""

    prompt: tuple[int, ...]
    answer: list[int] = field(default_factory=list)
    told: dict[int, Told] = field(default_factory=dict)

    @property
    def whole(self) -> list[int]:
        return [*self.prompt, *self.answer]

    @property
    def right(self) -> dict[int, bool]:
        """Position -> whether the token drafted there is the committed one."""
        whole = self.whole
        return {at: told.token == whole[at] for at, told in self.told.items()}


def retold(trace: Trace) -> dict[int, Retold]:
    """Its requests, by number."""
    found = _requests(trace)
    for draft in trace.drafts:
        _tell(draft, found)
    return found


def texts_of(path: Path, requests: Sequence[Retold], seed: int = 0) -> RecordedTexts | None:
    """None where nothing was told of the draft's rows, or one prompt was answered in two ways.

    Raises ValueError for what can be no token.
    """
    known = [(told.share, told.rank(one.whole[at])) for one in requests for at, told in one.told.items()]
    answers = {one.prompt: one.answer for one in requests}
    if not known or any(answers[one.prompt] != one.answer for one in requests):
        return None
    least, most = min(_ids(requests)), max(_ids(requests))
    if least < 0 or most >= _MOST_IDS:
        raise ValueError(f"token id {least if least < 0 else most}")
    vocab = 1 + most + _ROW  # the last ones are no token of these texts: rows are filled with them
    header = Header(
        target=str(path),
        draft=str(path),
        vocab_size=vocab,
        eos=(),
        temperature=0,
        seed=seed,
        max_tokens=max(len(one.answer) for one in requests),
    )
    luck = random.Random(seed)
    return RecordedTexts(header, tuple(_text(one, known, vocab, luck) for one in requests))


def _ids(requests: Sequence[Retold]) -> Iterator[int]:
    for one in requests:
        yield from one.whole
        for told in one.told.values():
            yield from (told.token, *told.rivals)


def _requests(trace: Trace) -> dict[int, Retold]:
    """Prompts and what was committed behind them."""
    found: dict[int, Retold] = {}
    for decision in _decisions(trace.target):
        if decision["event"]["type"] == "Submit":
            found[decision["event"]["request"]] = Retold(tuple(decision["event"]["prompt"]))
        for command in decision.get("commands", ()):
            if command["type"] == "Deliver" and command["message"]["type"] == "Committed":
                message = command["message"]
                if message["request"] in found:
                    found[message["request"]].answer += message["tokens"]
    return found


def _decisions(slices: Sequence[Slice]) -> Iterator[dict[str, Any]]:
    return (one.args for one in slices if one.name == "decide")


def _tell(draft: Sequence[Slice], requests: dict[int, Retold]) -> None:
    """Notes what one draft, from its start to its end, drafted behind the committed text of each request."""
    contexts: dict[int, list[int]] = {}
    for decision in _decisions(draft):
        event = decision["event"]
        if event["type"] == "Drafted" and (one := requests.get(event["request"])) is not None:
            context = contexts.setdefault(event["request"], [])
            context += event["tokens"]
            _note(one, context, event["seen"])
        for command in decision.get("commands", ()):
            if command["type"] == "Draft":
                context = contexts.setdefault(command["request"], [])
                context[command["start"] :] = command["tokens"]


def _note(one: Retold, context: Sequence[int], seen: Sequence[tuple[int, dict[str, Any]]]) -> None:
    whole = one.whole
    right = common_prefix(context, whole)
    for at, said in seen:
        if len(one.prompt) <= at <= right and at < len(whole):
            one.told.setdefault(at, Told(said["token"], said["share"], tuple(said["rivals"])))


def _text(one: Retold, known: Sequence[tuple[int, int | None]], vocab: int, luck: random.Random) -> RecordedText:
    ids = np.empty((len(one.answer), _ROW + 1), np.int32)
    logits = np.empty(ids.shape, np.float32)
    for row, token in enumerate(one.answer):
        told = one.told.get(len(one.prompt) + row)
        if told is None:
            told = _borrowed(token, *luck.choice(known), vocab)
        ids[row], logits[row] = _row(told, vocab)
    return RecordedText(one.prompt, tuple(one.answer), ids, logits)


def _borrowed(token: int, share: int, rank: int | None, vocab: int) -> Told:
    """As another position was drafted, with `token` at the rank that the committed one has there."""
    head = list(range(vocab - 1, vocab - 2 - RIVALS, -1))
    if rank is not None:
        head[rank] = token
    return Told(head[0], share, tuple(head[1:]))


def _row(told: Told, vocab: int) -> tuple[list[int], np.ndarray]:
    """Ids and logits [_ROW + 1], as `RecordedText` has them, of a row that branches take for the one of the trace."""
    head = [told.token, *told.rivals]
    ids = head + list(range(vocab - _ROW, vocab))[: _ROW - len(head)]  # a borrowed head is of the last of these
    own = (told.share + 0.5) / 8
    # Of the others the rivals come first, in their order; none of them is as likely as the token itself.
    others = (1 - own) / (_ROW - 1) * (1 + 1e-3 * np.arange(_ROW - 1, 0, -1))
    shares = np.array([max(own, 1.01 * others[0]), *others])
    values = np.log(shares / shares.sum())
    return [*ids, told.token], np.array([*values, values[0]], np.float32)
