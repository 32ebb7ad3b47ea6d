"""`pearl chat`: a conversation in a terminal.

`reply` displays the replies, and `slash_commands` has the commands that a user can give in a chat.
"""

import contextlib
import logging
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import click
from pydantic import ValidationError
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from pearl.cli.commands import example
from pearl.cli.console import SafeConsole, say, text_input
from pearl.cli.open_engine import connect_option, open_engine
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.reply import MarkdownReply, Reply, TokenReply, legend
from pearl.cli.slash_commands import ARGUMENTS, COMMANDS, Leave, run_command
from pearl.cli.terminal import KeyWatcher, LineReader, private_file, raw_terminal, state_directory
from pearl.config import RequestOptions, Settings
from pearl.engine import Engine
from pearl.engine.stream import Piece, Result, Stream
from pearl.errors import ConfigError, EngineClosed, PearlError, TargetLost
from pearl.metrics import FIGURES, Statistics, brief
from pearl.protocol.messages import Provenance
from pearl.text.conversation import Conversation, Saved
from pearl.text.reasoning import Tags, tags_for
from pearl.text.reply import ReplyParser, reasoning_parser
from pearl.text.stream import CONTEXT, REPLACEMENT

_MIN_REPLY_TOKENS = 16  # a message that leaves fewer tokens of the context is refused
_LAST_CHAT = "last-chat.json"  # in the state directory


