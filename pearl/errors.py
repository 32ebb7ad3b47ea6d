"""Every error that PEARL raises on purpose.

Two kinds of mistake, told apart as h11 does: `LocalProtocolError` is a bug of ours, `RemoteProtocolError` is the
peer's. All else descends from `PearlError`, so that a caller can catch the lot.  A message says what happened, where,
and what to do next.
"""

from __future__ import annotations


class PearlError(Exception):
    """Base of all errors raised on purpose.

    `exit_code` is what the command line returns for it; `advice` what it prints below it: what to do next, where the
    message itself cannot know.
    """

    exit_code = 1
    advice = "Run it again with --log-level debug; if that does not explain it, report it with what that prints."


class ConfigError(PearlError):
    """A setting, option or file is wrong; nothing was started."""

    exit_code = 2
    advice = ""


class TraceError(PearlError):
    """A trace cannot be written or read, or is none."""

    exit_code = 2
    advice = "`pearl trace --help` says how one is made, merged and checked."


class RequestError(PearlError):
    """This request cannot be served (too long for the context, say); the engine is unharmed."""

    exit_code = 2
    advice = ""


class ModelError(PearlError):
    """A model could not be loaded, cannot be used here, or the two models do not belong together."""

    exit_code = 3
    advice = ""


class DistillError(PearlError):
    """A distillation cannot go on; what it has saved is whole, and `--resume` continues from there."""

    exit_code = 6


class StartError(PearlError):
    """A worker did not come up; the message carries the real cause."""

    exit_code = 3


class TargetLost(PearlError):
    """The target worker died or fell silent; the request is lost."""

    exit_code = 4
    advice = "Run it again; if it is lost again, --log-level debug tells what it did last."


class DraftLost(PearlError):
    """The draft worker died or fell silent. Requests go on with the target alone.

    Raised inside workers, and by checks that need a draft.
    """

    exit_code = 4


class ForwardError(PearlError):
    """The target's forward gave nothing that can be used; this request is lost, the engine is unharmed."""

    exit_code = 4
    advice = ""


class NumericalError(ForwardError):
    """A model's logits are not finite: NaN, infinite, or nothing but minus infinity."""


class GrammarError(NumericalError):
    """The grammar that a text is held to names no token that may follow: it cannot be read, or asks for too much."""


class OutOfMemory(ForwardError):
    """A forward found no memory on its device."""


class EngineClosed(PearlError):
    """The engine has been closed."""

    exit_code = 1
    advice = ""


class TransportError(PearlError):
    """A channel broke or timed out."""

    exit_code = 4


class ProtocolError(PearlError):
    """Base of the two below. Raising one leaves the state machine as it was."""

    exit_code = 5
    advice = "This is a bug: report it, with what --log-level debug prints and, if it can be repeated, a --trace FILE."


class LocalProtocolError(ProtocolError):
    """We fed our own state machine something that its state does not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


def error_named(kind: str) -> type[PearlError]:
    """The class of that name; `StartError` where there is none: a name may come from a stranger."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, PearlError) else StartError
