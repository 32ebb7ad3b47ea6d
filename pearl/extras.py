"""How to install an extra of the package. Imports nothing of PEARL."""

from __future__ import annotations


def installing(extra: str) -> str:
    """To end a sentence that says what is missing."""
    return f"`scripts/setup {extra}` in a checkout, or pip with the extra `{extra}` of PEARL's wheel"
