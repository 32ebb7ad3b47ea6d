"""The slash commands of the chat."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table
from rich.text import Text

from pearl.cli.reply import legend
from pearl.config import DecodingConfig, ModelRole, SamplingParams
from pearl.engine.card import read_card
from pearl.engine.request import with_defaults
from pearl.errors import RequestError
from pearl.printable import printable
from pearl.protocol.events import Phase
from pearl.spec.methods import DRAFTLESS

if TYPE_CHECKING:
    from pearl.cli.chat import Answer, Chat

COMMANDS = {
    "/help": "this list; /? too",
    "/clear": "forget the conversation",
    "/system": "show the system prompt, or set it: /system TEXT; /system none",
    "/set": "show the settings, or change one: /set temperature 0.7; /set temperature default",
    "/show": "the models, the engine and how full the context is",
    "/stats": "what was measured in this session, by method",
    "/save": "write the conversation to a file: /save FILE",
    "/load": "go on with a saved conversation: /load FILE",
    "/regen": "another reply to the last message",
    "/undo": "forget the last message and its reply",
    "/trace": "record a timeline of both workers: /trace FILE, and /trace off to write it; see pearl trace",
    "/method": "show the method, or use another: /method ar, sd or pearl",
    "/bye": "leave; /exit and Ctrl-D too",
}
_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
_HINTS = [
    ('"""', "opens a message of several lines, and closes it; Alt-Enter breaks a line too"),
    ("Ctrl-C", "ends a reply and keeps what there is of it"),
    ("Enter", "during a reply: the line is taken when the reply is done"),
]
_DISPLAY_SETTINGS = ("draft", "markdown")
_SECTIONS: dict[str, tuple[str, ...]] = {
    "sampling": tuple(SamplingParams.model_fields),
    "decoding": tuple(name for name in DecodingConfig.model_fields if name != "method"),
}


class Leave(Exception):
    """Ends the chat."""


def run_command(chat: Chat, line: str) -> str | None:
    """Run the command in `line`. Return a message to send, or None. Raises `PearlError` if it fails."""
    name, _, rest = line.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, [*COMMANDS, *_ALIASES], n=1, cutoff=0.5)
        meant = f"did you mean {near[0]}? " if near else ""
        raise RequestError(f"unknown command {name}: {meant}/? lists them all")
    return _HANDLERS[name](chat, rest.strip())


def _help(chat: Chat, _: str) -> None:
    _print_pairs(chat, [*COMMANDS.items(), *_HINTS])
    if chat.show_draft:
        chat.console.print(legend())


def _clear(chat: Chat, _: str) -> None:
    chat.conversation.clear()
    _say(chat, "the conversation is forgotten; the system prompt stays")


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.system = "" if text == "none" else text
    _say(chat, f"system prompt: {chat.conversation.system or 'none'}")


