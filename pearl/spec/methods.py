"""Every decoding method, declared once. Configuration, protocol, wire, help and the README's table read from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

MAX_WINDOW = 64  # tokens of a measured window, and of any window where requests share forwards and wait for each other
MAX_GAMMA = 1024  # tokens of a fixed window
MAX_LOOK_AHEAD = 256  # guesses in one forward
MAX_BRANCHES = 64  # branches of one request that the target keeps until their outcome is decided
BRANCHES = 8  # default and most outcomes that a draft prepares for, each in a slot of its cache
LOOK_AHEAD = 16  # default guesses in one forward of the target
DRAFT_LOOKUP = 8  # default guesses in one forward of the draft
SIBLINGS = 16  # default runners-up of the draft in one forward of the target
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


_GUESSES: dict[str, Any] = {
    "look_ahead": LOOK_AHEAD,
    "draft_lookup": DRAFT_LOOKUP,
    "branches": BRANCHES,
    "siblings": SIBLINGS,
}
_ALONE: dict[str, Any] = {"drafts": False, "pre_verify": False, "post_verify": False}
_IN_TURN: dict[str, Any] = {"pre_verify": False, "post_verify": False}

_METHODS = (
    Method(
        "auto",
        "the fastest of the ways below, by measured speed",
        **_GUESSES,
        takes_stops=True,
        takes_head=True,
        adapts=True,
    ),
    Method("ar", "the target alone", **_ALONE),
    Method(
        "ngram",
        "the target alone, verifying n-grams of the text so far",
        **_ALONE,
        look_ahead=LOOK_AHEAD,
    ),
    Method(
        "head",
        "the target alone, verifying what its head and n-grams guess",
        **_ALONE,
        look_ahead=LOOK_AHEAD,
        takes_head=True,
        needs="head",
    ),
    Method("sd", "draft and target in turn", **_IN_TURN, takes_stops=True),
    Method(
        "ssd",
        "sd whose draft prepares meanwhile for other outcomes",
        **_IN_TURN,
        branches=BRANCHES,
    ),
    Method("pearl", "draft and target at once", **_GUESSES, takes_stops=True, takes_head=True),
    Method(
        "pearl-no-pre-verify",
        "ablation: the target idles while the first window is drafted",
        pre_verify=False,
        takes_stops=True,
    ),
    Method(
        "pearl-no-post-verify",
        "ablation: the draft idles while the target verifies",
        post_verify=False,
    ),
    Method(
        "lookahead",
        "the target alone, guessing from its own Jacobi iterations (Lookahead decoding)",
        **_ALONE,
        look_ahead=LOOK_AHEAD,
        guesses="pearl.lab.guesses.phrases:JacobiIndex",
    ),
    Method(
        "ouroboros",
        "sd whose windows are lengthened by phrases, among them discarded ones (Ouroboros)",
        **_IN_TURN,
        look_ahead=LOOK_AHEAD,
        draft_lookup=DRAFT_LOOKUP,
        guesses="pearl.lab.guesses.phrases:PhraseIndex",
    ),
    Method(
        "pld",
        "ngram as Prompt Lookup Decoding has it",
        **_ALONE,
        look_ahead=10,
        guesses="pearl.lab.guesses.published:pld",
    ),
    Method(
        "llma",
        "ngram as LLMA has it: copies from the prompt alone",
        **_ALONE,
        look_ahead=19,
        guesses="pearl.lab.guesses.published:llma",
    ),
    Method(
        "pia",
        "ngram as PIA has it, with --habits",
        **_ALONE,
        look_ahead=30,
        guesses="pearl.lab.guesses.published:pia",
        needs="habits",
    ),
    Method(
        "rest",
        "ngram as REST has it: guesses from --datastore alone",
        **_ALONE,
        look_ahead=64,
        guesses="pearl.lab.guesses.published:rest",
        needs="datastore",
    ),
    Method(
        "sssd",
        "ngram with the counts and damping that SSSD prints",
        **_ALONE,
        look_ahead=30,
        guesses="pearl.lab.guesses.published:sssd",
    ),
)
METHODS = {method.name: method for method in _METHODS}
DRAFTLESS = tuple(name for name, method in METHODS.items() if not method.drafts)
AS_PUBLISHED: dict[str, Any] = dict.fromkeys(_GUESSES, 0)  # the settings of the paper's PEARL


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
