"""Generates command-line flags from the configuration's fields, so that every field has a flag."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from pearl.config import OPTION_NAMES, EngineConfig, load_settings
from pearl.config.engine import SHORT_DTYPES, ShortDType
from pearl.config.option_names import DECODING_NAMES, description_of, kind_of_parameter, type_of
from pearl.config.options import OPTIONS, described
from pearl.errors import ConfigError
from pearl.spec.methods import AS_PUBLISHED, METHODS, WINDOWS
from pearl.spec.rules import RULES
from pearl.spec.stops import STOPS

_ABOUT_CONFIG = "YAML file of these settings, see configs/; toy: an emulated pair."
# The default at the end of a description, which is cut off for a command with another default.
_STATED_DEFAULT = re.compile(r"(; d|(^| )D)efault: .*", re.DOTALL)


def settings_options(
    defaults: Mapping[str, str] = {},
    unread: Collection[str] = (),
    instead: str = "",
) -> Callable[[Any], Any]:
    """Return a decorator that adds --config and a flag for every field to a command.

    The command receives the values as `settings: Settings`.

    Args:
        defaults: setting -> this command's own default, as the help shows it.
        unread: settings that this command does not read. Its help leaves them out, and their flags
            are refused.
        instead: the end of the message that refuses such a flag: what this command does instead.
    """

    def add(command: Any) -> Any:
        @functools.wraps(command)
        def wrapped(config: Path | None, **flags: Any) -> Any:
            values = {}
            arguments = {}  # the command's own arguments
            for name, value in flags.items():
                if name not in _SETTINGS:
                    arguments[name] = value
                elif value is not None and value != ():
                    values[name] = value
                    if name in unread:
                        raise ConfigError(f"--{name.replace('_', '-')}: {instead}")
            return command(settings=load_settings(config, values), **arguments)

        return field_options(_SETTINGS, _ABOUT_CONFIG, defaults, unread)(wrapped)

    return add


def field_options(
    settings: Mapping[str, Setting],
    about: str,
    defaults: Mapping[str, str] = {},
    hidden: Collection[str] = (),
) -> Callable[[Any], Any]:
    """Return a decorator that adds a flag for each setting, and --config with the help `about`.

    Args:
        defaults: see `settings_options`.
        hidden: settings whose flags the help leaves out.
    """

    def add(command: Any) -> Any:
        for name, setting in reversed(list(settings.items())):
            flag = _flag(name, setting, defaults.get(name), hidden=name in hidden)
            command = flag(command)
        path = click.Path(dir_okay=False, path_type=Path)
        return click.option("--config", type=path, help=about)(command)

    return add


# Settings that a command's --help lists; --help-all lists all settings.
_USUAL = ("target", "draft", "temperature", "max_tokens", "method", "seed", "config")
_USUAL_TITLE = "Settings used most"
_UNLISTED = ""  # title of the settings that --help leaves out


class SettingsCommand(click.Command):
    """A command with `settings_options`.

    --help lists the settings used most and the command's own options; --help-all lists all
    settings.
    """

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        is_all = ctx.meta.get(_ALL, False)
        if is_all:
            titles = _titles()
            order = ["Options", *dict.fromkeys(titles.values())]
        else:
            titles = dict.fromkeys(_SETTINGS, _UNLISTED) | dict.fromkeys(_USUAL, _USUAL_TITLE)
            order = [_USUAL_TITLE, "Options"]
        records: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if not isinstance(option, click.Option):
                continue
            record = option.get_help_record(ctx)
            if record is not None:
                if option.name == "method" and not is_all:
                    record = _usual_methods()
                title = titles.get(str(option.name), "Options")
                records.setdefault(title, []).append(record)
        for title in order:
            if title in records:
                with formatter.section(title):
                    formatter.write_dl(records[title])


def _titles() -> dict[str, str]:
    """Return setting -> the heading under which --help-all lists it."""
    titles = dict.fromkeys(EngineConfig.model_fields, "The pair, and where it runs")
    titles |= dict.fromkeys(DECODING_NAMES, "How it is decoded")
    for name in OPTION_NAMES:
        titles.setdefault(name, "How tokens are drawn")
    return titles


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
_METAVARS = {"json_schema": "JSON", "regex": "EXPRESSION", "prediction": "TEXT"} | dict.fromkeys(
    AS_PUBLISHED, "N|auto|off"
)
_METAVAR_OF_KIND = {int: "N", float: "X", str: "NAME"}


class Setting(NamedTuple):
    """The type, description and default of a setting, from which its flag is made.

    Attributes:
        kind: int, float, str or bool. A flag that may be given several times has a tuple type, such
            as tuple[str, ...]; its items have one of these types, or are pairs of them.
        choices: the words that the flag accepts; empty if it accepts any.
    """

    kind: Any
    description: str
    default: Any = None
    choices: tuple[str, ...] = ()


def of_field(field: FieldInfo) -> Setting:
    """Return the setting of a pydantic field."""
    kind = type_of(field.annotation)
    choices: tuple[str, ...] = ()
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        kind = str
    if ShortDType in field.metadata:
        choices += tuple(SHORT_DTYPES)
    default = None if field.is_required() else field.default
    return Setting(kind, field.description or "", default, choices)


def of_option(name: str) -> Setting:
    """Return the setting of a request's option, or of a parameter of a rule or stop policy."""
    description = description_of(name)
    if name not in OPTIONS:
        return Setting(kind_of_parameter(name), description)
    kind = type_of(OPTIONS[name].type)
    if name in AS_PUBLISHED:
        kind = str
    default = OPTIONS[name].default
    if name == "rule":
        default = next(iter(RULES))
    return Setting(kind, description, default, tuple(_CHOICES.get(name, ())))