def _set(chat: Chat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    name, value = name.replace("-", "_"), value.strip()
    if value:
        _change(chat, name, value)
    _print_settings(chat, name)


def _change(chat: Chat, name: str, value: str) -> None:
    if name in _DISPLAY_SETTINGS:
        if value not in ("on", "off"):
            raise RequestError(f"/set {name} takes on or off")
        setattr(chat, {"draft": "show_draft"}.get(name, name), value == "on")
    elif name in _SECTIONS["sampling"]:
        chat.sampling = _changed(chat.sampling, name, value)
    elif name in _SECTIONS["decoding"]:
        chat.decoding = _changed(chat.decoding, name, value)
    else:
        known = [*_SECTIONS["sampling"], *_SECTIONS["decoding"], *_DISPLAY_SETTINGS]
        near = get_close_matches(name, known, n=1)
        what = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"
        raise RequestError(f"no setting {name!r}: {what}")


def _changed(section: Any, name: str, value: str) -> Any:
    """A copy of `section` with one field changed, validated like a configuration file.

    Args:
        value: "default" unsets the field.
    """
    values = section.model_dump(exclude_unset=True)
    values.pop(name, None)
    if value != "default":
        values[name] = tuple(_split(value)) if name == "stop" else value
    return type(section)(**values)


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        raise RequestError(f"cannot read {value!r}: {error}") from None


def _print_settings(chat: Chat, only: str) -> None:
    values: dict[str, Any] = {n: getattr(chat.sampling, n) for n in _SECTIONS["sampling"]}
    values |= {n: getattr(chat.decoding, n) for n in _SECTIONS["decoding"]}
    in_use = with_defaults(chat.sampling, chat.engine.defaults) | chat.decoding.in_use().model_dump()
    set_ = chat.sampling.model_fields_set | chat.decoding.model_fields_set
    values |= {n: f"default ({in_use[n]})" for n in values if n not in set_ and in_use.get(n) is not None}
    values |= {"draft": "on" if chat.show_draft else "off", "markdown": "on" if chat.markdown else "off"}
    shown = {only: values[only]} if only in values else values
    if only and only not in values:
        _change(chat, only, "")
    _print_pairs(chat, [(name, "default" if value in (None, ()) else str(value)) for name, value in shown.items()])


def _show(chat: Chat, _: str) -> None:
    engine, welcome = chat.engine, chat.engine.welcome
    config = engine.config
    used = chat.conversation.length
    times = ", ".join(f"{n}: {t * 1e3:.1f}" for n, t in welcome.t_target)
    _print_pairs(
        chat,
        [
            ("target", _placed(chat, "target")),
            ("draft", _placed(chat, "draft") if config.has_draft else "none"),
            ("method", chat.decoding.method),
            ("system prompt", chat.conversation.system or "none"),
            ("conversation", f"{len(chat.conversation.turns)} turns, {used:,} of {engine.context:,} tokens"),
            ("at start", f"t_draft {welcome.t_draft * 1e3:.1f} ms; t_target(n) {times} ms"),
            ("engine", f"{engine.directory}   (pearl chat --connect)"),
        ],
    )


def _placed(chat: Chat, role: ModelRole) -> str:
    """A model, its device and its dtype: what the engine has taken, or what is set if it has not told."""
    model = chat.engine.config.model(role)
    card = read_card(chat.engine.directory)
    device, dtype = card.place(role) if card else (model.device, model.dtype)
    return f"{model.spec} on {device}" + (f" in {dtype}" if dtype else "")


def _stats(chat: Chat, _: str) -> None:
    if not chat.done:
        _say(chat, "nothing has been measured yet")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in (
        "method",
        "replies",
        "tokens",
        "first token",
        "tokens/s",
        "tokens a step",
        "accepted",
        "tokens a run",
        "waited",
    ):
        table.add_column(column)
    for method, answers in chat.done.items():
        table.add_row(method, *_totals(answers))
    chat.console.print(table)


def _totals(answers: list[Answer]) -> list[str]:
    """The cells of one method over all its replies; rates are sums divided by sums, not means of rates."""
    all_of = [answer.result.statistics for answer in answers]
    decoding = sum(s.seconds - s.seconds_to_first_token for s in all_of)
    after_first = sum((s.tokens_per_second or 0.0) * (s.seconds - s.seconds_to_first_token) for s in all_of)
    judged, accepted = (sum(getattr(s, f"num_{n}_draft_tokens") for s in all_of) for n in ("judged", "accepted"))
    seconds = sum(s.seconds for s in all_of)
    target = sum(t for s in all_of for cause, t in s.target_wait_seconds.items() if cause != "idle")
    draft = sum(s.draft_wait_seconds for s in all_of)
    waits = f"target {target / seconds:.0%}" if seconds else "-"
    return [
        str(len(answers)),
        str(sum(s.num_generated_tokens for s in all_of)),
        f"{sum(answer.first for answer in answers) / len(answers):.2f} s",
        f"{after_first / decoding:.1f}" if decoding else "-",
        _tokens_per_step(all_of),
        f"{accepted / judged:.0%}" if judged else "-",
        _mean_run_length(all_of),
        waits + (f", draft {draft / seconds:.0%}" if judged and seconds else ""),
    ]


def _tokens_per_step(all_of: list[Any]) -> str:
    """Generated tokens over forwards after the prefill."""
    steps = sum(n for s in all_of for phase, n in s.target_steps.items() if phase != Phase.PREFILL.value)
    return f"{sum(s.num_generated_tokens for s in all_of) / steps:.1f}" if steps else "-"


def _mean_run_length(all_of: list[Any]) -> str:
    """Tokens committed up to and including a correction or bonus, on average."""
    runs = sum(s.provenance.get("corrected", 0) + s.provenance.get("bonus", 0) for s in all_of)
    tokens = runs + sum(s.num_accepted_draft_tokens for s in all_of)
    return f"{tokens / runs:.1f}" if runs else "-"


def _save(chat: Chat, rest: str) -> None:
    path = _path(rest, "/save FILE")
    with _file_errors(f"cannot write {path}"):
        if path.exists() and '"pearl_chat"' not in path.read_text(encoding="utf-8", errors="replace"):
            raise RequestError(f"{path} is there, and no saved conversation: name another file")
        path.write_text(chat.conversation.saved(chat.engine.config.target), encoding="utf-8")
    _say(chat, f"{len(chat.conversation.turns)} turns are in {path}")


def _load(chat: Chat, rest: str) -> None:
    path = _path(rest, "/load FILE")
    with _file_errors(f"cannot read {path}"):
        text = path.read_text(encoding="utf-8", errors="replace")
    chat.conversation.load(text, chat.engine.config.target)
    _say(chat, f"{len(chat.conversation.turns)} turns from {path}")


def _path(rest: str, usage: str) -> Path:
    if not rest:
        raise RequestError(f"name a file: {usage}")
    with _file_errors(f"cannot find {rest}"):
        return Path(rest).expanduser()


@contextmanager
def _file_errors(what: str) -> Iterator[None]:
    """Raises `RequestError`, which the chat survives, for errors of the file system. `what`: begins its message."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"{what}: {getattr(error, 'strerror', None) or error}") from None


def _regen(chat: Chat, _: str) -> str | None:
    turn = chat.conversation.undo()
    if turn is None:
        raise RequestError("there is no reply yet")
    if chat.sampling.seed is not None:
        chat.sampling = chat.sampling.model_copy(update={"sample": chat.sampling.sample + 1})
    if chat.is_greedy:
        _say(chat, "temperature is 0, so the reply will be the same: /set temperature 0.8 makes others likely")
    return turn.user


def _undo(chat: Chat, _: str) -> None:
    turn = chat.conversation.undo()
    if turn is None:
        raise RequestError("there is nothing to undo")
    _say(chat, f"forgotten: {turn.user[:60]}")


def _trace(chat: Chat, rest: str) -> None:
    if rest == "off":
        path = chat.engine.stop_trace()
        _say(chat, f"{path}: pearl trace report {path}")
    else:
        path = _path(rest, "/trace FILE, or /trace off")
        with _file_errors(f"cannot write {path}"):
            if path.exists():
                raise RequestError(f"{path} is there: name another file")
        chat.engine.start_trace(path)
        _say(chat, f"recording both workers; /trace off writes {path}")


def _method(chat: Chat, name: str) -> None:
    if name:
        methods = get_args(DecodingConfig.model_fields["method"].annotation)
        if name not in methods:
            raise RequestError(f"no method {name!r}: one of {', '.join(methods)}")
        if name not in DRAFTLESS and not chat.engine.config.has_draft:
            raise RequestError(f"this engine has no draft model: {' and '.join(DRAFTLESS)} are possible")
        chat.decoding = _changed(chat.decoding, "method", name)
    _say(chat, f"method: {chat.decoding.method}")


def _bye(chat: Chat, _: str) -> None:
    raise Leave


_HANDLERS: dict[str, Callable[[Chat, str], str | None]] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/set": _set,
    "/show": _show,
    "/stats": _stats,
    "/save": _save,
    "/load": _load,
    "/regen": _regen,
    "/undo": _undo,
    "/trace": _trace,
    "/method": _method,
    "/bye": _bye,
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
