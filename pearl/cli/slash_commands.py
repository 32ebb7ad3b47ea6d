"""The slash commands of the chat."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter
from rich.table import Table

from pearl.cli.console import pair_table
from pearl.cli.reply import legend
from pearl.config import ModelRole, RequestOptions
from pearl.config.option_names import OPTION_NAMES, by_flag, options_of
from pearl.engine.registry import read_card
from pearl.errors import RequestError
from pearl.metrics import FIGURES, Figure, Statistics
from pearl.spec.methods import METHODS

if TYPE_CHECKING:
    from pearl.cli.chat import ChatSession

_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
_HINTS = [
    ('"""', "opens a message of several lines, and closes it; Alt-Enter breaks a line too"),
    ("Ctrl-C", "ends a reply and keeps what there is of it"),
    ("Enter", "during a reply: the line is read when the reply is done"),
    ("Ctrl-X Ctrl-E", "writes a message in $EDITOR"),
]
# Setting of /set -> attribute of `ChatSession`.
_DISPLAY_SETTINGS = {"draft": "show_draft", "markdown": "markdown", "stats": "stats"}
_SETTING_NAMES = OPTION_NAMES + tuple(_DISPLAY_SETTINGS)
_UNSET_TEXTS = {"seed": "drawn for each reply", "max_tokens": "as the context has room"}
_MOST_FILE = 1 << 20  # bytes of a file in a message: more than any context holds


class Leave(Exception):
    """Raised by a command to end the chat."""


def run_command(session: ChatSession, line: str) -> str | None:
    """Run the command in `line`. Return a message to send to the model, or None. Raises `PearlError` on failure."""
    name, _, argument = line.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in _HANDLERS:
        raise RequestError(f"unknown command {name}: /? lists them all")
    return _HANDLERS[name](session, argument.strip())


# The docstring of each of these commands is its line in /help.


def _help(session: ChatSession, _: str) -> None:
    """show this list; /? too"""
    session.console.print(pair_table(list(COMMANDS.items()) + _HINTS))
    if session.show_draft:
        session.console.print(legend())


def _clear(session: ChatSession, _: str) -> None:
    """forget the conversation"""
    session.conversation.clear()
    _say(session, "the conversation is forgotten; the system prompt stays")


def _system(session: ChatSession, text: str) -> None:
    """show the system prompt, or set it: /system TEXT; /system none"""
    if text:
        session.conversation.system = "" if text == "none" else text
    _say(session, f"system prompt: {session.conversation.system or 'none'}")


def _set(session: ChatSession, argument: str) -> None:
    """show the settings in use, or change one: /set temperature 0.7; /set temperature default"""
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    value = value.strip()
    if name == "system":
        _system(session, value)
        return
    if name and name not in _SETTING_NAMES:
        raise RequestError(f"no setting {name!r}: one of {', '.join(_SETTING_NAMES)}")
    if value:
        _change(session, name, value)
    texts = _setting_texts(session)
    if name:
        texts = {name: texts.get(name, "none")}
    session.console.print(pair_table(texts.items()))


def _change(session: ChatSession, name: str, value: str) -> None:
    if name in _DISPLAY_SETTINGS:
        if value not in ("on", "off"):
            raise RequestError(f"/set {name} takes on or off")
        setattr(session, _DISPLAY_SETTINGS[name], value == "on")
    else:
        options = _changed(session.options, name, value)
        session.engine.config.check_options(options)
        session.options = options


def _changed(options: RequestOptions, name: str, value: str) -> RequestOptions:
    """Return a copy of the options in which the option `name` has another value.

    The value is validated as if it stood in a configuration file.

    Args:
        value: the new value; "default" unsets the option.
    """
    values = by_flag(options, is_given=True)
    values.pop(name, None)
    if value != "default":
        try:
            values[name] = tuple(shlex.split(value)) if name == "stop" else value
        except ValueError as error:
            raise RequestError(f"cannot read {value!r}: {error}") from None
    return options_of(values)


def _setting_texts(session: ChatSession) -> dict[str, str]:
    """Return setting -> its value as text, such as {"temperature": "0.7 (default)", "draft": "off"}."""
    changed_settings = by_flag(session.options, is_given=True)
    in_use = session.options.resolved(session.engine.defaults.sampling)
    values = by_flag(in_use.changed(seed=session.options.seed))
    texts = {}
    for name, value in values.items():
        texts[name] = _value_text(name, value)
        if name not in changed_settings:
            texts[name] += " (default)"
    for name, attribute in _DISPLAY_SETTINGS.items():
        texts[name] = "on" if getattr(session, attribute) else "off"
    return texts


def _value_text(name: str, value: Any) -> str:
    if value in (None, (), {}):
        return _UNSET_TEXTS.get(name, "none")
    if isinstance(value, tuple):
        return " ".join(map(repr, value))
    return str(value)


def _show(session: ChatSession, _: str) -> None:
    """show the models, the engine and how full the context is"""
    engine = session.engine
    turns = len(session.conversation.turns)
    tokens = f"{session.conversation.length:,} of {engine.context:,} tokens"
    pairs = [
        ("target", _model_text(session, "target")),
        ("draft", _model_text(session, "draft") if engine.config.has_draft else "none"),
        ("conversation", f"{turns} turns, {tokens}"),
        ("engine", f"{engine.directory}   (pearl chat --connect)"),
    ]
    session.console.print(pair_table(pairs))


