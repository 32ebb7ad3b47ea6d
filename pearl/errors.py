"""Every error that PEARL raises on purpose; all are subclasses of `PearlError`.

A message says what happened, where, and what to do next. As in h11 there are two protocol errors:
`LocalProtocolError` is a bug of ours, and `RemoteProtocolError` is one of the peer.
"""


class PearlError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        exit_code: exit status of the command line after this error.
        advice: what to do next, if the message does not say it; the command line prints it below the message.
    """

    exit_code = 1
    advice = (
        "Run it again with --log-level debug; if that does not explain it, report it with what "
        "that prints."
    )


class ConfigError(PearlError):
    """A setting, option or file is wrong; nothing was started."""

    exit_code = 2
    advice = ""


class TraceError(PearlError):
    """A trace cannot be written or read, or the file is not a trace."""

    exit_code = 2
    advice = "See `pearl trace --help` for how to record, merge and check one."


class RequestError(PearlError):
    """This request cannot be served, for example because it is too long; the engine continues."""

    exit_code = 2
    advice = ""


class ModelError(PearlError):
    """A model could not be loaded or cannot be used here, or draft and target do not belong together."""

    exit_code = 3
    advice = ""


class DistillError(PearlError):
    """A distillation cannot continue; its last checkpoint is complete, and `--resume` continues from it."""

    exit_code = 6


class StartError(PearlError):
    """A worker did not start; the message has the cause."""

    exit_code = 3


class TargetLost(PearlError):
    """The target worker died or stopped responding; its requests are lost."""

    exit_code = 4
    advice = "Run it again; if it is lost again, --log-level debug shows its last steps."


class DraftLost(PearlError):
    """The draft worker died or stopped responding; requests continue with the target alone.

    This is raised only inside workers, and by checks that need a draft.
    """

    exit_code = 4


class ForwardError(PearlError):
    """The target's forward gave no usable result; this request is lost, the engine continues."""

    exit_code = 4
    advice = ""


class NumericalError(ForwardError):
    """A model's logits are NaN, infinite, or all minus infinity."""


class GrammarError(NumericalError):
    """The grammar of a text allows no token, for example because it cannot be parsed."""


class OutOfMemory(ForwardError):
    """A forward ran out of memory on its device."""


class EngineClosed(PearlError):
    """The engine has been closed."""

    exit_code = 1
    advice = ""


class TransportError(PearlError):
    """A channel broke or timed out."""

    exit_code = 4


class ProtocolError(PearlError):
    """Base of `LocalProtocolError` and `RemoteProtocolError`. Raising one leaves the state machine unchanged."""

    exit_code = 5
    advice = (
        "This is a bug: report it, with what --log-level debug prints and, if it can be "
        "repeated, a --trace FILE."
    )


class LocalProtocolError(ProtocolError):
    """Our own code sent an event that our state machine does not allow in its current state."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


def error_named(kind: str) -> type[PearlError]:
    """Return the error class named `kind`, or `StartError` if there is none.

    The name comes from a peer, which is not trusted and may send any name.
    """
    error_class = globals().get(kind)
    if isinstance(error_class, type) and issubclass(error_class, PearlError):
        return error_class
    return StartError


def installing(extra: str) -> str:
    """Return how to install an extra of the package, as the end of a sentence in a message."""
    return (
        f"`scripts/setup {extra}` in a checkout, or pip with the extra `{extra}` of PEARL's wheel"
    )
