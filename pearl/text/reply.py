"""Splits a reply into reasoning, content and calls of tools while the reply comes.

A parser is fed pieces of text, with the token of each piece if the tokens are known, and returns what has become
certain. A whole reply is the sum of what all feeds return, so whole and streamed replies are equal. The tags of
reasoning are in `pearl.text.reasoning`, the formats of calls in `pearl.text.tools`.

Every character of a reply belongs to exactly one `Event`. White space next to tags is dropped. White space next to
calls is dropped if there is no text before the calls, or none after them.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import regex

from pearl.text.calls import Cursor, Part, Reading, Schemas
from pearl.text.marks import MarkedText, Marks
from pearl.text.reasoning import HARMONY, Tags, is_open_after, tags_for
from pearl.text.stream import Tokenizer
from pearl.text.tools import Call, Format

Kind = Literal["reasoning", "content", "call", "dropped"]


class Event(NamedTuple):
    """A part of a reply.

    Attributes:
        source: the characters of the reply that the event stands for.
        text: the text that a reader sees of these characters; empty if they are dropped or are a
            call.
        call: the call, or the part of a call, as OpenAI's API has it; None for other kinds.
    """

    kind: Kind
    source: str
    text: str = ""
    call: Call | None = None


@dataclass
class Delta:
    """What became certain with one piece of text, in the order of the reply.

    Attributes:
        events: reasoning, content and calls, each with an empty `source`. Adjacent events of one
            text or of one call are joined.
    """

    events: list[Event] = field(default_factory=list)

    @classmethod
    def of_content(cls, text: str) -> Delta:
        """Return a delta that is all content."""
        delta = cls()
        if text:
            delta.append(Event("content", "", text))
        return delta

    def __add__(self, later: Delta) -> Delta:
        joined = Delta(list(self.events))
        for event in later.events:
            joined.append(event)
        return joined

    def append(self, event: Event) -> None:
        """Append an event, joined with the last event if both are of one text or one call."""
        last_event = self.events[-1] if self.events else None
        if last_event is None or last_event.kind != event.kind:
            self.events.append(event)
        elif last_event.call is None or event.call is None:
            self.events[-1] = event._replace(text=last_event.text + event.text)
        elif "id" in event.call:
            self.events.append(event)
        else:
            self.events[-1] = event._replace(call=_continued(last_event.call, event.call))

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def calls(self) -> list[Call]:
        """The calls. The first may be the rest of a call that an earlier delta began."""
        return [event.call for event in self.events if event.call is not None]

    def _text(self, kind: Kind) -> str:
        return "".join(event.text for event in self.events if event.kind == kind)


class ReplyParser(ABC):
    """Parses one reply.

    Args:
        tags: None if the model does not think.
        format: None if the reply may have no calls.
        schemas: the functions of the request.
        is_open: whether the prompt has opened the reasoning.
        is_forced: whether the answer must be a call, whose beginning may be in the prompt.
        max_calls: maximum number of calls to return; further calls are dropped. None for no limit.

    Attributes:
        events: the events of the latest piece.
        is_thinking: whether the reply so far ends within its reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        tags: Tags | None,
        format: Format | None = None,
        schemas: Schemas | None = None,
        *,
        is_open: bool = False,
        is_forced: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.is_thinking = is_open
        self._hidden = () if tags is None else tags.tokens  # tokens that are left out of texts
        call_names = () if format is None else format.shown
        self._marks = Marks((*self._hidden, *call_names), tokenizer)
        self._marked = MarkedText(self._marks)
        self._cursor = Cursor(self._marks)
        self._tags = tags
        self._format = format
        self._schemas = schemas or {}
        self._is_forced = is_forced
        self._max_calls = max_calls
        self._num_calls = 0
        self._begun: set[Kind] = set()  # the kinds of which the reply has text
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Set the parser's state for the beginning of a reply."""

    def feed(self, texts: Sequence[str], tokens: Sequence[int] = ()) -> Delta:
        """Take the next piece, which may be several texts; return what is certain now.

        `tokens`: the token of each text; empty if the tokens are not known.
        """
        self.events = []
        for index, text in enumerate(texts):
            token = tokens[index] if tokens else None
            self._cursor.text += self._marked.push(text, token)
            self._advance()
        return self._delta()

    def finish(self) -> Delta:
        """End the reply, and return what was held back."""
        self.events = []
        self._cursor.text += self._marked.finish()
        self._cursor.is_last = True
        self._advance()
        self._end()
        return self._delta()

    @abstractmethod
    def _advance(self) -> None:
        """Parse the cursor's text as far as it is certain."""

    @abstractmethod
    def _end(self) -> None:
        """Handle the text that is left at the reply's end."""

    def _delta(self) -> Delta:
        delta = Delta()
        for event in self.events:
            if event.text or event.call is not None:
                delta.append(event._replace(source=""))
        return delta

    def _emit(self, kind: Kind, source: str) -> None:
        if not source:
            return
        text = ""
        if kind != "dropped":
            text = self._marks.readable(source, self._hidden)
        self.events.append(Event(kind, self._marks.readable(source), text))

    def _separate(self, kind: Kind, text: str) -> None:
        """Emit white space between two parts. It stands for no characters of the reply."""
        if text:
            self.events.append(Event(kind, "", text))

    def _emit_call(self, part: Part) -> None:
        if part.name:
            self._num_calls += 1
        is_dropped = self._max_calls is not None and self._num_calls > self._max_calls
        if is_dropped or not (part.name or part.arguments):
            self._emit("dropped", part.source)
            return
        call: Call = {"index": self._num_calls - 1, "function": {"arguments": part.arguments}}
        if part.name:
            # Nine letters and digits: Mistral's templates take no other id.
            call |= {"id": secrets.token_hex(5)[:9], "type": "function"}
            call["function"] = {"name": part.name, "arguments": part.arguments}
        self.events.append(Event("call", self._marks.readable(part.source), call=call))


