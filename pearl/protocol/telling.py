"""What the draft and the front are told of a request: the text so far, and how far the draft may draft.

Changes what one `RequestState` knows of whom it has told what; when something is told is the state machine's business.
"""

from __future__ import annotations

from pearl.protocol.events import Deliver, Send
from pearl.protocol.machine import Do
from pearl.protocol.messages import Begin, Committed, Preview, Verdict
from pearl.protocol.request import RequestState
from pearl.protocol.window import Speeds

_GRANTS_A_CHOICE = 8  # speeds change slowly, and to choose c takes as long as all else that follows a judgement


def begin_draft(request: RequestState, speeds: Speeds, do: Do) -> None:
    """Gives the draft the whole prefix, if there is a draft to give it to."""
    if not request.is_drafting:
        return
    seq = request.sequence
    request.told_draft, request.is_paused = seq.committed, False
    prefix, until = tuple(seq.tokens[: seq.committed]), grant(request, speeds)
    begin = Begin(request.number, request.epoch, prefix, until, seq.digest, request.options)
    do(Send(begin))


def announce(request: RequestState, speeds: Speeds, do: Do) -> None:
    """Tells the draft, then the front, what has been committed since they were last told."""
    seq, told = request.sequence, request.told_draft
    if told and request.is_drafting and told < seq.committed:
        new, until = tuple(seq.tokens[told : seq.committed]), grant(request, speeds)
        do(Send(Verdict(request.number, request.epoch, told, new, until, seq.digest)))
        request.told_draft = seq.committed
        request.is_paused = request.is_paused and seq.first_pending is not None
    deliver_committed(request, do)
    if seq.committed < len(seq.tokens):
        preview(request, do)


def deliver_committed(request: RequestState, do: Do) -> None:
    seq, told = request.sequence, request.told_front
    if told < seq.committed:
        do(Deliver(Committed(request.number, told, tuple(seq.tokens[told : seq.committed]), tuple(request.untold))))
        request.told_front = seq.committed
        request.untold.clear()


def preview(request: RequestState, do: Do) -> None:
    """Shows the front what is pending, if it asked for that."""
    if request.submit.preview:
        do(Deliver(Preview(request.number, request.sequence.committed, tuple(request.sequence.pending))))


def grant(request: RequestState, speeds: Speeds) -> int:
    """Return how far the draft may draft, never less than before in the same epoch; re-choose c every 8 grants.

    c changes only here, together with what the draft is told: were it to grow in between, the target would wait for
    tokens that the draft was never allowed to draft.
    """
    if request.grants % _GRANTS_A_CHOICE == 0 and not (request.grants and request.keeps_window):
        request.window = request.options.gamma or speeds.best_window(request.beside)
    request.grants += 1
    request.draft_until = max(request.draft_until, request.may_draft_until)
    request.furthest = max(request.furthest, request.draft_until - request.sequence.committed)
    return request.draft_until
