"""The slash commands of the chat."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from prompt_toolkit.completion import NestedCompleter, PathCompleter
from rich.table import Table
from rich.text import Text

from pearl.cli.reply import legend
from pearl.config import ModelRole, RequestOptions
from pearl.config.options import OPTION_NAMES, options_of
from pearl.engine.registry import read_card
from pearl.errors import RequestError
from pearl.metrics import FIGURES
from pearl.printable import printable
from pearl.spec.methods import METHODS

if TYPE_CHECKING:
    from pearl.cli.chat import Chat

_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
_HINTS = [
    ('"""', "opens a message of several lines, and closes it; Alt-Enter breaks a line too"),
    ("Ctrl-C", "ends a reply and keeps what there is of it"),
    ("Enter", "during a reply: the line is read when the reply is done"),
    ("Ctrl-X Ctrl-E", "writes a message in $EDITOR"),
]
_DISPLAY_SETTINGS = {
    "draft": "show_draft",
    "markdown": "markdown",
    "stats": "stats",
}  # setting -> the chat's attribute
_MOST_FILE = 1 << 20  # bytes of a file in a message: more than any context holds


class Leave(Exception):
    """Ends the chat."""


class Switch(Exception):
    """Goes on with other models. `saved`: the conversation; `draft`: "none" for none."""

    def __init__(self, target: str, draft: str, saved: str) -> None:
        self.target, self.draft, self.saved = target, draft, saved


def run_command(chat: Chat, line: str) -> str | None:
    """Run the command in `line`. Return a message to send, or None. Raises `PearlError` if it fails."""
    name, _, rest = line.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in _HANDLERS:
        raise RequestError(f"unknown command {name}: /? lists them all")
    return _HANDLERS[name](chat, rest.strip())


# The docstring of a command is its line in /help.


def _help(chat: Chat, _: str) -> None:
    """this list; /? too"""
    _print_pairs(chat, [*COMMANDS.items(), *_HINTS])
    if chat.show_draft:
        chat.console.print(legend())


def _clear(chat: Chat, _: str) -> None:
    """forget the conversation"""
    chat.conversation.clear()
    _say(chat, "the conversation is forgotten; the system prompt stays")


def _system(chat: Chat, text: str) -> None:
    """show the system prompt, or set it: /system TEXT; /system none"""
    if text:
        chat.conversation.system = "" if text == "none" else text
    _say(chat, f"system prompt: {chat.conversation.system or 'none'}")


def _set(chat: Chat, rest: str) -> None:
    """show the settings in use, or change one: /set temperature 0.7; /set temperature default"""
    name, _, value = (
        rest.removeprefix("parameter ").strip().partition(" ")
    )  # /set parameter NAME VALUE is accepted too
    name, value = name.replace("-", "_"), value.strip()
    if name == "system":
        _system(chat, value)
        return
    if value:
        _change(chat, name, value)
    _print_settings(chat, name)


def _change(chat: Chat, name: str, value: str) -> None:
    if name in _DISPLAY_SETTINGS:
        if value not in ("on", "off"):
            raise RequestError(f"/set {name} takes on or off")
        setattr(chat, _DISPLAY_SETTINGS[name], value == "on")
    elif name in OPTION_NAMES:
        options = _changed(chat.options, name, value)
        chat.engine.config.check_options(options)
        chat.options = options
    else:
        raise _unknown_setting(name)


def _unknown_setting(name: str) -> RequestError:
    return RequestError(
        f"no setting {name!r}: one of {', '.join([*OPTION_NAMES, *_DISPLAY_SETTINGS])}"
    )


def _changed(options: RequestOptions, name: str, value: str) -> RequestOptions:
    """Return a copy of the options with one changed, validated like a configuration file.

    Args:
        value: "default" unsets the field.
    """
    values = {**options.by_flag(is_given=True)}
    values.pop(name, None)
    if value != "default":
        try:
            values[name] = tuple(shlex.split(value)) if name == "stop" else value
        except ValueError as error:
            raise RequestError(f"cannot read {value!r}: {error}") from None
    return options_of(values)


def _print_settings(chat: Chat, only: str) -> None:
    given = chat.options.by_flag(is_given=True)
    in_use = chat.options.resolved(chat.engine.defaults.sampling)
    values = in_use.changed(seed=chat.options.seed).by_flag()
    shown = {
        name: _in_use(name, value) + ("" if name in given else " (default)")
        for name, value in values.items()
    }
    shown |= {name: "on" if getattr(chat, of) else "off" for name, of in _DISPLAY_SETTINGS.items()}
    if only and only not in shown:
        raise _unknown_setting(only)
    _print_pairs(chat, [(only, shown[only])] if only else [*shown.items()])


def _in_use(name: str, value: Any) -> str:
    if value in (None, (), {}):
        return {"seed": "drawn for each reply", "max_tokens": "as the context has room"}.get(
            name, "none"
        )
    return " ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def _show(chat: Chat, _: str) -> None:
    """the models, the engine and how full the context is"""
    turns, used = len(chat.conversation.turns), chat.conversation.length
    draft = _placed(chat, "draft") if chat.engine.config.has_draft else "none"
    pairs = [
        ("target", _placed(chat, "target")),
        ("draft", draft),
        ("conversation", f"{turns} turns, {used:,} of {chat.engine.context:,} tokens"),
        ("engine", f"{chat.engine.directory}   (pearl chat --connect)"),
    ]
    _print_pairs(chat, pairs)


