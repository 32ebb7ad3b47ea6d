"""Reads the bodies of requests, and writes replies as OpenAI's objects, whole or in chunks.

The module `app` sends the replies.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec.json import encode
from starlette.requests import ClientDisconnect, Request

from pearl.document import parse_json
from pearl.engine import Piece, Result
from pearl.protocol.messages import TokenDetails
from pearl.server.errors import ApiError
from pearl.server.schemas import SharedRequest, StreamOptions
from pearl.text.reply import Delta, ReplyParser

MOST_BODY = 2 << 20  # bytes of one request
BODY_SECONDS = 30.0  # for a body to arrive
DONE = b"data: [DONE]\n\n"


async def read_body(request: Request) -> Any:
    """Return the body, parsed from JSON.

    Raises `ApiError` if the body is no JSON, too long, or does not arrive within `BODY_SECONDS`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0]
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "send the body with the header Content-Type: application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BODY:
                    raise ApiError(
                        413, f"the body may have at most {MOST_BODY:,} bytes", code="body_too_large"
                    )
        return parse_json(body.decode("utf-8"))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(
            400, "the client closed the connection before its request was complete"
        ) from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def event(data: Any) -> bytes:
    """Encode `data` as a server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class ReplyText:
    """One text of a reply, as OpenAI's message: reasoning, content and tool calls.

    Attributes:
        index: the text's place among the texts of the request, from 0.
        reply: the text so far, split by the parser.
        result: the engine's result; it is set once the text has ended.
        wait_seconds: how long the text waited until it was sent to the engine's workers.
        reasoning_tokens: number of tokens of the reasoning. The tokens of the closing tag may count
            as tokens of the answer.

    Args:
        parser: splits the text into reasoning, content and calls; None if all of the text is
            content.
    """

    result: Result
    wait_seconds: float

    def __init__(self, index: int, parser: ReplyParser | None = None) -> None:
        self.index = index
        self.reasoning_tokens = 0
        self._parser = parser
        self.reply = Delta()
        self._is_thinking = False
        self._held_tokens = 0  # whose text may still become reasoning or answer

    def feed(self, piece: Piece) -> Delta:
        """Take the next piece of the text, and return what it adds to the reply.

        Text that may be the beginning of a tag or call is held back until a later piece.
        """
        if self._parser is None:
            return self._taken(Delta.of_content(piece.text))
        if not piece.tokens:
            return self._taken(self._parser.feed([piece.text]))
        joined = Delta()
        for text, token in zip(piece.texts, piece.tokens, strict=True):
            self._held_tokens += 1
            new = self._parser.feed([text], [token])
            self._count(new)
            joined += new
        return self._taken(joined)

    def finish(self) -> Delta:
        """End the text, and return the text that was held back."""
        if self._parser is None:
            return Delta()
        new = self._parser.finish()
        self._count(new)
        if self._is_thinking:
            self.reasoning_tokens += self._held_tokens
        return self._taken(new)

    def _count(self, new: Delta) -> None:
        """Count the tokens whose text was held back, as soon as `new` shows where they belong.

        If `new` has reasoning, the tokens count as reasoning, otherwise as answer.
        """
        is_answer = bool(new.content or new.calls)
        if new.reasoning:
            self.reasoning_tokens += self._held_tokens
        if new.reasoning or is_answer:
            self._held_tokens = 0
            self._is_thinking = not is_answer

    def _taken(self, new: Delta) -> Delta:
        self.reply += new
        return new

    @property
    def message(self) -> dict[str, Any]:
        """The message, as far as the text has been generated."""
        message = {"role": "assistant", "content": "", **fields_of(self.reply)}
        if self.reply.calls:
            message["tool_calls"] = [without(call, "index") for call in self.reply.calls]
        return message

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason."""
        reason = finish_reason(self.result)
        if reason == "stop" and self.reply.calls:
            return "tool_calls"
        return reason


