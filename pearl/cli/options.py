"""Flags generated from the configuration's fields, so that every field has a flag."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from pearl.config import OPTION_NAMES, EngineConfig, load_settings
from pearl.config.engine import SHORT_DTYPES, ShortDType
from pearl.config.options import DECODING_NAMES, OPTIONS, description_of, kind_of_parameter, type_of
from pearl.errors import ConfigError
from pearl.spec.methods import AS_PUBLISHED, METHODS, WINDOWS
from pearl.spec.rules import RULES
from pearl.spec.stops import STOPS

_Command = TypeVar("_Command", bound=Callable[..., Any])
_ABOUT_CONFIG = "YAML file of these settings, see configs/; toy: an emulated pair."
# The default with which a description may end. A command may have another.
_STATED_DEFAULT = re.compile(r"(; d|(^| )D)efault: .*", re.DOTALL)


def settings_options(
    defaults: Mapping[str, str] | None = None,
    unread: Collection[str] = (),
    instead: str = "",
) -> Callable[[_Command], _Command]:
    """Add --config and a flag for every field to a command, which receives them as `settings: Settings`.

    Args:
        defaults: settings with a default of their own in this command, and what it is, for its help.
        unread: settings that this command does not read. Its help leaves them out, and their flags are refused.
        instead: what this command does instead; ends the message that refuses such a flag.
    """

    def add(command: _Command) -> _Command:
        @functools.wraps(command)
        def wrapped(config: Path | None, **given: Any) -> Any:
            rest = {name: given.pop(name) for name in list(given) if name not in _SETTINGS}
            values = {
                name: value for name, value in given.items() if value is not None and value != ()
            }
            for name in values:
                if name in unread:
                    raise ConfigError(f"--{name.replace('_', '-')}: {instead}")
            return command(settings=load_settings(config, values), **rest)

        made = field_options(_SETTINGS, _ABOUT_CONFIG, defaults or {}, unread)(wrapped)
        return typing.cast(_Command, made)

    return add


def field_options(
    settings: Mapping[str, Setting],
    about: str,
    defaults: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> Callable[[Any], Any]:
    """Add a flag for each setting, and --config with the help `about`. `defaults` as of `settings_options`."""

    def add(command: Any) -> Any:
        for name, setting in reversed([*settings.items()]):
            default = (defaults or {}).get(name)
            command = _flag(name, setting, default, hidden=name in hidden)(command)
        return click.option(
            "--config", type=click.Path(dir_okay=False, path_type=Path), help=about
        )(command)

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
            if title and records:
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


_CHOICES: dict[str, Iterable[str]] = {
    "method": METHODS,
    "rule": RULES,
    "draft_stop": STOPS,
    "window": WINDOWS,
}
_METAVARS = {"json_schema": "JSON", "regex": "EXPRESSION"} | dict.fromkeys(
    AS_PUBLISHED, "N|auto|off"
)
_METAVAR_OF_KIND = {int: "N", float: "X", str: "NAME"}


class Setting(NamedTuple):
    """What a flag takes.

    Attributes:
        kind: int, float, str or bool; or a tuple of one of these or of pairs, for a flag given several times.
        choices: the words that it may have; empty: any.
        other_names: further words -> the choices that they stand for.
    """

    kind: Any
    description: str
    default: Any = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    other_names: Mapping[str, str] = MappingProxyType({})


def of_field(field: FieldInfo) -> Setting:
    """The setting of a pydantic field."""
    kind = type_of(field.annotation)
    default = None if field.is_required() else field.default
    description = field.description or ""
    if get_origin(kind) is not Literal:
        return Setting(kind, description, default, (), _METAVAR_OF_KIND.get(kind))
    other_names = SHORT_DTYPES if ShortDType in field.metadata else {}
    return Setting(str, description, default, get_args(kind), other_names=other_names)


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


def _flag(
    name: str, setting: Setting, default: str | None, *, hidden: bool
) -> Callable[[Any], Any]:
    """A click option with the setting's type, description and default."""
    flag = f"--{name.replace('_', '-')}"
    common: dict[str, Any] = {"default": None, "hidden": hidden}
    if setting.kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, help=setting.description, **common)
    common["help"] = _help(setting, default)
    if name == "method":
        return click.option(flag, name, cls=_MethodOption, type=_Choice(METHODS), **common)
    kind = _Choice(setting.choices, setting.other_names) if setting.choices else _type(setting.kind)
    multiple = get_origin(setting.kind) is tuple
    metavar = None if setting.choices else setting.metavar
    return click.option(flag, name, type=kind, multiple=multiple, metavar=metavar, **common)


class _Choice(click.Choice):
    """A choice that names the value nearest to a mistyped one.

    Args:
        other_names: further names -> the values that they stand for.
    """

    def __init__(
        self, values: Collection[str], other_names: Mapping[str, str] | None = None
    ) -> None:
        super().__init__([*values])
        self._other_names = other_names or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(self._other_names.get(value, value), param, ctx)
        except click.BadParameter as error:
            nearest = get_close_matches(str(value), [*self.choices, *self._other_names], n=1)
            if not nearest:
                raise
            raise click.BadParameter(
                f"{error.message} Did you mean {nearest[0]!r}?", ctx, param
            ) from None


class _MethodOption(click.Option):
    """--method: --help names the methods of general use, --help-all every one."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None or ctx.meta.get(_ALL):
            return record
        usual = [method for method in METHODS.values() if method.is_usual]
        words = "; ".join(f"{method.name}: {method.description}" for method in usual)
        names = "|".join(method.name for method in usual)
        others = len(METHODS) - len(usual)
        default = OPTIONS["method"].default
        return (
            f"--method [{names}|...]",
            f"{words}; --help-all: {others} others.  [default: {default}]",
        )


def _type(kind: Any) -> Any:
    if get_origin(kind) is not tuple:
        return kind
    item = type_of(get_args(kind)[0])
    return (
        tuple(type_of(part) for part in get_args(item)) or item
    )  # pairs are two arguments of the flag


def _help(setting: Setting, default: str | None) -> str:
    if default is not None:
        return f"{_STATED_DEFAULT.sub('', setting.description).rstrip('.')}.  [default: {default}]"
    is_shown = setting.default is not None and not isinstance(setting.default, tuple)
    return (
        f"{setting.description}  [default: {setting.default}]" if is_shown else setting.description
    )
