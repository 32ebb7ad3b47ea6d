"""All decoding methods, declared in methods.toml.

Configuration, protocol, message checks, help and the README's table read the declarations from
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import toml

# Most tokens of a measured window, and of any window if several requests share forwards: they wait
# for each other.
MAX_WINDOW = 64
MAX_GAMMA = 1024  # most tokens of a fixed window
MAX_LOOK_AHEAD = 256  # most guesses in one forward
MAX_BRANCHES = 64  # most branches of one request that the target keeps
BRANCHES = 8  # most outcomes that a draft prepares for, each in a slot of its own
WINDOWS = ("stream", "fixed")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Method:
    """A decoding method: which of PEARL's overlaps it has, and what the target verifies with it.

    A guess is a token that comes from n-grams, a datastore or a head instead of the draft model. A
    runner-up is a token that the draft model found likely but did not draw. A branch is what the
    draft prepares for another outcome than the one that it expects.

    Attributes:
        description: one line for help.
        drafts: whether a draft takes part.
        pre_verify: whether the target judges a window's first token while the window is being
            drafted.
        post_verify: whether the draft drafts on while the target verifies.
        look_ahead: by default the target verifies at most this many guesses in a forward; 0 if the
            method takes none.
        draft_lookup: by default the draft verifies at most this many guesses in a forward. A
            request may set this for every method with a draft.
        branches: by default the draft prepares at most this many branches; 0 if the method takes
            none.
        siblings: by default the target verifies at most this many runners-up in a forward; 0 if the
            method takes none.
        takes_stops: whether a stop policy may end the draft's windows early. Method ssd takes none,
            because a policy does not see branches. Method pearl-no-post-verify takes none either:
            with a stop policy its windows, and so its texts under rule ratio, would depend on
            timing.
        takes_head: whether the target's drafting head (such as EAGLE-3), if there is one, guesses
            too.
        guesses: `module:name` of the factory of the index of guesses. It is called with (tokens of
            the text, datastore, habits, head, prediction). Empty for the default,
            `fused_guesses.text_index`.
        needs: name of the engine setting without which the method is refused; empty if it needs
            none.
        adapts: whether the method decodes with other methods, and chooses among them by measured
            speed (`pearl.protocol.method_choice`).
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
        """Whether the target draws a bonus token after a fully accepted window.

        With post-verify it does not, because the draft sends a token for that position too.
        """
        return not self.post_verify


_TABLES = toml.decode(Path(__file__).with_name("methods.toml").read_bytes())
METHODS = {name: Method(name, **table) for name, table in _TABLES.items()}
DRAFTLESS = tuple(name for name, method in METHODS.items() if not method.drafts)
# The settings with which method pearl is PEARL as the paper publishes it.
AS_PUBLISHED: dict[str, Any] = {
    "look_ahead": 0,
    "draft_lookup": 0,
    "branches": 0,
    "siblings": 0,
}


def methods_that(attribute: str) -> str:
    """Return the names of the methods for which an attribute of `Method` is true.

    For example, `methods_that("branches")` is "auto, ssd, pearl".
    """
    return ", ".join(name for name, method in METHODS.items() if getattr(method, attribute))


def chosen(kind: str, name: str, registry: Mapping[str, _T]) -> _T:
    """Return the entry of `registry` with this name.

    Raises ValueError if there is none; the message lists all names.

    Args:
        kind: what the message calls an entry, such as "stop policy".
    """
    if name not in registry:
        raise ValueError(f"unknown {kind} {name!r}; choose one of {', '.join(registry)}")
    return registry[name]