def fields_of(delta: Delta) -> dict[str, Any]:
    """Return the fields of a chat's delta or message, without those that are empty."""
    fields = {
        "reasoning_content": delta.reasoning,
        "content": delta.content,
        "tool_calls": delta.calls,
    }
    return {name: value for name, value in fields.items() if value}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the fields whose names are not among `names`."""
    return {name: value for name, value in fields.items() if name not in names}


class ReplyWriter(Protocol):
    """Writes a reply in the format of one endpoint, whole or as server-sent events."""

    def whole(self, texts: Sequence[ReplyText], usage: dict[str, Any]) -> bytes:
        """Return the whole reply; all its texts must have ended.

        This may take long, so it is called outside the event loop.
        """

    def piece(self, text: ReplyText, piece: Piece, delta: Delta) -> bytes:
        """Return the events of a piece. The first piece's events include those that begin the text.

        Args:
            delta: what the piece adds to the reply.
        """

    def last(self, text: ReplyText, delta: Delta) -> bytes:
        """Return the events that end a text.

        `delta`: the part of the reply that was held back until the end.
        """

    def end(self, usage: dict[str, Any]) -> bytes:
        """Return the events that end the stream, once all texts have ended."""

    def error(self, body: dict[str, Any]) -> bytes:
        """Return the last event of a stream that fails."""


class CompletionWriter(ReplyWriter):
    """Writes replies of /v1/completions, whose objects share an id, a time and a model.

    Args:
        spell: returns a token's bytes in UTF-8. Only `ChatWriter` uses it, for log probabilities.
    """

    _ID = "cmpl-"
    _OBJECT = "text_completion"
    _CHUNK = "text_completion"

    def __init__(self, request: SharedRequest, spell: Callable[[int], bytes]) -> None:
        options = request.stream_options or StreamOptions()
        self._include_usage = options.include_usage  # each chunk then has a field `usage`
        self._include_provenance = options.include_provenance
        self._spell = spell
        self._begun: set[int] = set()  # texts of chats that have a first chunk
        self._head = {
            "id": self._ID + secrets.token_hex(12),
            "created": int(time.time()),
            "model": request.model,
        }

    def whole(self, texts: Sequence[ReplyText], usage: dict[str, Any]) -> bytes:
        choices = []
        for text in texts:
            choice = {"index": text.index, **self._message(text.message)}
            choice["finish_reason"] = text.finish_reason
            choice["logprobs"] = self._logprobs(text.result.tokens, text.result.details)
            choices.append(choice)
        return encode({**self._head, "object": self._OBJECT, "usage": usage, "choices": choices})

    def piece(self, text: ReplyText, piece: Piece, delta: Delta) -> bytes:
        """Return the chunk for a piece; no bytes if the chunk would be of no use.

        A chunk is of use if the piece adds to the message, or if the piece has tokens whose details
        the client has requested.
        """
        has_details = self._include_provenance or piece.details
        if not delta.events and not (has_details and piece.tokens):
            return b""
        fields = self._delta(fields_of(delta) or {"content": ""})
        if self._include_provenance:
            provenance = []
            for token, source in zip(piece.texts, piece.provenance, strict=True):
                provenance.append({"text": token, "source": source.value})
            fields["provenance"] = provenance
        logprobs = self._logprobs(piece.tokens, piece.details)
        return self._chunk(text, fields, logprobs=logprobs)

    def last(self, text: ReplyText, delta: Delta) -> bytes:
        return self._chunk(text, self._delta(fields_of(delta)), text.finish_reason)

    def end(self, usage: dict[str, Any]) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "object": self._CHUNK, "choices": [], "usage": usage}) + DONE

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a choice that hold a whole text."""
        return {"text": message["content"]}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a choice that hold one piece of a text."""
        return {"text": delta.get("content", "")}

    def _logprobs(self, tokens: Sequence[int], details: Sequence[TokenDetails]) -> Any:
        """Return the field `logprobs`; None here, because only chats have log probabilities."""
        return None

    def _chunk(
        self,
        text: ReplyText,
        fields: dict[str, Any],
        reason: str | None = None,
        logprobs: Any = None,
    ) -> bytes:
        choice = {"index": text.index, **fields, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self._CHUNK, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)


class ChatWriter(CompletionWriter):
    """Writes replies of /v1/chat/completions."""

    _ID = "chatcmpl-"
    _OBJECT = "chat.completion"
    _CHUNK = "chat.completion.chunk"

    def piece(self, text: ReplyText, piece: Piece, delta: Delta) -> bytes:
        chunks = super().piece(text, piece, delta)
        if text.index not in self._begun:
            self._begun.add(text.index)
            chunks = self._chunk(text, {"delta": {"role": "assistant", "content": ""}}) + chunks
        return chunks

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if not content and "tool_calls" in message:
            content = None
        return {"message": {"refusal": None, **_with_both_names(message), "content": content}}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": _with_both_names(delta)}

    def _logprobs(self, tokens: Sequence[int], details: Sequence[TokenDetails]) -> Any:
        if not details:
            return None
        content = []
        for token, token_details in zip(tokens, details, strict=True):
            entry = self._entry(token, token_details.logprob)
            entry["top_logprobs"] = [self._entry(*candidate) for candidate in token_details.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = self._spell(token)
        return {
            "token": spelling.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(spelling),
        }


def _with_both_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message or delta with its reasoning under both names that clients read."""
    if "reasoning_content" not in message:
        return message
    return message | {"reasoning": message["reasoning_content"]}


