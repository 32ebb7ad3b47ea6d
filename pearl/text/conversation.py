"""Several turns of a chat, and the prompt tokens for the next reply.

Each prompt is the whole conversation as the chat template writes it. The engine reuses the longest
common prefix of the KV cache, so a turn prefills only from the first token that differs. A thinking
model's reasoning is given to the template in a field of its own, because most templates leave out
the reasoning of earlier turns.

This file knows a tokenizer, and no engine.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from pearl.errors import RequestError
from pearl.text.reasoning import tags_for
from pearl.text.reply import split
from pearl.text.stream import Tokenizer


class Turn(BaseModel):
    """A message of the user, and the model's reply."""

    user: str
    reply: str


class Saved(BaseModel):
    """The file format of a saved conversation.

    `target` is the model that wrote the replies; `load` ignores it.
    """

    model_config = ConfigDict(extra="ignore")  # earlier files have the tokens too

    pearl_chat: Literal[1] = 1
    target: str
    system: str
    turns: list[Turn]


class Conversation:
    """The messages of a chat so far.

    Args:
        tokenizer: the target's tokenizer.
        raw: whether the prompt is the plain text of all messages, without a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, raw: bool = False, system: str = "") -> None:
        self.turns: list[Turn] = []
        self._tokenizer = tokenizer
        self.is_raw = raw
        self.system = system

    @property
    def length(self) -> int:
        """The number of tokens of the turns so far; 0 if there are none."""
        return len(self.prompt("")) if self.turns else 0

    def prompt(self, message: str) -> list[int]:
        """Return the prompt for the reply to `message`.

        Raises `RequestError` if the model has no chat template, or the template refuses these messages.
        """
        return self._prompt(self.turns, message)

    def _prompt(self, turns: Sequence[Turn], message: str) -> list[int]:
        if self.is_raw:
            text = "".join(turn.user + turn.reply for turn in turns)
            return self._tokenizer.encode(text + message)
        messages = self._messages(turns)
        messages.append({"role": "user", "content": message})
        tokens = self._tokenizer.apply_chat(messages)
        if tokens is None:
            raise RequestError(
                "this model has no chat template: chat with --raw, where your text is continued as it is"
            )
        return tokens

    def add(self, message: str, reply: str) -> None:
        """Append a turn."""
        self.turns.append(Turn(user=message, reply=reply))

    def undo(self) -> Turn | None:
        """Remove the last turn and return it; None if there is none."""
        return self.turns.pop() if self.turns else None

    def make_room(self, message: str, room: int) -> int:
        """Remove the oldest turns until the prompt for `message` has at most `room` tokens.

        Returns how many turns were removed. Raises `RequestError`, and changes nothing, if the
        message is too long by itself.
        """
        for count in range(len(self.turns) + 1):
            length = len(self._prompt(self.turns[count:], message))
            if length <= room:
                del self.turns[:count]
                return count
        raise RequestError(
            f"your message alone has too many tokens: {length:,}, and room is for {room:,}. Shorten it"
        )

    def clear(self) -> None:
        """Remove all turns; the system prompt stays."""
        self.turns = []

    def saved(self, target: str) -> str:
        """Return the conversation as JSON."""
        return Saved(target=target, system=self.system, turns=self.turns).model_dump_json(indent=1)

    def load(self, text: str) -> None:
        """Replace this conversation by a saved one. Raises `RequestError`, and changes nothing, if it is invalid."""
        try:
            saved = Saved.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "file"
            raise RequestError(f"no saved conversation: {where}: {problem['msg']}") from None
        self.system = saved.system
        self.turns = saved.turns

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        messages = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append(self._reply_of(turn))
        return messages

    def _reply_of(self, turn: Turn) -> dict[str, Any]:
        tags = tags_for(self._tokenizer)
        if tags is None:
            return {"role": "assistant", "content": turn.reply}
        question = [{"role": "user", "content": turn.user}]
        is_open = tags.are_open(self._tokenizer.chat_text(question) or "")
        reasoning, answer = split(turn.reply, tags, is_open)
        message = {"role": "assistant", "content": answer}
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
