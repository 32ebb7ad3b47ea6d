"""Flags generated from the configuration's fields, so that every field has a flag."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from pydantic.fields import FieldInfo

from pearl.config import SECTIONS, load_settings
from pearl.config.decoding import NUMBER_WORDS, WordedNumber

_Command = TypeVar("_Command", bound=Callable[..., Any])


def settings_options(command: _Command) -> _Command:
    """Add --config and a flag for every field to a command, which receives them as `settings: Settings`."""

    @functools.wraps(command)
    def wrapped(config: Path | None, **given: Any) -> Any:
        rest = {name: given.pop(name) for name in list(given) if name not in _FIELDS}
        settings = load_settings(config, {k: v for k, v in given.items() if v is not None and v != ()})
        return command(settings=settings, **rest)

    about = "YAML file of these settings, see configs/; toy: an emulated pair."
    return typing.cast(_Command, field_options(_FIELDS, about)(wrapped))


def field_options(fields: Mapping[str, FieldInfo], about: str) -> Callable[[Any], Any]:
    """--config, with this help, and a flag for each field."""

    def add(command: Any) -> Any:
        for name, field in reversed([*fields.items()]):
            command = _field_option(name, field)(command)
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
            if title:
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


def _field_option(name: str, field: FieldInfo) -> Callable[[Any], Any]:
    """A flag with the field's type, description and default."""
    kind, flag = _bare(field.annotation), f"--{name.replace('_', '-')}"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    multiple = typing.get_origin(kind) is tuple
    if WordedNumber in field.metadata:
        return click.option(flag, name, metavar="|".join(["N", *NUMBER_WORDS]), default=None, help=_help(field))
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    metavar = extra.get("metavar") or {int: "N", float: "X", str: "NAME"}.get(kind)
    form = {"type": _type(kind), "multiple": multiple, "metavar": metavar}
    return click.option(flag, name, default=None, help=_help(field), **form)


def _bare(annotation: Any) -> Any:
    """The type without `| None` and without Annotated."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (a for a in typing.get_args(annotation) if a is not type(None))
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _type(kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return click.Choice(typing.get_args(kind))
    if typing.get_origin(kind) is not tuple:
        return kind
    each = _bare(typing.get_args(kind)[0])
    return typing.get_args(each) or each  # pairs are two arguments of the flag


def _help(field: FieldInfo) -> str:
    shown = not field.is_required() and field.default not in (None, ()) and not isinstance(field.default, tuple)
    default = f"  [default: {field.default}]" if shown else ""
    return f"{field.description}{default}"