def finish_reason(result: Result) -> str:
    """Return OpenAI's finish reason: "length" for a text that was cut, otherwise "stop"."""
    return "length" if result.finish_reason == "length" else "stop"


def usage(texts: Sequence[ReplyText], n: int) -> dict[str, Any]:
    """Return the field `usage`: the request's token counts, and its statistics of speculation.

    Args:
        n: number of texts for each prompt. The texts of one prompt are adjacent in `texts`, and the
            tokens of the prompt are counted once for all of these texts.
    """
    results = [text.result for text in texts]
    prompt_tokens = sum(len(result.prompt_tokens) for result in results[::n])
    cached_tokens = sum(result.statistics.num_cached_tokens for result in results[::n])
    completion_tokens = sum(len(result.tokens) for result in results)
    reasoning_tokens = sum(text.reasoning_tokens for text in texts)
    accepted_tokens = sum(result.accepted_prediction_tokens for result in results)
    rejected_tokens = sum(result.rejected_prediction_tokens for result in results)
    queue_seconds = []
    for text in texts:
        queue_seconds.append(text.wait_seconds + text.result.statistics.queue_seconds)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": rejected_tokens,
        },
        "pearl": _statistics(results) | {"queue_seconds": queue_seconds},
    }


# Statistics of a text that `usage` lists for each text.
_LISTED = (
    "tokens_per_second",
    "tokens_per_step",
    "speedup",
    "speedup_basis",
    "settled",
    "core_wait",
)


def _statistics(results: Sequence[Result]) -> dict[str, Any]:
    statistics = [result.statistics for result in results]
    num_draft_tokens = sum(text.num_draft_tokens for text in statistics)
    num_accepted = sum(text.num_accepted_draft_tokens for text in statistics)
    lists = {name: [getattr(text, name) for text in statistics] for name in _LISTED}
    return {
        "seed": results[0].seed,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_draft_tokens": num_accepted,
        "draft_acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "tokens_by_source": sources(results),
        "seconds_to_first_token": statistics[0].seconds_to_first_token,
        "seconds": [text.seconds - text.queue_seconds for text in statistics],
        **lists,
    }


def sources(results: Sequence[Result]) -> dict[str, int]:
    """Return the number of generated tokens by source, such as {"accepted": 30, "corrected": 4}."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(source.value for source in result.provenance)
    return dict(counts)
