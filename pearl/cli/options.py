"""Flags generated from the configuration's fields, so that every field has a flag."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic.fields import FieldInfo

from pearl.config import SECTIONS, load_settings
from pearl.config.decoding import NUMBER_WORDS, WordedNumber
from pearl.config.engine import SHORT_DTYPES, ShortDType
from pearl.errors import ConfigError
from pearl.spec.methods import METHODS

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
            rest = {name: given.pop(name) for name in list(given) if name not in _FIELDS}
            values = {name: value for name, value in given.items() if value is not None and value != ()}
            for name in values:
                if name in unread:
                    raise ConfigError(f"--{name.replace('_', '-')}: {instead}")
            return command(settings=load_settings(config, values), **rest)

        made = field_options(_FIELDS, _ABOUT_CONFIG, defaults or {}, unread)(wrapped)
        return typing.cast(_Command, made)

    return add


def field_options(
    fields: Mapping[str, FieldInfo],
    about: str,
    defaults: Mapping[str, str] | None = None,
    hidden: Collection[str] = (),
) -> Callable[[Any], Any]:
    """Add a flag for each field, and --config with the help `about`. `defaults` as of `settings_options`."""

    def add(command: Any) -> Any:
        for name, field in reversed([*fields.items()]):
            default = (defaults or {}).get(name)
            command = _field_option(name, field, default, hidden=name in hidden)(command)
        return click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help=about)(command)

    return add


# The heading of each section's flags in a command's help.
_TITLES = dict(zip(SECTIONS, ("The pair, and where it runs", "How it is decoded", "How tokens are drawn"), strict=True))


# Settings that --help of a command lists; --help-all lists every one.
_USUAL = ("target", "draft", "temperature", "max_tokens", "method", "seed", "config")


class SettingsCommand(click.Command):
    """A command with `settings_options`: its help has its own options and the usual settings; --help-all every one."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles = {name: title for section, title in _TITLES.items() for name in section.model_fields}
        order = ["Options", *titles.values()]
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


_FIELDS: dict[str, FieldInfo] = {name: field for s in SECTIONS for name, field in s.model_fields.items()}


def _field_option(name: str, field: FieldInfo, default: str | None, *, hidden: bool) -> Callable[[Any], Any]:
    """A flag with the field's type, description and default."""
    kind, flag = _bare(field.annotation), f"--{name.replace('_', '-')}"
    common: dict[str, Any] = {"default": None, "hidden": hidden}
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, help=field.description, **common)
    common["help"] = _help(field, default)
    if WordedNumber in field.metadata:
        return click.option(flag, name, metavar="|".join(["N", *NUMBER_WORDS]), **common)
    if field is _FIELDS["method"]:
        return click.option(flag, name, cls=_MethodOption, type=_Choice(METHODS), **common)
    multiple = typing.get_origin(kind) is tuple
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    metavar = extra.get("metavar") or {int: "N", float: "X", str: "NAME"}.get(kind)
    other_names = SHORT_DTYPES if ShortDType in field.metadata else {}
    form = {"type": _type(kind, other_names), "multiple": multiple, "metavar": metavar}
    return click.option(flag, name, **common, **form)


class _Choice(click.Choice):
    """A choice that names the value nearest to a mistyped one.

    Args:
        other_names: further names -> the values that they stand for.
    """

    def __init__(self, values: Collection[str], other_names: Mapping[str, str] | None = None) -> None:
        super().__init__([*values])
        self._other_names = other_names or {}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(self._other_names.get(value, value), param, ctx)
        except click.BadParameter as error:
            nearest = get_close_matches(str(value), [*self.choices, *self._other_names], n=1)
            if not nearest:
                raise
            raise click.BadParameter(f"{error.message} Did you mean {nearest[0]!r}?", ctx, param) from None


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
        default = _FIELDS["method"].default
        return f"--method [{names}|...]", f"{words}; --help-all: {others} others.  [default: {default}]"


def _bare(annotation: Any) -> Any:
    """The type without `| None` and without Annotated."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (a for a in typing.get_args(annotation) if a is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _type(kind: Any, other_names: Mapping[str, str]) -> Any:
    if typing.get_origin(kind) is Literal:
        return _Choice(typing.get_args(kind), other_names)
    if typing.get_origin(kind) is not tuple:
        return kind
    each = _bare(typing.get_args(kind)[0])
    return typing.get_args(each) or each  # pairs are two arguments of the flag


def _help(field: FieldInfo, default: str | None) -> str:
    description = field.description or ""
    if default is not None:
        return f"{_STATED_DEFAULT.sub('', description).rstrip('.')}.  [default: {default}]"
    shown = not field.is_required() and field.default not in (None, ()) and not isinstance(field.default, tuple)
    return f"{description}  [default: {field.default}]" if shown else description
