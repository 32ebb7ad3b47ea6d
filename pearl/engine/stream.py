"""One text as its user sees it: pieces while it is generated, and a result at the end.

This file knows no sockets and no processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from pearl import errors
from pearl.drafting.prediction import PredictionCount
from pearl.errors import RequestError
from pearl.metrics import Statistics
from pearl.protocol.messages import (
    Committed,
    Error,
    Finished,
    Preview,
    Provenance,
    Submit,
    TokenDetails,
)
from pearl.text.stream import TextStream, Tokenizer

_SHOWN = 60  # characters of a text in a repr


@dataclass(frozen=True)
class Piece:
    """The tokens and text that one step of the target added.

    Attributes:
        text: text that will not change any more. It may be empty, because text is held back as long
            as later tokens could change it.
        tokens: the committed tokens.
        provenance: where each token came from.
        texts: for each token, the text that became final with it. `text` is these texts joined.
        preview: draft tokens that are not judged yet and may follow; empty unless requested.
        details: log probabilities and other details of each token; empty unless the options ask for
            them.
    """

    text: str
    tokens: tuple[int, ...] = ()
    provenance: tuple[Provenance, ...] = ()
    texts: tuple[str, ...] = ()
    preview: tuple[int, ...] = ()
    details: tuple[TokenDetails, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(repr=False)
class Result:
    """A text and its statistics.

    Attributes:
        finish_reason: "eos", "stop", "length" or "cancelled"; empty while the text is generated.
        provenance, details: see `Piece`.
        seed: the seed of the random draws.
        accepted_prediction_tokens: how many tokens of the request's prediction the text has.
        rejected_prediction_tokens: how many tokens of the prediction the text does not have.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    finish_reason: str = ""
    seed: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    details: list[TokenDetails] = field(default_factory=list)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def logprobs(self) -> list[TokenDetails]:
        """The same as `details`, under the name of the option that asks for log probabilities."""
        return self.details

    def __repr__(self) -> str:
        text = self.text
        if len(text) > _SHOWN:
            text = f"{text[:_SHOWN]}..."
        ending = self.finish_reason or "not finished"
        return f"<Result: {text!r}, {len(self.tokens)} tokens, {ending}, seed {self.seed}>"


class StreamClient(Protocol):
    """The methods of `Client` that a stream uses."""

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done()` is true, which is checked after each message that arrives."""

    def forget(self, request: int) -> None:
        """Drop the stream of a request that has ended."""

    def cancel(self, request: int) -> None:
        """Cancel a request whose result is no longer wanted."""


class Stream:
    """The pieces of one text, to be iterated over as they arrive. `close()` cancels the rest.

    Attributes:
        request: the number of the request.
        inbox: messages about this request that were not read yet.
        is_open: whether more pieces may come.
        result: the text so far; it grows with each piece that is read.
    """

    def __init__(
        self,
        client: StreamClient,
        tokenizer: Tokenizer,
        submit: Submit,
        show: Collection[str] = (),
    ) -> None:
        self.request = submit.request
        self.inbox: deque[object] = deque()
        self.is_open = True
        self.result = Result(seed=submit.options.seed, prompt_tokens=list(submit.prompt))
        self._end = len(submit.prompt)  # position after the last token that has arrived
        self._client = client
        self._prediction: PredictionCount | None = None
        if submit.options.predicted:
            self._prediction = PredictionCount(submit.options.predicted, submit.prompt)
            self._count_prediction(())
        options = submit.options
        self._text = TextStream(tokenizer, submit.prompt, options.stop, show, options.reasoning)

    def take(self, message: object) -> bool:
        """Put a message into the inbox.

        If its tokens do not follow those of earlier messages, ignore the message and return False.
        """
        if isinstance(message, Committed):
            if message.start != self._end:
                return False
            self._end += len(message.tokens)
        self.inbox.append(message)
        return True

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __aiter__(self) -> NoReturn:
        raise RequestError(
            "this stream is read with `for`: reading it blocks. AsyncEngine has streams for "
            "`async for`"
        )

    def __next__(self) -> Piece:
        try:
            if self.is_open:
                self._client.wait_until(lambda: bool(self.inbox) or not self.is_open)
            if not self.is_open:
                raise StopIteration
            match self.inbox.popleft():
                case Committed() as message:
                    return self._piece(message)
                case Preview(_, _, tokens):
                    return Piece("", preview=tokens)
                case Finished(_, reason, statistics):
                    return self._last(reason.value, Statistics.from_json(statistics))
                case Error(_, kind, text):
                    raise getattr(errors, kind, RequestError)(text)
                case unexpected:
                    raise AssertionError(unexpected)
        except BaseException:
            self.close()
            raise

    def read(self) -> Result:
        """Wait for the whole text and return it."""
        for _ in self:
            pass
        return self.result

    def _piece(self, new: Committed) -> Piece:
        texts = tuple(self._text.push(token) for token in new.tokens)
        text = "".join(texts)
        self.result.text += text
        self.result.tokens += new.tokens
        self.result.provenance += new.provenance
        self.result.details += new.details
        self._count_prediction(new.tokens)
        return Piece(text, new.tokens, new.provenance, texts, details=new.details)

    def _count_prediction(self, new: Sequence[int]) -> None:
        if self._prediction is not None:
            self._prediction.extend(new)
            self.result.accepted_prediction_tokens = self._prediction.accepted
            self.result.rejected_prediction_tokens = self._prediction.rejected

    def _last(self, reason: str, statistics: Statistics) -> Piece:
        text = self._text.finish()
        self.result.text += text
        self.result.finish_reason = reason
        self.result.statistics = statistics
        self.is_open = False
        self._client.forget(self.request)
        return Piece(text)

    def close(self) -> None:
        """Cancel the rest of the text.

        Any thread may call this. A thread that waits for a piece then stops waiting.
        """
        if self.is_open:
            self.is_open = False
            self.result.finish_reason = self.result.finish_reason or "cancelled"
            self._client.cancel(self.request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
