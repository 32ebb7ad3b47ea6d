"""Several turns of a chat, and the prompt tokens for the next reply.

Tokens stay as they were generated: a new turn appends only what the chat template puts between two replies, so the KV
cache of earlier turns remains valid. If a template rewrites earlier messages, or a turn was removed, the whole
conversation is rendered again, and the engine reuses the longest common prefix. The template gets the reasoning of a
thinking model apart from its answer; most templates leave that of earlier turns out.

Pure: it knows a tokenizer, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pearl.errors import RequestError
from pearl.text.reasoning import split, tags_of
from pearl.text.stream import Tokenizer

_MARK = "\u2063pearl\u2063"  # takes the place of a reply, to find what the template puts around one
_SEAM = 3  # tokens after a reply that may hold the template's own end of turn


class Turn(BaseModel):
    """A message and its reply. `finish_reason` as of `pearl.Result`."""

    model_config = ConfigDict(extra="forbid")

    user: str
    reply: str
    finish_reason: str


class Saved(BaseModel):
    """The file format. `tokens`: of the whole conversation, as sent and generated; valid for `target` only."""

    model_config = ConfigDict(extra="forbid")

    pearl_chat: Literal[1] = 1
    target: str
    system: str
    turns: list[Turn]
    tokens: list[int]


class Conversation:
    """Messages so far and their tokens.

    Args:
        tokenizer: of the target.
        raw: no chat template; each message continues the text as it is.
    """

    def __init__(self, tokenizer: Tokenizer, raw: bool = False, system: str = "") -> None:
        self.turns: list[Turn] = []
        self._tokenizer = tokenizer
        self.is_raw = raw
        self._system = system
        self._tokens: list[int] = []  # of all turns, as sent and generated; empty: to be rendered again
        self._ends: list[int] = []  # for each turn, where in `_tokens` it ends; 0: unknown

    @property
    def system(self) -> str:
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        self._system = text
        self._render_anew()

    @property
    def length(self) -> int:
        """Tokens of the turns so far."""
        return len(self._tokens or (self.prompt("") if self.turns else ()))

    def prompt(self, message: str) -> list[int]:
        """The prompt for the reply to `message`.

        Raises `RequestError` if the model has no chat template, or the template refuses these messages.
        """
        if self.is_raw:
            return self._raw_prompt(message)
        if self._tokens and (continued := self._continued(message)) is not None:
            return continued
        tokens = self._tokenizer.apply_chat([*self._messages(self.turns), _user(message)])
        if tokens is None:
            raise RequestError(
                "this model has no chat template: chat with --raw, where your text is continued as it is"
            )
        return tokens

    def add(self, message: str, prompt: Sequence[int], reply: str, tokens: Sequence[int], finish_reason: str) -> None:
        """Appends a turn. `tokens`: as generated for `prompt`."""
        if list(prompt[: len(self._tokens)]) != self._tokens:
            self._render_anew()
        self._tokens = [*prompt, *tokens]
        self._ends.append(len(self._tokens))
        self.turns.append(Turn(user=message, reply=reply, finish_reason=finish_reason))

    def undo(self) -> Turn | None:
        """Removes the last turn and returns it."""
        if not self.turns:
            return None
        self._ends.pop()
        self._tokens = self._tokens[: self._ends[-1]] if self._ends else []
        return self.turns.pop()

    def turns_to_forget(self, room: int, message: str) -> int | None:
        """How many of the oldest turns must go for the prompt for `message` to have at most `room` tokens.

        None if it is too long by itself.
        """
        if len(self._without(len(self.turns)).prompt(message)) > room:
            return None
        if len(self.prompt(message)) <= room:
            return 0
        fits = (n for n in range(1, len(self.turns) + 1) if len(self._without(n).prompt(message)) <= room)
        return next(fits)

    def _without(self, count: int) -> Conversation:
        """A copy without the first `count` turns."""
        rest = Conversation(self._tokenizer, self.is_raw, self._system)
        rest.turns = self.turns[count:]
        return rest

    def forget_oldest(self, count: int) -> None:
        """Removes the first `count` turns."""
        del self.turns[:count]
        self._render_anew()

    def clear(self) -> None:
        """Removes all turns; the system prompt stays."""
        self.turns, self._tokens, self._ends = [], [], []

    def _render_anew(self) -> None:
        self._tokens, self._ends = [], [0] * len(self.turns)

    def saved(self, target: str) -> str:
        """The conversation as JSON."""
        return Saved(target=target, system=self._system, turns=self.turns, tokens=self._tokens).model_dump_json(
            indent=1
        )

    def load(self, text: str, target: str) -> None:
        """Replaces this conversation by a saved one. Raises `RequestError`, and changes nothing, if it is invalid."""
        try:
            saved = Saved.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "file"
            raise RequestError(f"no saved conversation: {where}: {problem['msg']}") from None
        known = self._tokenizer.vocab_size
        fits = saved.target == target and all(0 <= token < known for token in saved.tokens)
        self._system, self.turns = saved.system, saved.turns
        self._render_anew()
        if fits and self.turns:
            self._tokens = saved.tokens
            self._ends[-1] = len(saved.tokens)

    def _raw_prompt(self, message: str) -> list[int]:
        if self._tokens:
            text = self._tokens[:-1] if self.turns[-1].finish_reason == "eos" else self._tokens
            return text + self._tokenizer.encode(message, special=False)
        before = "".join(turn.user + turn.reply for turn in self.turns)
        return self._tokenizer.encode(before + message)

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        pairs = ((_user(turn.user), self._replied(turn)) for turn in turns)
        return [*system, *(message for pair in pairs for message in pair)]

    def _replied(self, turn: Turn) -> dict[str, Any]:
        tags = tags_of(self._tokenizer.chat_template)
        if tags is None:
            return _assistant(turn.reply)
        is_open = tags.are_open(self._tokenizer.chat_text([_user(turn.user)]) or "")
        reasoning, answer = split(turn.reply, tags, is_open)
        return _assistant(answer) | ({"reasoning_content": reasoning} if reasoning else {})

    def _continued(self, message: str) -> list[int] | None:
        """The tokens so far, and what the template puts after the last reply to prompt for the next.

        None if the template rewrites earlier messages.
        """
        *earlier, last = self.turns
        asked = [*self._messages(earlier), _user(last.user)]
        before = self._tokenizer.chat_text(asked)
        marked = self._tokenizer.chat_text([*asked, _assistant(_MARK), _user(message)])
        actual = self._tokenizer.chat_text([*asked, self._replied(last), _user(message)])
        if before is None or marked is None or actual is None:
            return None
        head, mark, tail = marked.partition(_MARK)
        as_is = (head + reply + tail for reply in (last.reply, last.reply.strip()))
        if not mark or head != before or actual not in as_is:
            return None
        return self._joined(self._tokenizer.encode(tail, special=False), last)

    def _joined(self, tail: list[int], last: Turn) -> list[int]:
        """With one end of turn: the model's own if the template writes the same, otherwise the template's."""
        if last.finish_reason != "eos":
            return self._tokens + tail
        end = self._tokens[-1]
        return self._tokens + tail[tail.index(end) + 1 :] if end in tail[:_SEAM] else self._tokens[:-1] + tail


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
