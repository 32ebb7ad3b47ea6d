"""One text as its user sees it: pieces while it is made, a result in the end. Knows no socket and no process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from pearl import errors
from pearl.errors import RequestError
from pearl.metrics import Statistics
from pearl.protocol.messages import (
    Committed,
    Error,
    Finished,
    Logprobs,
    Preview,
    Provenance,
    Submit,
)
from pearl.text.stream import TextStream, Tokenizer

_SHOWN = 60  # characters of a text in a repr


@dataclass(frozen=True)
class Piece:
    """What one step of the target added.

    Attributes:
        text: final text; may be empty, for what later tokens could change is held back.
        tokens, provenance: the tokens committed, and where each came from.
        texts: the text that became final with each token; joined they are `text`.
        preview: the draft's pending tokens, a guess at what follows; only where asked for.
        logprobs: of each token; only where asked for.
    """

    text: str
    tokens: tuple[int, ...] = ()
    provenance: tuple[Provenance, ...] = ()
    texts: tuple[str, ...] = ()
    preview: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(repr=False)
class Result:
    """A finished text. `finish_reason`: eos, stop, length or cancelled; `logprobs`: of each token, where asked for."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    finish_reason: str = ""
    seed: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    logprobs: list[Logprobs] = field(default_factory=list)

    def __repr__(self) -> str:
        text = repr(self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}...")
        ending = self.finish_reason or "not finished"
        return f"<Result: {text}, {len(self.tokens)} tokens, {ending}, seed {self.seed}>"


class Source(Protocol):
    """What a stream asks of its engine."""

    tokenizer: Tokenizer

    def await_message(self, stream: Stream) -> object | None:
        """The next message of `stream`; None once it is closed."""
        ...

    def forget(self, request: int) -> None:
        """The request has ended."""
        ...

    def cancel(self, request: int) -> None:
        """Nobody wants the request any longer."""
        ...


class Stream:
    """The pieces of one text as they come; iterate, or `close()` to leave early. `result` grows along."""

    def __init__(self, source: Source, submit: Submit) -> None:
        self.request = submit.request
        self.inbox: deque[object] = deque()
        self.open = True
        self.heard = False  # whether anything has come
        self.result = Result(seed=submit.options.sampling.seed, prompt_tokens=list(submit.prompt))
        self._end = len(submit.prompt)  # position after the last token that has come
        self._source = source
        self._text = TextStream(source.tokenizer, submit.prompt, submit.options.stops)

    def take(self, message: object) -> bool:
        """Puts a message into the inbox; False for committed tokens that do not follow those before."""
        if isinstance(message, Committed):
            if message.start != self._end:
                return False
            self._end += len(message.tokens)
        self.heard = True
        self.inbox.append(message)
        return True

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __aiter__(self) -> NoReturn:
        raise RequestError("this stream is read with `for`: reading it blocks. AsyncEngine has streams for `async for`")

    def __next__(self) -> Piece:
        if not self.open:
            raise StopIteration
        try:
            match message := self._source.await_message(self):
                case None:
                    raise StopIteration
                case Committed():
                    return self._piece(message)
                case Preview(_, _, tokens):
                    return Piece("", preview=tokens)
                case Finished(_, reason, statistics):
                    return self._last(reason.value, Statistics.from_json(statistics))
                case Error(_, kind, told):
                    raise getattr(errors, kind, RequestError)(told)
                case unexpected:
                    raise AssertionError(unexpected)
        except BaseException:
            self.close()
            raise

    def _piece(self, new: Committed) -> Piece:
        texts = tuple(self._text.push(token) for token in new.tokens)
        text = "".join(texts)
        self.result.text += text
        self.result.tokens += new.tokens
        self.result.provenance += new.provenance
        self.result.logprobs += new.logprobs
        return Piece(text, new.tokens, new.provenance, texts, logprobs=new.logprobs)

    def _last(self, reason: str, statistics: Statistics) -> Piece:
        rest = self._text.finish()
        self.result.text += rest
        self.result.finish_reason, self.result.statistics = reason, statistics
        self.open = False
        self._source.forget(self.request)
        return Piece(rest)

    def close(self) -> None:
        """Leaves the text as it is; the target is told to stop.

        Any thread may: one that waits for a piece finds the stream at its end.
        """
        if self.open:
            self.open = False
            self.result.finish_reason = self.result.finish_reason or "cancelled"
            self._source.cancel(self.request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
