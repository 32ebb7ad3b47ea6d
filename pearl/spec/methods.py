"""Every decoding method, declared once, in methods.toml.

Configuration, protocol, wire, help and the README's table read from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import toml

MAX_WINDOW = 64  # tokens of a measured window, and of any window where requests share forwards and wait for each other
MAX_GAMMA = 1024  # tokens of a fixed window
MAX_LOOK_AHEAD = 256  # guesses in one forward
MAX_BRANCHES = 64  # branches of one request that the target keeps until their outcome is decided
BRANCHES = 8  # most outcomes that a draft prepares for, each in a slot of its cache
WINDOWS = ("stream", "fixed")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Method:
    """A decoding method: which of PEARL's two overlaps it has, and which guesses it takes beside the draft's.

    Attributes:
        description: one line for help.
        drafts: whether a draft takes part.
        pre_verify: whether the target judges a window's first token while the window is being drafted.
        post_verify: whether the draft drafts on while the target verifies.
        look_ahead: default number of guesses, made without a model, that the target verifies in a forward; 0 if the
            method takes none.
        draft_lookup: default number of such guesses that the draft verifies in a forward. A request may set it for
            every method with a draft.
        branches: default number of outcomes other than the expected one that the draft prepares for; 0 if the method
            takes none.
        siblings: default number of the draft's runners-up that the target verifies in a forward; 0 if the method takes
            none.
        takes_stops: whether a stop policy may end the draft's windows. Method ssd takes none, because a policy does not
            see branches. Method pearl-no-post-verify takes none, because its windows, and so its texts under rule
            ratio, would depend on timing.
        takes_head: whether the target's head guesses too, if there is one.
        guesses: the `module:name` of the factory that makes the index of guesses; the factory is called with (tokens of
            the text, datastore, habits, head, prediction). Empty for this project's own, `fused_guesses.text_index`.
        needs: the setting of the engine without which the method is refused; empty if there is none.
        adapts: whether measured speed chooses the way of decoding (`pearl.protocol.method_choice`).
    """

    name: str
    description: str
    drafts: bool = True
    pre_verify: bool = True
    post_verify: bool = True
    look_ahead: int = 0
    draft_lookup: int = 0
    branches: int = 0
    siblings: int = 0
    takes_stops: bool = False
    takes_head: bool = False
    guesses: str = ""
    needs: str = ""
    adapts: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether the method is for general use: neither an ablation nor taken from another paper."""
        return self.pre_verify == self.post_verify and not self.guesses

    @property
    def bonus(self) -> bool:
        """Whether the target draws a bonus token after a fully accepted window: only if no draft token will come."""
        return not self.post_verify


_TABLES = toml.decode(Path(__file__).with_name("methods.toml").read_bytes())
METHODS = {name: Method(name, **table) for name, table in _TABLES.items()}
DRAFTLESS = tuple(name for name, method in METHODS.items() if not method.drafts)
# The settings of the paper's PEARL.
AS_PUBLISHED: dict[str, Any] = {
    "look_ahead": 0,
    "draft_lookup": 0,
    "branches": 0,
    "siblings": 0,
}


def methods_that(attribute: str) -> str:
    """Name the methods that have an attribute of `Method`: `methods_that("branches")` is "auto, ssd, pearl"."""
    return ", ".join(name for name, method in METHODS.items() if getattr(method, attribute))


def chosen(kind: str, name: str, registry: Mapping[str, _T]) -> _T:
    """Return the entry of this name. Raises ValueError if there is none; the message names all entries.

    Args:
        kind: the noun for an entry in the message, such as "stop policy".
    """
    if name not in registry:
        raise ValueError(f"unknown {kind} {name!r}; choose one of {', '.join(registry)}")
    return registry[name]
