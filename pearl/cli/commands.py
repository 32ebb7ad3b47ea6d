"""The list of `pearl`'s commands, so that `pearl --help` need not import all of them, which would take seconds.

To add a command, write a function in a module of this package and a line in commands.toml.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Listing(NamedTuple):
    """A line of `pearl --help`.

    Attributes:
        place: the command's function, as "module:function" below `pearl.cli`.
        summary: the first sentence of the command's docstring.
    """

    place: str
    summary: str


_TABLES = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
# In the order of `pearl --help`.
SECTIONS: dict[str, dict[str, Listing]] = {}
COMMANDS: dict[str, Listing] = {}
for _section, _lines in _TABLES.items():
    SECTIONS[_section] = {name: Listing(**line) for name, line in _lines.items()}
    COMMANDS |= SECTIONS[_section]


def example(line: str) -> str:
    """Return an example for the end of a command's help, as in `@click.command(epilog=example("pearl ps"))`."""
    return f"Example:\n\n\b\n  {line}"