_SETTINGS = {name: of_field(field) for name, field in EngineConfig.model_fields.items()}
_SETTINGS |= {name: of_option(name) for name in OPTION_NAMES}


def _flag(
    name: str, setting: Setting, default: str | None, *, hidden: bool
) -> Callable[[Any], Any]:
    """Return a decorator that adds a flag with the setting's type, description and default."""
    dashed = name.replace("_", "-")
    form: dict[str, Any] = {"default": None, "hidden": hidden}
    if setting.kind is bool:
        return click.option(f"--{dashed}/--no-{dashed}", name, help=setting.description, **form)
    form["help"] = _help(setting, default)
    if setting.choices:
        form["type"] = _Choice(setting.choices)
    else:
        form["type"] = _type(setting.kind)
        form["metavar"] = _METAVARS.get(name) or _METAVAR_OF_KIND.get(setting.kind)
    form["multiple"] = get_origin(setting.kind) is tuple
    return click.option(f"--{dashed}", name, **form)


class _Choice(click.Choice):
    """A choice whose error names the valid value that is nearest to a mistyped one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            nearest = get_close_matches(str(value), self.choices, n=1)
            if not nearest:
                raise
            message = f"{error.message} Did you mean {nearest[0]!r}?"
            raise click.BadParameter(message, ctx, param) from None


def _usual_methods() -> tuple[str, str]:
    """Return (flag with its values, description), the help of --method.

    The help lists only the methods of general use.
    """
    usual = {name: method for name, method in METHODS.items() if method.is_usual}
    names = "|".join(usual)
    num_unlisted = len(METHODS) - len(usual)
    default = OPTIONS["method"].default
    return (
        f"--method [{names}|...]",
        f"{described(usual)}; --help-all: {num_unlisted} others.  [default: {default}]",
    )


def _type(kind: Any) -> Any:
    """Return click's type for a flag. For pairs it is a tuple of two types: the flag then takes two arguments."""
    if get_origin(kind) is not tuple:
        return kind
    item = type_of(get_args(kind)[0])
    return tuple(map(type_of, get_args(item))) or item


def _help(setting: Setting, default: str | None) -> str:
    description = setting.description
    if default is not None:
        description = _STATED_DEFAULT.sub("", description).rstrip(".") + "."
    elif setting.default is not None and not isinstance(setting.default, tuple):
        default = setting.default
    if default is None:
        return description
    return f"{description}  [default: {default}]"
