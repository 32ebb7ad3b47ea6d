"""Every error that PEARL raises on purpose.

Two kinds of mistake, told apart as h11 does: `LocalProtocolError` is a bug of ours, `RemoteProtocolError` is the
peer's. All else descends from `PearlError`, so that a caller can catch the lot.  A message says what happened, where,
and what to do next.
"""

from __future__ import annotations


class PearlError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class ConfigError(PearlError):
    """A setting, option or file is wrong; nothing was started."""

    exit_code = 2


class TraceError(PearlError):
    """A trace cannot be written or read, or is none."""

    exit_code = 2


class RequestError(PearlError):
    """This request cannot be served (too long for the context, say); the engine is unharmed."""

    exit_code = 2


class ModelError(PearlError):
    """A model could not be loaded, cannot be used here, or the two models do not belong together."""

    exit_code = 3


class DistillError(PearlError):
    """A distillation cannot go on; what it has saved is whole, and `--resume` continues from there."""

    exit_code = 6


class StartError(PearlError):
    """A worker did not come up; the message carries the real cause."""

    exit_code = 3


class TargetLost(PearlError):
    """The target worker died or fell silent; the request is lost."""

    exit_code = 4


class DraftLost(PearlError):
    """The draft worker died or fell silent. Requests go on with the target alone; raised only inside workers."""

    exit_code = 4


class EngineClosed(PearlError):
    """The engine has been closed."""

    exit_code = 1


class TransportError(PearlError):
    """A channel broke or timed out."""

    exit_code = 4


class ProtocolError(PearlError):
    """Base of the two below. Raising one leaves the state machine as it was."""

    exit_code = 5


class LocalProtocolError(ProtocolError):
    """We fed our own state machine something that its state does not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""