def _continued(call: Call, part: Call) -> Call:
    """Return a call with the arguments of its next part appended."""
    function = dict(call["function"])
    function["arguments"] += part["function"]["arguments"]
    return call | {"function": function}


class TagParser(ReplyParser):
    """Parses replies with reasoning between tags, and calls that begin with `Format.start`."""

    def _begin(self) -> None:
        self._reading: Reading | None = None
        self._has_thought = self.is_thinking
        self._has_calls = self._format is not None  # whether calls may still come
        self._gap = ""  # white space at the end of the text so far: a tag or a call may follow
        self._owed = ""  # white space before a call; it is emitted if more text comes
        self._is_after_call = False
        self._is_fresh = self.is_thinking  # whether white space before any text is dropped
        self._has_text = False
        self._line_is_blank = True
        # Whether a tag counts anywhere: it does if it is a special token.
        self._is_token = self._tags is not None and self._marks.has(self._tags.tokens[0])
        self._pattern = self._next_mark()
        if not self.is_thinking:
            self._read_forced()

    def _read_forced(self) -> None:
        """Begin to read the call, if the answer must be a call. Called where the answer begins."""
        if self._is_forced and self._format is not None:
            self._is_forced = False
            self._reading = self._format.read_forced(self._cursor, self._schemas)

    def _next_mark(self) -> regex.Pattern[str]:
        """Compile the expression that finds the next tag or call."""
        choices = []
        if self._tags is not None:
            choices.append(f"(?P<open>{self._tags.start})")
            choices.append(f"(?P<close>{self._tags.end})")
            for name in self._tags.dropped:
                choices.append(f"(?P<dropped>{regex.escape(name)})")
        if self._format is not None and not self._format.leads:
            choices.append(f"(?P<call>{self._format.start})")
        return self._marks.compiled("|".join(choices) or "(?!)")

    def _advance(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Parse up to the next tag or call; return whether to call this again at once."""
        if self._reading is not None:
            return self._read_on()
        if self._leads:
            return self._look_for_leading_call()
        text = self._cursor.text
        match = self._pattern.search(text, partial=not self._cursor.is_last)
        if match is None:
            self._emit_text(self._cursor.take(len(text)))
            return False
        self._emit_text(self._cursor.take(match.start()))
        if match.partial:
            return False
        self._handle(match.lastgroup or "", match.end() - match.start())
        return True

    @property
    def _leads(self) -> bool:
        """Whether the format has calls only at the content's beginning, and one may come now."""
        format = self._format
        return (
            format is not None
            and format.leads
            and self._has_calls
            and not self.is_thinking
            and not self._has_text
        )

    def _look_for_leading_call(self) -> bool:
        assert self._format is not None
        text = self._cursor.text
        stripped = text.lstrip()
        if stripped != text:
            self._emit_text(self._cursor.take(len(text) - len(stripped)))
        if not stripped:
            return False
        if self._tags is not None:
            match = self._pattern.match(stripped, partial=not self._cursor.is_last)
            if match is not None:
                if match.partial:
                    return False
                self._handle(match.lastgroup or "", match.end())
                return True
        start = self._marks.compiled(self._format.start)
        match = start.match(stripped, partial=not self._cursor.is_last)
        if match is None:
            self._has_calls = False
            return True
        if match.partial:
            return False
        self._reading = self._format.read(self._cursor, self._schemas)
        return True

    def _handle(self, mark: str, length: int) -> None:
        """Handle a tag, or the beginning of a call, at the cursor.

        `mark`: the name of the group that has matched, such as "open"; see `_next_mark`.
        """
        if mark == "call":
            assert self._format is not None
            self._reading = self._format.read(self._cursor, self._schemas)
        elif mark == "open" and self._may_open:
            self._enter(True, length)
        elif mark == "close" and (self.is_thinking or self._is_token):
            self._enter(False, length)
        elif mark == "dropped":
            self._enter(self.is_thinking, length)
        else:
            self._emit_text(self._cursor.take(length))

    @property
    def _may_open(self) -> bool:
        """Whether an opening tag at the cursor opens reasoning; otherwise it is text.

        A tag that is a special token always opens reasoning. A tag in ordinary tokens opens
        reasoning at the beginning of the reasoning or content. Once the reply has had reasoning,
        such a tag also opens reasoning at the beginning of a line of the content.
        """
        if self._is_token:
            return True
        if self.is_thinking:
            return not self._has_text
        return not self._has_text or (self._has_thought and self._line_is_blank)

    def _enter(self, is_thinking: bool, length: int) -> None:
        """Drop a tag, and enter or leave the reasoning.

        White space next to the tag is dropped as well, unless the tag is in the middle of a text
        and changes nothing, such as a second opening tag.
        """
        tag = self._cursor.take(length)
        if is_thinking == self.is_thinking and self._has_text:
            self._hold_gap()
            self._emit("dropped", tag)
            return
        self._emit("dropped", self._gap + tag)
        self._gap = ""
        self._owed = ""
        self._line_is_blank = True
        self._is_fresh = True
        self._has_text = False
        self._has_thought = self._has_thought or is_thinking
        self.is_thinking = is_thinking
        if not is_thinking:
            self._read_forced()

    def _read_on(self) -> bool:
        """Let the reader of a call continue; return whether the reader has ended."""
        assert self._reading is not None
        while True:
            try:
                part = next(self._reading)
            except StopIteration as end:
                self._reading = None
                if not end.value:
                    self._decline()
                return True
            if part is None:
                return False
            self._touch_call()
            self._emit_call(part)

    def _touch_call(self) -> None:
        """Note that there is a call here, so that white space next to it may be dropped."""
        self._hold_gap()
        self._is_after_call = True
        if not self._has_text:
            self._is_fresh = True

    def _hold_gap(self) -> None:
        """Hold back the white space at the end of the text so far; it is emitted if more text comes."""
        self._emit("dropped", self._gap)
        self._owed += self._gap
        self._gap = ""

    def _decline(self) -> None:
        """Treat as text what looked like the beginning of a call, but is no call."""
        assert self._format is not None
        if self._format.leads:
            self._has_calls = False
            return
        start = self._marks.compiled(self._format.start).match(self._cursor.text)
        if start is not None:  # None: the reply does not continue the call that the prompt began
            self._emit_text(self._cursor.take(max(1, start.end())))

    def _emit_text(self, text: str) -> None:
        """Emit reasoning or content, but hold back the white space at its end."""
        if not text:
            return
        body = text.lstrip()
        self._gap += text[: len(text) - len(body)]
        if body:
            kind: Kind = "reasoning" if self.is_thinking else "content"
            if self._is_fresh:
                self._emit("dropped", self._gap)
                self._separate(kind, "\n\n" if kind in self._begun else "")
            else:
                self._separate(kind, self._owed)
                self._emit(kind, self._gap)
            self._begun.add(kind)
            self._gap = ""
            self._owed = ""
            text = body.rstrip()
            self._emit(kind, text)
            self._gap = body[len(text) :]
            self._has_text = True
            self._is_fresh = False
            self._is_after_call = False
        self._line_is_blank = "\n" in self._gap

    def _end(self) -> None:
        kind: Kind = "reasoning" if self.is_thinking else "content"
        if self._is_fresh or self._is_after_call:
            kind = "dropped"
        self._emit(kind, self._gap)
        self._gap = ""


# ---- gpt-oss ----

_RECIPIENT = regex.compile(r"to=(functions\.)?([\w.-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADERS = ("<|start|>", "<|channel|>")


class HarmonyParser(ReplyParser):
    """Parses OpenAI's harmony format: messages with headers.

    A header names a channel, and may name a recipient. For example:

        <|channel|>analysis<|message|>They greet.<|end|>
        <|start|>assistant<|channel|>final<|message|>Hello!

    A message to functions.NAME is a call, in any channel. A message to another recipient, or in the
    channel analysis, is reasoning. All other messages are content.
    """

    def _begin(self) -> None:
        self._hidden = HARMONY.tokens
        self._step = self._begin_message
        self._kind: Kind = "reasoning" if self.is_thinking else "content"
        self._separator = ""
        self._arguments = False  # whether the call has any arguments
        compiled = self._marks.compiled
        self._first = compiled(rf"\s*(?:{_either(*_HEADERS, '<|message|>')}|to=)")
        self._header_end = compiled(_either("<|message|>"))
        self._message_end = compiled(rf"(?P<end>{_either(*_ENDS)})|{_either(*_HEADERS)}")

    def _advance(self) -> None:
        while self._step():
            pass

    def _begin_message(self) -> bool:
        """Find out whether a header or the text of a message comes next.

        The reply begins with the text if the prompt ended with a header.
        """
        if not self._cursor.text:
            return False
        match = self._first.match(self._cursor.text, partial=not self._cursor.is_last)
        if match is not None and match.partial:
            return False
        self._step = self._read_body if match is None else self._read_header
        return True

    def _read_header(self) -> bool:
        match = self._header_end.search(self._cursor.text)
        if match is None:
            return False
        source = self._cursor.take(match.end())
        header = self._marks.readable(source)
        recipient = _RECIPIENT.search(header)
        self._kind = "content"
        if self._is_call(recipient):
            self._kind = "call"
            self._arguments = False
            self._emit_call(Part(source, recipient.group(2)))
        else:
            if recipient is not None or "analysis" in header:
                self._kind = "reasoning"
            self._emit("dropped", source)
        self._separator = "\n\n" if self._kind in self._begun else ""
        self.is_thinking = self._kind == "reasoning"
        self._step = self._read_body
        return True

    def _is_call(self, recipient: Any) -> bool:
        """Return whether a message is a call of a function of the request.

        The model may also call tools of its own, such as python. `recipient`: the match of
        `_RECIPIENT` in the header, or None.
        """
        if recipient is None or self._format is None:
            return False
        return bool(recipient.group(1)) or recipient.group(2) in self._schemas

    def _read_body(self) -> bool:
        text = self._cursor.text
        match = self._message_end.search(text, partial=not self._cursor.is_last)
        length = len(text) if match is None else match.start()
        self._emit_body(self._cursor.take(length))
        if match is None or match.partial:
            return False
        self._end_body()
        self._step = self._read_header
        if match.group("end"):
            self._emit("dropped", self._cursor.take(len(match.group())))
            self._kind = "content"
            self._step = self._begin_message
        return True

    def _emit_body(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._arguments = True
            self._emit_call(Part(text, arguments=self._marks.readable(text)))
            return
        self._separate(self._kind, self._separator)
        self._separator = ""
        self._begun.add(self._kind)
        self._emit(self._kind, text)

    def _end_body(self) -> None:
        if self._kind == "call" and not self._arguments:
            self._emit_call(Part("", arguments="{}"))

    def _end(self) -> None:
        self._emit("dropped", self._cursor.take(len(self._cursor.text)))


def _either(*names: str) -> str:
    return "|".join(map(regex.escape, names))


def parser_of(
    tokenizer: Tokenizer | None,
    tags: Tags | None,
    format: Format | None = None,
    schemas: Schemas | None = None,
    *,
    is_forced: bool = False,
    **options: Any,
) -> ReplyParser:
    """Return the parser for replies with these tags and calls; for the arguments see `ReplyParser`."""
    parser: type[ReplyParser] = TagParser
    if tags is HARMONY or (format is not None and format.is_harmony):
        tags = HARMONY  # even without reasoning: no text contains its tokens, such as <|return|>
        if not is_forced:
            parser = HarmonyParser
    return parser(tokenizer, tags, format, schemas, is_forced=is_forced, **options)


def reasoning_parser(tokenizer: Tokenizer, prompt: Sequence[int]) -> ReplyParser | None:
    """Return a parser for the reply to a prompt that the chat template made; None if the model does not think."""
    tags = tags_for(tokenizer)
    if tags is None:
        return None
    return parser_of(tokenizer, tags, is_open=is_open_after(tokenizer, tags, prompt))


def split(text: str, tags: Tags, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning and the answer in a whole text whose tokens are not known."""
    parser = parser_of(None, tags, is_open=is_open)
    reply = parser.feed([text]) + parser.finish()
    return reply.reasoning, reply.content
