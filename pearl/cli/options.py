"""Flags generated from the configuration's fields, so that every field has a flag."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from pearl.config import OPTION_NAMES, EngineConfig, load_settings
from pearl.config.options import DECODING_NAMES, OPTIONS, description_of, kind_of_parameter, type_of
from pearl.spec.methods import AS_PUBLISHED, METHODS, WINDOWS
from pearl.spec.rules import RULES
from pearl.spec.stops import STOPS

_Command = TypeVar("_Command", bound=Callable[..., Any])


def settings_options(command: _Command) -> _Command:
    """Add --config and a flag for every field to a command, which receives them as `settings: Settings`."""

    @functools.wraps(command)
    def wrapped(config: Path | None, **given: Any) -> Any:
        rest = {name: given.pop(name) for name in list(given) if name not in _SETTINGS}
        settings = load_settings(config, {k: v for k, v in given.items() if v is not None and v != ()})
        return command(settings=settings, **rest)

    about = "YAML file of these settings, see configs/; toy: an emulated pair."
    return typing.cast(_Command, field_options(_SETTINGS, about)(wrapped))


def field_options(settings: Mapping[str, Setting], about: str) -> Callable[[Any], Any]:
    """--config, with this help, and a flag for each field."""

    def add(command: Any) -> Any:
        for name, setting in reversed([*settings.items()]):
            command = _flag(name, setting)(command)
        return click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help=about)(command)

    return add


# Settings that --help of a command lists; --help-all lists every one.
_USUAL = ("target", "draft", "temperature", "max_tokens", "method", "seed", "config")


class SettingsCommand(click.Command):
    """A command with `settings_options`: its help has its own options and the usual settings; --help-all every one."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = _titles()
        order = ["Options", *dict.fromkeys(titles.values())]
        if not ctx.meta.get(_ALL):
            titles = dict.fromkeys(titles, "") | dict.fromkeys(_USUAL, "Settings used most")
            order = ["Settings used most", "Options", ""]
        listed: dict[str, list[tuple[str, str]]] = {title: [] for title in order}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                listed[titles.get(str(option.name), "Options")].append(record)
        for title, records in listed.items():
            if title:
                with formatter.section(title):
                    formatter.write_dl(records)


def _titles() -> dict[str, str]:
    """The heading under which --help-all lists each setting."""
    titles = dict.fromkeys(EngineConfig.model_fields, "The pair, and where it runs")
    titles |= dict.fromkeys(DECODING_NAMES, "How it is decoded")
    return {**titles, **dict.fromkeys(OPTION_NAMES, "How tokens are drawn"), **titles}


def _print_all(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_ALL = "pearl.help_all"
_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_all,
    help="Every setting, in groups.",
)


_CHOICES: dict[str, Iterable[str]] = {"method": METHODS, "rule": RULES, "draft_stop": STOPS, "window": WINDOWS}
_METAVARS = {"json_schema": "JSON", "regex": "EXPRESSION"} | dict.fromkeys(AS_PUBLISHED, "N|auto|off")
_METAVAR_OF_KIND = {int: "N", float: "X", str: "NAME"}


class Setting(NamedTuple):
    """What a flag takes.

    Attributes:
        kind: int, float, str or bool; or a tuple of one of these or of pairs, for a flag given several times.
        choices: the words that it may have; empty: any.
    """

    kind: Any
    description: str
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None


def of_field(field: FieldInfo) -> Setting:
    """The setting of a pydantic field."""
    kind = type_of(field.annotation)
    default = None if field.is_required() else field.default
    if get_origin(kind) is Literal:
        return Setting(str, field.description or "", default, get_args(kind))
    return Setting(kind, field.description or "", default, (), _METAVAR_OF_KIND.get(kind))


def of_option(name: str) -> Setting:
    """The setting of a request's option, or of a parameter of a rule or stop policy."""
    description = description_of(name)
    if name not in OPTIONS:
        of_parameter = kind_of_parameter(name)
        return Setting(of_parameter, description, None, (), _METAVAR_OF_KIND[of_parameter])
    field = OPTIONS[name]
    kind = str if name in AS_PUBLISHED else type_of(field.type)
    metavar = _METAVARS.get(name) or _METAVAR_OF_KIND.get(kind)
    default = next(iter(RULES)) if name == "rule" else field.default
    return Setting(kind, description, default, tuple(_CHOICES.get(name, ())), metavar)


_SETTINGS = {name: of_field(field) for name, field in EngineConfig.model_fields.items()}
_SETTINGS |= {name: of_option(name) for name in OPTION_NAMES}


def _flag(name: str, setting: Setting) -> Callable[[Any], Any]:
    """A click option with the setting's type, description and default."""
    flag = f"--{name.replace('_', '-')}"
    if setting.kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=setting.description)
    multiple = get_origin(setting.kind) is tuple
    return click.option(
        flag,
        name,
        default=None,
        help=_help(setting),
        type=click.Choice(setting.choices) if setting.choices else _type(setting.kind),
        multiple=multiple,
        metavar=setting.metavar,
    )


def _type(kind: Any) -> Any:
    if get_origin(kind) is not tuple:
        return kind
    item = type_of(get_args(kind)[0])
    return tuple(type_of(part) for part in get_args(item)) or item  # pairs are two arguments of the flag


def _help(setting: Setting) -> str:
    is_shown = setting.default is not None and not isinstance(setting.default, tuple)
    return f"{setting.description}  [default: {setting.default}]" if is_shown else setting.description