def _placed(chat: Chat, role: ModelRole) -> str:
    """A model, its device and its dtype: those in use, or the settings if the engine does not report them."""
    model = chat.engine.config.model(role)
    card = read_card(chat.engine.directory)
    device, dtype = card.place(role) if card else (model.device, model.dtype)
    return f"{model.spec} on {device}" + (f" in {dtype}" if dtype else "")


def _stats(chat: Chat, _: str) -> None:
    """figures of this session, by method: medians over replies"""
    if not chat.done:
        _say(chat, "nothing has been measured yet")
        return
    replies = chat.done.values()
    table = Table("", *chat.done, box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_row("replies", *(str(len(of)) for of in replies))
    table.add_row("tokens", *(str(sum(one.num_generated_tokens for one in of)) for of in replies))
    for figure in FIGURES:
        known = [
            [v for one in of if isinstance(v := figure.value(one), int | float)] for of in replies
        ]
        if any(known):
            table.add_row(
                figure.name,
                *(figure.form.format(median_low(each)) if each else "-" for each in known),
            )
    chat.console.print(table)


def _save(chat: Chat, rest: str) -> None:
    """write the conversation to a file: /save FILE"""
    path = _path(rest, "/save FILE")
    with _file_errors(f"cannot write {path}"):
        if path.exists() and '"pearl_chat"' not in path.read_text(
            encoding="utf-8", errors="replace"
        ):
            raise RequestError(f"{path} is there, and no saved conversation: name another file")
        path.write_text(chat.conversation.saved(chat.engine.config.target), encoding="utf-8")
    _say(chat, f"{len(chat.conversation.turns)} turns are in {path}")


def _load(chat: Chat, rest: str) -> None:
    """continue a saved conversation: /load FILE"""
    path = _path(rest, "/load FILE")
    with _file_errors(f"cannot read {path}"):
        text = path.read_text(encoding="utf-8", errors="replace")
    chat.conversation.load(text)
    _say(chat, f"{len(chat.conversation.turns)} turns from {path}")


def _path(rest: str, usage: str) -> Path:
    if not rest:
        raise RequestError(f"name a file: {usage}")
    with _file_errors(f"cannot find {rest}"):
        return Path(rest).expanduser()


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Raises `RequestError`, which the chat survives, for errors of the file system.

    Args:
        what: begins the message.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"{what}: {getattr(error, 'strerror', None) or error}") from None


def _file(chat: Chat, rest: str) -> None:
    """put a text file into your next message: /file FILE"""
    path = _path(rest, "/file FILE")
    with _file_errors(f"cannot read {path}"):
        with path.open("rb") as file:
            data = file.read(_MOST_FILE + 1)
        if len(data) > _MOST_FILE:
            raise RequestError(f"{path} has more than {_MOST_FILE:,} bytes")
        text = data.decode("utf-8").replace("\r\n", "\n")
    fence = "```"
    while fence in text:
        fence += "`"
    chat.attached.append(f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n")
    _say(chat, f"{path.name}, {len(text.splitlines()):,} lines: your next message has it")


def _model(chat: Chat, rest: str) -> None:
    """as /show, or go on with other models: /model TARGET [DRAFT]"""
    if not rest:
        _show(chat, "")
        return
    if chat.is_attached:
        raise RequestError("this chat did not start its engine, so it cannot load another model")
    target, _, draft = rest.partition(" ")
    raise Switch(
        target, draft.strip() or "none", chat.conversation.saved(chat.engine.config.target)
    )


def _regen(chat: Chat, _: str) -> str | None:
    """another reply to the last message"""
    turn = chat.conversation.undo()
    if turn is None:
        raise RequestError("there is no reply yet")
    if chat.options.seed is not None:
        chat.options = chat.options.changed(sample=chat.options.sample + 1)
    if chat.options.resolved(chat.engine.defaults.sampling).temperature == 0:
        _say(
            chat,
            "temperature is 0, so the reply will be the same: /set temperature 0.8 makes others likely",
        )
    return turn.user


def _undo(chat: Chat, _: str) -> None:
    """forget the last message and its reply"""
    turn = chat.conversation.undo()
    if turn is None:
        raise RequestError("there is nothing to undo")
    _say(chat, f"forgotten: {turn.user[:60]}")


def _method(chat: Chat, name: str) -> None:
    """show the method, or use another: /method ar, sd or pearl"""
    if name:
        _change(chat, "method", name)
    _say(chat, f"method: {chat.options.method}")


def _bye(chat: Chat, _: str) -> None:
    """leave; /exit and Ctrl-D too"""
    raise Leave


_HANDLERS: dict[str, Callable[[Chat, str], str | None]] = {
    f"/{handler.__name__[1:]}": handler
    for handler in (
        _help,
        _clear,
        _system,
        _set,
        _show,
        _stats,
        _save,
        _load,
        _file,
        _regen,
        _undo,
        _method,
        _model,
        _bye,
    )
}
COMMANDS = {name: handler.__doc__ or "" for name, handler in _HANDLERS.items()}
_VALUES = {name: {"default"} for name in OPTION_NAMES} | {
    name: {"on", "off"} for name in _DISPLAY_SETTINGS
}
ARGUMENTS = {  # what may follow a command
    "/method": NestedCompleter.from_nested_dict(dict.fromkeys(METHODS)),
    "/set": NestedCompleter.from_nested_dict({**_VALUES, "system": None}),
    **dict.fromkeys(("/save", "/load", "/file", "/model"), PathCompleter(expanduser=True)),
}


def _say(chat: Chat, text: str) -> None:
    chat.console.print(Text(printable(text), "dim"))


def _print_pairs(chat: Chat, pairs: list[tuple[str, str]]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(style="dim", overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(printable(value)))
    chat.console.print(table)
