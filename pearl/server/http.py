"""Answers to clients as OpenAI's objects, whole or in chunks. No I/O: `app` sends them."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.json import encode

from pearl.engine import Piece, Result
from pearl.protocol.messages import Logprobs
from pearl.server.schemas import StreamOptions
from pearl.text.reasoning import Splitter
from pearl.text.tools import Call, CallSplitter

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """Encode `data` as a server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class Parts:
    """A text as OpenAI's message: reasoning, content and tool calls.

    Attributes:
        message: the message so far.

    Args:
        thoughts: splits off the reasoning; None if the model does not think.
        calls: splits off the tool calls; None if the text may have none.
    """

    def __init__(self, thoughts: Splitter | None = None, calls: CallSplitter | None = None) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def feed(self, text: str, is_last: bool = False) -> dict[str, Any]:
        """Take the next piece of the text, and return the fields of a delta that are complete with it.

        Text that may be the beginning of a tag is held back until the next piece.
        """
        delta: dict[str, Any] = {}
        content = text
        if self._thoughts is not None:
            reasoning, content = self._thoughts.feed(text, is_last)
            self._append(delta, "reasoning_content", reasoning)
        calls: list[Call] = []
        if self._calls is not None:
            content, calls = self._calls.feed(content, is_last)
        self._append(delta, "content", content)
        for call in calls:
            self._add_call(call)
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _append(self, delta: dict[str, Any], field: str, text: str) -> None:
        if text:
            delta[field] = text
            self.message[field] = self.message.get(field, "") + text

    def _add_call(self, call: Call) -> None:
        if "id" in call:
            entry = {"id": call["id"], "type": call["type"], "function": {**call["function"]}}
            self.message.setdefault("tool_calls", []).append(entry)
        else:
            function = self.message["tool_calls"][-1]["function"]
            function["arguments"] += call["function"]["arguments"]

    def finish_reason(self, result: Result) -> str:
        """Return OpenAI's finish reason."""
        reason = finish_reason(result)
        if reason == "stop" and "tool_calls" in self.message:
            return "tool_calls"
        return reason


