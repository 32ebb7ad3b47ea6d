"""The command that installs an extra of the package here. Imports nothing of PEARL."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def installing(extra: str) -> str:
    """`scripts/setup` in a checkout's own environment, else pip with the extra's requirements: no index has PEARL."""
    if (_ROOT / ".venv").resolve() == Path(sys.prefix).resolve():
        return f"{os.path.relpath(_ROOT / 'scripts' / 'setup')} {extra}"
    try:
        stated = requires("pearl-runtime") or []
    except PackageNotFoundError:
        return f"pip install -e '{_ROOT}[{extra}]'"
    wanted = [each.partition(";")[0].strip() for each in stated if re.search(rf"extra == ['\"]{extra}['\"]", each)]
    return "pip install " + " ".join(f"'{each}'" for each in wanted)
