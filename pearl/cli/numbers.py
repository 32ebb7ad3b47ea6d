"""Options of the commands that simulate or measure: numbers that are numbers, times by tokens fed, where JSON goes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from pearl.errors import ConfigError


class Number(click.FloatRange):
    """No NaN, nothing infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


class Times(click.ParamType):
    """`50`, or `1:50,4:55,8:60`: milliseconds by tokens fed."""

    name = "ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[int, float]:
        if isinstance(value, dict):
            return value
        items = [item.split(":") if ":" in item else ["1", item] for item in value.split(",")]
        try:
            times = {int(fed): float(ms) for fed, ms in items}
        except ValueError:
            times = {}
        if len(times) < len(items) or min(times) < 1 or not all(0 < ms < math.inf for ms in times.values()):
            self.fail(f"{value!r}: write 50, or 1:50,4:55,8:60 (tokens fed:milliseconds)", param, ctx)
        return times


POSITIVE = Number(min=0, min_open=True)
json_option = click.option(
    "--json", "to", type=click.Path(path_type=Path, allow_dash=True), help="Write JSON here; - is standard output."
)
STDOUT = Path("-")


def write_json(path: Path, document: object) -> None:
    """Raises `ConfigError` where it cannot be written."""
    if path == STDOUT:
        click.echo(json.dumps(document))
        return
    try:
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