def _model_text(session: ChatSession, role: ModelRole) -> str:
    """Return the name of a model with its device and its dtype.

    Device and dtype are those that the running engine reports in its card. If the engine has no
    card, they are those of the settings.
    """
    model = session.engine.config.model(role)
    card = read_card(session.engine.directory)
    device, dtype = card.place(role) if card else (model.device, model.dtype)
    text = f"{model.spec} on {device}"
    if dtype:
        text += f" in {dtype}"
    return text


def _stats(session: ChatSession, _: str) -> None:
    """show figures of this session, by method: medians over replies"""
    if not session.figures:
        _say(session, "nothing has been measured yet")
        return
    table = Table("", *session.figures, box=None, padding=(0, 2, 0, 0), header_style="dim")
    rows: dict[str, Callable[[list[Statistics]], object]] = {
        "replies": len,
        "tokens": _total_tokens,
    }
    for figure in FIGURES:
        rows[figure.name] = partial(_median_text, figure)
    for name, text_of in rows.items():
        texts = [str(text_of(replies)) for replies in session.figures.values()]
        if any(text != "-" for text in texts):
            table.add_row(name, *texts)
    session.console.print(table)


def _total_tokens(replies: list[Statistics]) -> int:
    return sum(statistics.num_generated_tokens for statistics in replies)


def _median_text(figure: Figure, replies: list[Statistics]) -> str:
    """Return the median of a figure over replies as text; "-" if no reply has the figure."""
    values = []
    for statistics in replies:
        value = figure.value(statistics)
        if isinstance(value, int | float):
            values.append(value)
    if not values:
        return "-"
    return figure.form.format(median_low(values))


def _save(session: ChatSession, argument: str) -> None:
    """write the conversation to a file: /save FILE"""
    path = _path(argument, "/save FILE")
    with _file_errors(f"cannot write {path}"):
        if path.exists() and '"pearl_chat"' not in _text_of(path):
            raise RequestError(f"{path} is there, and no saved conversation: name another file")
        path.write_text(session.conversation.saved(session.engine.config.target), encoding="utf-8")
    _say(session, f"{len(session.conversation.turns)} turns are in {path}")


def _load(session: ChatSession, argument: str) -> None:
    """continue a saved conversation: /load FILE"""
    path = _path(argument, "/load FILE")
    with _file_errors(f"cannot read {path}"):
        text = _text_of(path)
    session.conversation.load(text)
    _say(session, f"{len(session.conversation.turns)} turns from {path}")


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise RequestError(f"name a file: {usage}")
    with _file_errors(f"cannot find {argument}"):
        return Path(argument).expanduser()


@contextmanager
def _file_errors(failure: str) -> Iterator[None]:
    """Turn errors of the file system into `RequestError`, which the chat prints without ending.

    Args:
        failure: the beginning of the message, such as "cannot read notes.txt".
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise RequestError(f"{failure}: {cause}") from None


def _file(session: ChatSession, argument: str) -> None:
    """put a text file into your next message: /file FILE"""
    path = _path(argument, "/file FILE")
    with _file_errors(f"cannot read {path}"):
        with path.open("rb") as file:
            data = file.read(_MOST_FILE + 1)
        if len(data) > _MOST_FILE:
            raise RequestError(f"{path} has more than {_MOST_FILE:,} bytes")
        text = data.decode("utf-8").replace("\r\n", "\n")
    fence = "```"
    while fence in text:
        fence += "`"
    session.attachments.append(f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n")
    _say(session, f"{path.name}, {len(text.splitlines()):,} lines: your next message has it")


def _regen(session: ChatSession, _: str) -> str | None:
    """write another reply to the last message"""
    turn = session.conversation.undo()
    if turn is None:
        raise RequestError("there is no reply yet")
    if session.options.seed is not None:
        session.options = session.options.changed(sample=session.options.sample + 1)
    if session.options.resolved(session.engine.defaults.sampling).temperature == 0:
        hint = "/set temperature 0.8 makes others likely"
        _say(session, f"temperature is 0, so the reply will be the same: {hint}")
    return turn.user


def _undo(session: ChatSession, _: str) -> None:
    """forget the last message and its reply"""
    turn = session.conversation.undo()
    if turn is None:
        raise RequestError("there is nothing to undo")
    _say(session, f"forgotten: {turn.user[:60]}")


def _method(session: ChatSession, name: str) -> None:
    """show the method, or use another: /method ar, sd or pearl"""
    if name:
        _change(session, "method", name)
    _say(session, f"method: {session.options.method}")


def _bye(session: ChatSession, _: str) -> None:
    """leave the chat; /exit and Ctrl-D too"""
    raise Leave


_HANDLERS: dict[str, Callable[[ChatSession, str], str | None]] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/set": _set,
    "/show": _show,
    "/stats": _stats,
    "/save": _save,
    "/load": _load,
    "/file": _file,
    "/regen": _regen,
    "/undo": _undo,
    "/method": _method,
    "/bye": _bye,
}
COMMANDS = {name: handler.__doc__ or "" for name, handler in _HANDLERS.items()}
_PATHS = PathCompleter(expanduser=True)
_VALUES: dict[str, Any] = {"system": None}
_VALUES |= {name: {"default"} for name in OPTION_NAMES}
_VALUES |= {name: {"on", "off"} for name in _DISPLAY_SETTINGS}
ARGUMENTS: dict[str, Completer] = {  # what may follow a command
    "/method": NestedCompleter.from_nested_dict(dict.fromkeys(METHODS)),
    "/set": NestedCompleter.from_nested_dict(_VALUES),
    "/save": _PATHS,
    "/load": _PATHS,
    "/file": _PATHS,
}


def _say(session: ChatSession, text: str) -> None:
    session.console.print(text, style="dim")
