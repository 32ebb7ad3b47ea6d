"""How many files, and so connections, this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_limit() -> None:
    """To what the system allows at most: a shell's own limit is often 1,024."""
    with suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
