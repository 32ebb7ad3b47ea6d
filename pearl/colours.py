"""Colours that show the sources of tokens, and colours of kinds of work.

The chat, the server's page and pictures use these colours. They can be read on a white and on a
black background.
"""

from pathlib import Path

from msgspec import toml

_Colours = dict[str, tuple[str, str]]  # name -> colour, meaning
_TABLES = Path(__file__).with_name("colours.toml").read_bytes()
_GROUPS = toml.decode(_TABLES, type=dict[str, _Colours])
SOURCES = _GROUPS["sources"]
WORK = _GROUPS["work"]


def style_sheet() -> str:
    """Return `SOURCES` and `WORK` as CSS variables.

    For example, "--token-accepted: #2a9d4a; ... --work-prefill: #7b6fc4; ... ".
    """
    variables = []
    for group, colours in (("token", SOURCES), ("work", WORK)):
        for name, (colour, _) in colours.items():
            variables.append(f"--{group}-{name}: {colour}; ")
    return "".join(variables)
