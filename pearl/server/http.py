"""Answers to clients: OpenAI's objects, whole or in chunks. Pure."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.json import encode

from pearl.engine import Piece, Result
from pearl.protocol.messages import Logprobs
from pearl.server.bodies import StreamOptions
from pearl.text.reasoning import Splitter
from pearl.text.tools import CallSplitter

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(data) + b"\n\n"


class Parts:
    """A text as OpenAI's message: reasoning, content and calls of tools.

    Attributes:
        message: as far as it is known.

    Args:
        thoughts: the splitter of its reasoning; None where the model does not think.
        calls: that of its calls; None where there are none.
    """

    def __init__(self, thoughts: Splitter | None = None, calls: CallSplitter | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def feed(self, text: str, is_last: bool = False) -> dict[str, Any]:
        """The next piece of the text. Returns what is known with it as fields of a delta: text that may be part of a
        tag waits.
        """
        thought, content = (
            self._thoughts.feed(text, is_last) if self._thoughts is not None else ("", text)
        )
        content, calls = (
            self._calls.feed(content, is_last) if self._calls is not None else (content, [])
        )
        delta = {"reasoning_content": thought, "content": content, "tool_calls": calls}
        for name in ("reasoning_content", "content"):
            if delta[name]:
                self.message[name] = self.message.get(name, "") + delta[name]
        for call in calls:
            if "id" in call:
                made = {"id": call["id"], "type": call["type"], "function": {**call["function"]}}
                self.message.setdefault("tool_calls", []).append(made)
            else:
                self.message["tool_calls"][-1]["function"]["arguments"] += call["function"][
                    "arguments"
                ]
        return {name: value for name, value in delta.items() if value}

    def finish_reason(self, result: Result) -> str:
        """OpenAI's."""
        reason = finish_reason(result)
        return "tool_calls" if "tool_calls" in self.message and reason == "stop" else reason


class Answer:
    """The answer to one request: its objects share an id, a time and a model.

    Attributes:
        done: what ends a streamed answer.
        new_parts: makes the `Parts` of a text.

    Args:
        spell: a token's bytes in UTF-8; for log probabilities.
    """

    done = DONE

    def __init__(
        self,
        is_chat: bool,
        model: str,
        spell: Callable[[int], bytes],
        options: StreamOptions | None = None,
    ) -> None:
        self._chat, self._spell = is_chat, spell
        self._include_usage = (
            options is not None and options.include_usage
        )  # each chunk then has a field `usage`
        self._provenance = options is not None and options.include_provenance
        self.new_parts: Callable[[], Parts] = Parts
        self._parts: defaultdict[int, Parts] = defaultdict(lambda: self.new_parts())
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, results: Sequence[Result], usage: dict[str, Any]) -> bytes:
        """All texts, prompt by prompt. Not for the event loop: very many log probabilities take long."""
        choices = [
            {
                "index": index,
                **self._text(index, result.text),
                "finish_reason": self._parts[index].finish_reason(result),
                "logprobs": self._logprobs(result.tokens, result.logprobs),
            }
            for index, result in enumerate(results)
        ]
        return encode(
            {**self._head, "object": self._object(""), "usage": usage, "choices": choices}
        )

    def _text(self, index: int, text: str) -> dict[str, Any]:
        if not self._chat:
            return {"text": text}
        self._parts[index].feed(text, True)
        message = self._parts[index].message
        content = message["content"] or (None if "tool_calls" in message else "")
        return {"message": {"refusal": None, **message, "content": content}}

    def first(self, index: int) -> Iterator[bytes]:
        """The chunk before the first piece of a text."""
        if self._chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        """The chunk of a piece, if it has text or the client requested details of its tokens."""
        fields = self._parts[index].feed(piece.text) if self._chat else {"text": piece.text}
        if any(fields.values()) or ((self._provenance or piece.logprobs) and piece.tokens):
            delta: dict[str, Any] = {"delta": fields or {"content": ""}} if self._chat else fields
            if self._provenance:
                origins = zip(piece.texts, piece.provenance, strict=True)
                delta["provenance"] = [
                    {"text": text, "source": source.value} for text, source in origins
                ]
            yield self._chunk(index, delta, logprobs=self._logprobs(piece.tokens, piece.logprobs))

    def error(self, body: dict[str, Any]) -> bytes:
        """The last chunk of a stream that fails."""
        return event(body)

    def last(self, index: int, result: Result) -> bytes:
        """The chunk that ends a text."""
        rest = {"delta": self._parts[index].feed("", True)} if self._chat else {"text": ""}
        return self._chunk(index, rest, self._parts[index].finish_reason(result))

    def usage(self, usage: dict[str, Any]) -> Iterator[bytes]:
        """The last chunk, if the client requested it."""
        if self._include_usage:
            yield event(
                {**self._head, "object": self._object(".chunk"), "choices": [], "usage": usage}
            )

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> dict[str, Any] | None:
        """Log probabilities of tokens; None if the client did not request them, as only chats can."""
        if not (self._chat and logprobs):
            return None
        content = [
            self._entry(token, one.logprob)
            | {"top_logprobs": [self._entry(other, logprob) for other, logprob in one.top]}
            for token, one in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._spell(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(spelled),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **delta, "logprobs": logprobs, "finish_reason": reason}
        more = {"usage": None} if self._include_usage else {}
        return event({**self._head, "object": self._object(".chunk"), "choices": [choice], **more})

    def _object(self, chunk: str) -> str:
        return f"chat.completion{chunk}" if self._chat else "text_completion"


def finish_reason(result: Result) -> str:
    """OpenAI's, for which an end-of-sequence token is a stop too."""
    return "length" if result.finish_reason == "length" else "stop"


def usage(results: Sequence[Result], n: int, waits: Mapping[int, float]) -> dict[str, Any]:
    """Tokens of a request, and statistics of its drafts.

    Args:
        n: texts for each prompt, adjacent in `results`; the tokens of a prompt count once.
        waits: index of a result -> seconds before it was submitted.
    """
    prompts = sum(len(result.prompt_tokens) for result in results[::n])
    cached = sum(result.statistics.num_cached_tokens for result in results[::n])
    made = sum(len(result.tokens) for result in results)
    statistics = [result.statistics for result in results]
    drafted = sum(one.num_draft_tokens for one in statistics)
    accepted = sum(one.num_accepted_draft_tokens for one in statistics)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": made,
        "total_tokens": prompts + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "pearl": {
            "seed": results[0].seed if results else None,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "tokens_by_source": sources(results),
            "seconds_to_first_token": statistics[0].seconds_to_first_token if statistics else None,
            "queue_seconds": [
                waits.get(at, 0.0) + one.queue_seconds for at, one in enumerate(statistics)
            ],
            "seconds": [one.seconds - one.queue_seconds for one in statistics],
            "tokens_per_second": [one.tokens_per_second for one in statistics],
            "tokens_per_step": [one.tokens_per_step for one in statistics],
            "speedup": [one.speedup for one in statistics],
            "speedup_basis": [one.speedup_basis for one in statistics],
            "settled": [one.settled for one in statistics],
            "core_wait": [one.core_wait for one in statistics],
        },
    }


def sources(results: Sequence[Result]) -> dict[str, int]:
    """Number of tokens by source."""
    return dict(Counter(source.value for result in results for source in result.provenance))