class AnswerWriter:
    """Writes the answer to one request, whose objects share an id, a time and a model.

    Attributes:
        done: the bytes that end a streamed answer.
        new_parts: makes the `Parts` of a text.

    Args:
        spell: returns a token's bytes in UTF-8, for log probabilities.
    """

    done = DONE

    def __init__(
        self,
        is_chat: bool,
        model: str,
        spell: Callable[[int], bytes],
        options: StreamOptions | None = None,
    ) -> None:
        if options is None:
            options = StreamOptions()
        self._is_chat = is_chat
        self._spell = spell
        self._include_usage = options.include_usage  # each chunk then has a field `usage`
        self._include_provenance = options.include_provenance
        self.new_parts: Callable[[], Parts] = Parts
        self._parts: defaultdict[int, Parts] = defaultdict(lambda: self.new_parts())
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        self._head = {
            "id": prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> bytes:
        """Return all texts, prompt by prompt. Many log probabilities take long: call it outside the event loop."""
        choices = []
        for index, result in enumerate(results):
            choice = {"index": index, **self._text(index, result.text)}
            choice["finish_reason"] = self._parts[index].finish_reason(result)
            choice["logprobs"] = self._logprobs(result.tokens, result.logprobs)
            choices.append(choice)
        head = {**self._head, "object": self._object("")}
        return encode({**head, "usage": usage, "choices": choices})

    def _text(self, index: int, text: str) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": text}
        self._parts[index].feed(text, True)
        message = self._parts[index].message
        content = message["content"]
        if not content and "tool_calls" in message:
            content = None
        return {"message": {"refusal": None, **message, "content": content}}

    def first(self, index: int) -> Iterator[bytes]:
        """Yield the chunk before the first piece of a text."""
        if self._is_chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """Yield the chunk of a piece if it has text, or if the client requested details of its tokens."""
        fields: dict[str, Any] = {"text": piece.text}
        if self._is_chat:
            fields = self._parts[index].feed(piece.text)
        has_details = self._include_provenance or piece.logprobs
        if not any(fields.values()) and not (has_details and piece.tokens):
            return
        if self._is_chat:
            fields = {"delta": fields or {"content": ""}}
        if self._include_provenance:
            provenance = []
            for text, source in zip(piece.texts, piece.provenance, strict=True):
                provenance.append({"text": text, "source": source.value})
            fields["provenance"] = provenance
        yield self._chunk(index, fields, logprobs=self._logprobs(piece.tokens, piece.logprobs))

    def error(self, body: dict[str, Any]) -> bytes:
        """Return the last chunk of a stream that fails."""
        return event(body)

    def last(self, index: int, result: Result) -> bytes:
        """Return the chunk that ends a text."""
        parts = self._parts[index]
        fields: dict[str, Any] = {"text": ""}
        if self._is_chat:
            fields = {"delta": parts.feed("", True)}
        return self._chunk(index, fields, parts.finish_reason(result))

    def usage(self, usage: dict[str, Any]) -> Iterator[bytes]:
        """Yield the last chunk, if the client requested it."""
        if self._include_usage:
            head = {**self._head, "object": self._object(".chunk")}
            yield event({**head, "choices": [], "usage": usage})

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> dict[str, Any] | None:
        """Return log probabilities of tokens; None if the client did not request them, as only chats can."""
        if not self._is_chat or not logprobs:
            return None
        content = []
        for token, logprob in zip(tokens, logprobs, strict=True):
            entry = self._entry(token, logprob.logprob)
            entry["top_logprobs"] = [self._entry(*candidate) for candidate in logprob.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelling = self._spell(token)
        return {
            "token": spelling.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(spelling),
        }

    def _chunk(
        self,
        index: int,
        fields: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **fields, "logprobs": logprobs, "finish_reason": reason}
        chunk = {**self._head, "object": self._object(".chunk"), "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _object(self, suffix: str) -> str:
        return f"chat.completion{suffix}" if self._is_chat else "text_completion"


def finish_reason(result: Result) -> str:
    """Return OpenAI's finish reason, "length" or "stop"; an end-of-sequence token is a stop."""
    return "length" if result.finish_reason == "length" else "stop"


def usage(results: Sequence[Result], n: int, waits: Mapping[int, float]) -> dict[str, Any]:
    """Count the tokens of a request, and add the statistics of its drafts.

    Args:
        n: texts for each prompt, adjacent in `results`; the tokens of a prompt count once.
        waits: index of a result -> seconds before it was submitted.
    """
    prompt_tokens = sum(len(result.prompt_tokens) for result in results[::n])
    cached_tokens = sum(result.statistics.num_cached_tokens for result in results[::n])
    completion_tokens = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "pearl": _statistics(results, waits),
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


def _statistics(results: Sequence[Result], waits: Mapping[int, float]) -> dict[str, Any]:
    statistics = [result.statistics for result in results]
    num_draft_tokens = sum(text.num_draft_tokens for text in statistics)
    num_accepted = sum(text.num_accepted_draft_tokens for text in statistics)
    queue_seconds = []
    for index, text in enumerate(statistics):
        queue_seconds.append(waits.get(index, 0.0) + text.queue_seconds)
    lists = {name: [getattr(text, name) for text in statistics] for name in _LISTED}
    return {
        "seed": results[0].seed,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_draft_tokens": num_accepted,
        "draft_acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "tokens_by_source": sources(results),
        "seconds_to_first_token": statistics[0].seconds_to_first_token,
        "queue_seconds": queue_seconds,
        "seconds": [text.seconds - text.queue_seconds for text in statistics],
        **lists,
    }


def sources(results: Sequence[Result]) -> dict[str, int]:
    """Count the tokens by source."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(source.value for source in result.provenance)
    return dict(counts)