@dataclass
class ChatSession:
    """A conversation with an engine, and its settings, which the slash commands change.

    Attributes:
        keys: whether Ctrl-C is read as a key; it then ends a reply. Otherwise Ctrl-C is a signal,
            and ends the program.
        figures: maps each decoding method to the statistics of the replies decoded with it.
        has_legend: whether the meaning of the colours has been printed.
        stats: whether all figures are printed below each reply. If not, only a line with the main
            figures is printed.
        attachments: files that the next message begins with.
        remembers: whether the conversation is saved when the chat ends.
    """

    engine: Engine
    options: RequestOptions
    conversation: Conversation
    show_draft: bool = False
    markdown: bool = True
    keys: bool = False
    console: Console = field(default_factory=SafeConsole)
    figures: dict[str, list[Statistics]] = field(default_factory=dict)
    has_legend: bool = False
    stats: bool = False
    attachments: list[str] = field(default_factory=list)
    remembers: bool = True

    def answer(self, message: str) -> Result:
        """Send a message and show the reply as it comes.

        Ctrl-C stops the reply; the part that was shown stays in the conversation. If the context is
        full, the oldest turns are dropped. Raises `RequestError` for a message that cannot be sent.
        """
        room_for_prompt = self.engine.context - _MIN_REPLY_TOKENS
        dropped_turns = self.conversation.make_room(message, room_for_prompt)
        if dropped_turns:
            say(f"the context is full: the oldest {dropped_turns} turns are forgotten")
        prompt = self.conversation.prompt(message)
        options = self.options
        room = self.engine.context - len(prompt)
        if options.max_tokens and options.max_tokens > room:
            options = options.changed(max_tokens=room)  # the context is the tighter limit
        parser = None
        tags = None
        if not self.conversation.is_raw:
            parser = reasoning_parser(self.engine.tokenizer, prompt)
            tags = tags_for(self.engine.tokenizer)
        shown = () if tags is None else tags.tokens
        stream = self.engine.stream(prompt, options, preview=self.show_draft, show=shown)
        self._show(stream, parser, tags)
        result = stream.result
        if result.finish_reason != "cancelled":
            self.figures.setdefault(self.options.method, []).append(result.statistics)
        self.conversation.add(message, result.text)
        return result

    def exchange(self, message: str) -> None:
        """Answer a message, with the attached files before it, and print the reply's figures."""
        message = "".join(self.attachments) + message
        self.attachments.clear()
        self.console.print(status(self.answer(message), self.engine.context, self.stats))

    def _show(self, stream: Stream, parser: ReplyParser | None, tags: Tags | None) -> None:
        """Show the reply, with its reasoning dimmed."""
        keys = KeyWatcher(stream.close) if self.keys else nullcontext()
        with stream, keys:
            first_pieces = self._await_first(stream)
            reply = self._display(parser)
            is_thinking = parser is not None and parser.is_thinking
            if tags is not None and is_thinking and not isinstance(reply, MarkdownReply):
                start_tag = f"{tags.opening}\n"  # the model writes the end tag itself
                reply.add([start_tag], [Provenance.DIRECT])
            try:
                for piece in chain(first_pieces, stream):
                    self._add(reply, piece, stream.result)
            finally:
                reply.finish()

    @property
    def _is_screen(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal

    def _await_first(self, stream: Stream) -> list[Piece]:
        """Wait for the first piece of the reply, and return it in a list; show the wait in a line.

        If there is no screen to show it on, return an empty list without waiting.
        """
        if not self._is_screen:
            return []
        with self.console.status(Text("waiting for the first token", "dim"), spinner_style="dim"):
            return list(islice(stream, 1))

    def _display(self, parser: ReplyParser | None) -> Reply:
        if not self._is_screen:
            return Reply()
        if self.show_draft:
            if not self.has_legend:
                self.console.print(legend())
            self.has_legend = True
            return TokenReply(self.console)
        if self.markdown:
            return MarkdownReply(self.console, parser)
        return Reply()

    def _add(self, reply: Reply, piece: Piece, result: Result) -> None:
        if piece.preview:
            reply.guess(_preview_text(self.engine, result, piece.preview))
        if piece.text:
            sources = piece.provenance or result.provenance[-1:]
            reply.add(piece.texts or (piece.text,), sources, piece.tokens)


def _preview_text(engine: Engine, result: Result, pending: tuple[int, ...]) -> str:
    """Return the text that the tokens `pending` add to the reply, without incomplete characters."""
    context = (list(result.prompt_tokens[-CONTEXT:]) + result.tokens)[-CONTEXT:]
    shown = engine.tokenizer.decode(context).rstrip(REPLACEMENT)
    text = engine.tokenizer.decode(context + list(pending))
    return text[len(shown) :].rstrip(REPLACEMENT)


def status(result: Result, context: int, stats: bool) -> Text:
    """Return the lines below a reply: its main figures in one line, and warnings.

    With `stats` the other figures follow after the first line.
    """
    if result.finish_reason == "cancelled":  # the target sends no statistics
        return Text(f"stopped after {len(result.tokens)} tokens", "dim")
    line = Text(brief(result.statistics), "dim")
    if stats:
        texts = []
        for figure in FIGURES:
            text = figure.text(result.statistics)
            if text is not None and not figure.is_brief:
                texts.append(f"{figure.name} {text}")
        line.append("\n" + " · ".join(texts))
    if result.statistics.draft_lost:
        line.append("\nthe draft was lost during the reply; the target went on alone", "yellow")
    if result.finish_reason == "length":
        cause = "the reply was cut at max_tokens"
        if len(result.prompt_tokens) + len(result.tokens) >= context:
            cause = (
                f"the reply was cut: the context of {context:,} tokens is full; "
                "/undo, /clear, or go on and drop turns"
            )
        line.append(f"\n{cause}", "yellow")
    return line


@click.command(
    cls=SettingsCommand,
    epilog=example("pearl chat --target my-model --draft my-small-model --show-draft"),
)
@click.option("-q", "--question", help="Ask one question, print the answer and leave.")
@click.option("--system", help="System prompt.")
@click.option(
    "--load",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Go on with a conversation of /save.",
)
@click.option("--continue", "goes_on", is_flag=True, help="Go on with the last conversation.")
@click.option("--raw", is_flag=True, help="No chat template: the model continues your input.")
@click.option(
    "--show-draft",
    is_flag=True,
    help="Show the draft's guesses, and which of them the target accepted.",
)
@click.option(
    "--markdown/--no-markdown",
    default=True,
    help="Render replies as Markdown.  [default: markdown]",
)
@click.option(
    "--history/--no-history",
    default=True,
    help="Keep your input for the arrow keys, and the last conversation for --continue.  [default: history]",
)
@click.option("--stats", is_flag=True, help="Show all figures below each reply.")
@connect_option
@settings_options()
def chat(
    settings: Settings,
    question: str | None,
    system: str | None,
    load: Path | None,
    goes_on: bool,
    raw: bool,
    show_draft: bool,
    markdown: bool,
    history: bool,
    stats: bool,
    connect: str | None,
) -> None:
    """Talk with the model. In the chat, /? lists its commands.

    If standard input is not a terminal, each of its lines is a message, and only the replies are printed.
    """
    if system and raw:
        raise ConfigError(
            "--system is for a chat template, which --raw does not use: leave one out"
        )
    saved = _saved_chat(load, goes_on)
    config = settings.engine
    if "log_level" not in config.model_fields_set and sys.stdin.isatty():
        config = config.model_copy(
            update={"log_level": "error"}
        )  # a warning would break the display
    with open_engine(config, SafeConsole(stderr=True), connect) as engine:
        conversation = Conversation(engine.tokenizer, raw)
        if saved is not None:
            conversation.load(saved)
        if system is not None:
            conversation.system = system
        session = ChatSession(
            engine,
            settings.options,
            conversation,
            show_draft,
            markdown,
            stats=stats,
            remembers=history,
        )
        _talk(session, question)


def _saved_chat(load: Path | None, goes_on: bool) -> str | None:
    """Return the saved conversation that --load or --continue asks for; None if neither is given.

    Raises `ConfigError` if both are given, or if the file cannot be read or holds no conversation.
    """
    if load is not None and goes_on:
        raise ConfigError("--load and --continue are two conversations: give one of them")
    if load is not None:
        path = load
    elif goes_on:
        path = state_directory() / _LAST_CHAT
    else:
        return None
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        Saved.model_validate_json(text)
    except OSError as error:
        raise ConfigError(
            f"there is no conversation to go on with: {path}: {error.strerror}"
        ) from None
    except ValidationError:
        raise ConfigError(f"{path} is no saved conversation") from None
    return text


def _talk(session: ChatSession, question: str | None) -> None:
    if question is not None:
        session.answer(question)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        reader = LineReader(COMMANDS, ARGUMENTS, session.remembers)
        with raw_terminal():
            try:
                _run_interactive(session, reader)
            finally:
                save_last_chat(session)
    else:
        for line in text_input("replace", newline=None):
            if line.strip():
                session.answer(line.rstrip("\n"))


def _run_interactive(session: ChatSession, reader: LineReader) -> None:
    """Read and answer messages until the user leaves.

    Raises `TargetLost` and `EngineClosed`, after which there is no engine; other errors are
    printed.
    """
    console = session.console
    logging.root.handlers = [RichHandler(console=console, show_time=False, show_path=False)]
    session.keys = True
    _greet(session)
    while True:
        try:
            line = reader.read()
            message: str | None = line
            if line.startswith("/"):
                message = run_command(session, line)
            if message and message.strip():
                session.exchange(message)
        except KeyboardInterrupt:  # Ctrl-C in an empty line
            console.print("Ctrl-D or /bye leaves.", style="dim")
        except (EOFError, Leave):
            return
        except (TargetLost, EngineClosed):
            if session.conversation.turns and session.remembers:
                hint = "pearl chat --continue goes on with this conversation"
                console.print(hint, style="yellow")
            raise
        except PearlError as error:
            console.print(str(error), style="red")


def _greet(session: ChatSession) -> None:
    """Print the models in use and, for a loaded conversation, the last message."""
    config = session.engine.config
    method = session.options.method
    greeting = f"{config.target} with {config.draft}, method {method}. /? for help"
    session.console.print(greeting, style="dim")
    turns = session.conversation.turns
    if turns:
        message_lines = turns[-1].user.splitlines() or [""]
        reminder = f"going on after {len(turns)} turns, the last: {message_lines[0][:60]}"
        session.console.print(reminder, style="dim")


def save_last_chat(session: ChatSession) -> None:
    """Save the conversation for --continue, unless it is empty.

    An error of the file system is ignored, because the chat is ending. The conversation that was
    saved before is then kept.
    """
    if session.conversation.turns and session.remembers:
        text = session.conversation.saved(session.engine.config.target)
        with contextlib.suppress(OSError, RuntimeError):
            new_file = private_file(f"{_LAST_CHAT}.new")
            new_file.write_text(text, encoding="utf-8")
            new_file.replace(new_file.with_name(_LAST_CHAT))
