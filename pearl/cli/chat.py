"""`pearl chat`: talking with the model in a terminal. How a reply looks is `reply`, what a slash means `commands`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import click
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from pearl.cli.commands import COMMANDS, Leave, obey
from pearl.cli.launch import connect_option, running
from pearl.cli.options import settings_options
from pearl.cli.reply import MarkdownReply, PlainReply, Reply, TokenReply
from pearl.cli.terminal import LineReader, SafeConsole, WatchKeys, ended_by_signals, keys_are_keys, state_directory
from pearl.client.conversation import Conversation
from pearl.client.stream import Result, Stream
from pearl.config import DecodingConfig, SamplingParams, Settings
from pearl.engine import Engine
from pearl.errors import EngineClosed, PearlError, RequestError, TargetLost
from pearl.metrics import Statistics
from pearl.printable import printable
from pearl.protocol.messages import Provenance
from pearl.text import CONTEXT, REPLACEMENT

_LEAST_ROOM = 16  # tokens of the context that a reply must have


class ContextFull(RequestError):
    """The conversation and this message leave no room for a reply."""


@dataclass(frozen=True)
class Answer:
    """One reply. `first`: seconds until its first text was there; `room`: tokens that the context has left."""

    result: Result
    first: float
    room: int


@dataclass
class Chat:
    """A conversation with an engine and how it is held; what the commands change.

    Attributes:
        keys: whether Ctrl-C is a key that ends a reply, or the signal that ends the program.
        done: method -> its replies.
        typed: keys pressed while the last reply was made.
    """

    engine: Engine
    sampling: SamplingParams
    decoding: DecodingConfig
    conversation: Conversation
    show_draft: bool = False
    markdown: bool = True
    keys: bool = False
    console: Console = field(default_factory=SafeConsole)
    done: dict[str, list[Answer]] = field(default_factory=dict)
    typed: str = ""

    @property
    def is_greedy(self) -> bool:
        temperature = self.sampling.temperature
        return (self.engine.defaults.temperature if temperature is None else temperature) == 0

    def answer(self, message: str) -> Answer:
        """Asks, and shows the reply as it comes; Ctrl-C ends it and keeps what there is.

        Raises `ContextFull`, or another `RequestError`; the conversation is then as it was.
        """
        prompt = self.conversation.prompt(message)
        room = self.engine.context - len(prompt)
        if room < _LEAST_ROOM:
            raise ContextFull(
                f"the context is full: conversation and message have {len(prompt):,} tokens, "
                f"it holds {self.engine.context:,}"
            )
        sampling = self.sampling
        if sampling.max_tokens and sampling.max_tokens > room:
            sampling = sampling.model_copy(update={"max_tokens": None})  # up to the context, which is nearer
        asked = time.monotonic()
        stream = self.engine.stream(prompt, sampling, decoding=self.decoding, preview=self.show_draft)
        first = self._show(stream) - asked
        result = stream.result
        self.conversation.add(message, prompt, result.text, result.tokens, result.finish_reason)
        answer = Answer(result, first, room - len(result.tokens))
        if result.finish_reason != "cancelled":
            self.done.setdefault(self.decoding.method, []).append(answer)
        return answer

    def _show(self, stream: Stream) -> float:
        """When its first text was there."""
        first = None
        keys = WatchKeys(stream.close) if self.keys else nullcontext()
        with stream, self._reply() as reply, keys:
            for piece in stream:
                if piece.preview:
                    reply.guess(_guessed(self.engine, stream.result, piece.preview))
                elif piece.text:
                    first = first or time.monotonic()
                    sources = piece.provenance or stream.result.provenance[-1:] or [Provenance.DIRECT]
                    reply.add(piece.texts or (piece.text,), sources)
        self.typed = keys.typed if isinstance(keys, WatchKeys) else ""
        return first or time.monotonic()

    @contextmanager
    def _reply(self) -> Iterator[Reply]:
        reply: Reply = PlainReply()
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            reply = TokenReply(self.console) if self.show_draft else reply
            reply = MarkdownReply(self.console) if self.markdown and not self.show_draft else reply
        try:
            yield reply
        finally:
            reply.finish()


def _guessed(engine: Engine, result: Result, pending: tuple[int, ...]) -> str:
    """The text that `pending` adds to what is shown, less what is not a character yet."""
    before = [*result.prompt_tokens[-CONTEXT:], *result.tokens][-CONTEXT:]
    shown = engine.tokenizer.decode(before).rstrip(REPLACEMENT)
    return engine.tokenizer.decode([*before, *pending])[len(shown) :].rstrip(REPLACEMENT)


def status(answer: Answer, context: int) -> Text:
    """What a user wants to know of a reply, in a line."""
    s, result = answer.result.statistics, answer.result
    if result.finish_reason == "cancelled":
        return Text(f"stopped after {len(result.tokens)} tokens", "dim")
    parts = [f"{answer.first:.2f} s to the first token"]
    if s.tokens_per_second:
        parts.append(f"{s.tokens_per_second:.1f} tokens/s")
    if s.draft_acceptance_rate is not None:
        parts.append(f"{s.draft_acceptance_rate:.0%} of drafts accepted")
        if s.mean_acceptance_length:
            parts.append(f"{s.mean_acceptance_length:.1f} tokens a run")
        parts.append(f"c = {s.window}")
    parts += _waits(s)
    line = Text(" · ".join(parts), "dim")
    if s.draft_lost:
        line.append("\nthe draft was lost on the way; the target went on alone", "yellow")
    if result.finish_reason == "length" and answer.room <= 0:
        line.append(
            f"\nthe reply was cut: the context of {context:,} tokens is full; /undo, /clear, or go on and drop turns",
            "yellow",
        )
    elif result.finish_reason == "length":
        line.append("\nthe reply was cut at max_tokens", "yellow")
    return line


def _waits(s: Statistics) -> list[str]:
    if not s.seconds:
        return []
    waited = {"target": sum(t for cause, t in s.target_wait_seconds.items() if cause != "idle")}
    if s.num_draft_tokens:
        waited["draft"] = s.draft_wait_seconds
    return ["waited: " + ", ".join(f"{who} {min(1.0, t / s.seconds):.0%}" for who, t in waited.items())]


@click.command()
@click.option("-q", "--question", help="Ask one question, print the answer and leave.")
@click.option("--system", default="", help="System prompt.")
@click.option("--raw", is_flag=True, help="No chat template: what you type is continued as it is.")
@click.option("--show-draft", is_flag=True, help="Show what the draft guesses, and what the target made of it.")
@click.option("--markdown/--no-markdown", default=True, help="Render replies as Markdown.  [default: markdown]")
@click.option(
    "--history/--no-history", default=True, help="Keep what you type, for the arrow keys.  [default: history]"
)
@connect_option
@settings_options
def chat(
    settings: Settings,
    question: str | None,
    system: str,
    raw: bool,
    show_draft: bool,
    markdown: bool,
    history: bool,
    connect: str | None,
) -> None:
    """Talk with the model. In the chat, /? lists its commands.

    Where standard input is no terminal each of its lines is a message, and only the replies are printed.
    """
    config = settings.engine
    if "log_level" not in config.model_fields_set and sys.stdin.isatty():
        config = config.model_copy(update={"log_level": "error"})  # a warning would tear the screen; the status tells
    with running(config, SafeConsole(stderr=True), connect) as engine:
        if engine is None:
            return
        conversation = Conversation(engine.tokenizer, raw, system)
        decoding = settings.decoding
        if not engine.config.has_draft and "method" not in decoding.model_fields_set:
            decoding = decoding.model_copy(update={"method": "ar"})
        talk = Chat(engine, settings.sampling, decoding, conversation, show_draft, markdown)
        if question is not None:
            talk.answer(question)
        elif sys.stdin.isatty() and sys.stdout.isatty():
            with keys_are_keys(), ended_by_signals():
                _interactive(talk, LineReader(COMMANDS, remember=history))
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
            for line in sys.stdin:
                if line.strip():
                    talk.answer(line.rstrip("\n"))


def _interactive(chat: Chat, reader: LineReader) -> None:
    """Reads and answers until the user leaves."""
    logging.root.handlers = [RichHandler(console=chat.console, show_time=False, show_path=False)]
    chat.keys = True
    config = chat.engine.config
    chat.console.print(Text(f"{config.target} with {config.draft}, method {chat.decoding.method}. /? for help", "dim"))
    while True:
        try:
            line = reader.read(chat.typed)
        except KeyboardInterrupt:
            chat.console.print("Ctrl-D or /bye leaves.", style="dim")
            continue
        except EOFError:
            return
        except RequestError as error:
            chat.console.print(Text(str(error), "red"))
            continue
        finally:
            chat.typed = ""
        try:
            _take(chat, reader, line)
        except Leave:
            return


def _take(chat: Chat, reader: LineReader, line: str) -> None:
    """One line: a command or a message. What is wrong with it is said; what ends the chat is raised."""
    try:
        message = obey(chat, line) if line.startswith("/") else line
        if message and message.strip():
            _converse(chat, reader, message)
    except (TargetLost, EngineClosed):
        _keep(chat)
        raise
    except PearlError as error:
        chat.console.print(Text(printable(str(error)), "red"))


def _keep(chat: Chat) -> None:
    """The engine is gone; what was said need not be."""
    if chat.conversation.turns:
        with contextlib.suppress(OSError, RuntimeError):
            path = state_directory() / "last-chat.json"
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(chat.conversation.saved(chat.engine.config.target), encoding="utf-8")
            chat.console.print(Text(f"the conversation is in {path}; /load goes on with it", "yellow"))


def _converse(chat: Chat, reader: LineReader, message: str) -> None:
    try:
        answer = chat.answer(message)
    except ContextFull as full:
        count = chat.conversation.turns_to_forget(chat.engine.context - _LEAST_ROOM, message)
        if not count:
            raise RequestError(f"your message alone has too many tokens: {full}. Shorten it") from None
        chat.console.print(Text(str(full), "yellow"))
        if not reader.agrees(f"Drop the oldest {count} of {len(chat.conversation.turns)} turns?"):
            chat.console.print("Nothing was sent. /undo, /clear and /save are at hand.", style="dim")
            return
        chat.conversation.forget_oldest(count)
        answer = chat.answer(message)
    chat.console.print(status(answer, chat.engine.context))
