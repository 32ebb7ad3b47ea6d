"""The kinds of heads: which are read, and which are refused by name. Must not import torch: the front asks, too.

To add a kind, write its file beside `eagle3` with the functions of `HeadKind`, and name the file in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from pearl.models.families import Config

if TYPE_CHECKING:
    from pearl.models.forward.linear_layers import Rounding
    from pearl.models.heads.head import DraftHead, HeadTarget, Tensors


class HeadKind(Protocol):
    """The functions that a kind's file has.

    Both raise `ValueError` for what such a head may compute and PEARL does not.
    """

    def target_layers(self, config: Config) -> tuple[int, ...] | None:
        """Return the target's layers whose inputs the head of a config.json reads; None: those of `tapped`."""
        ...

    def make(
        self, config: Config, tensors: Tensors, target: HeadTarget, rounding: Rounding
    ) -> DraftHead:
        """Return the head of a checkpoint, whose tensors have their names there."""
        ...


class Kind(NamedTuple):
    """A kind of head.

    Attributes:
        title: its name in messages.
        module: the file that reads it; "": it is not read yet.
        architecture: its class in SpecForge; "": SpecForge has none, or does not name it.
    """

    title: str
    module: str = ""
    architecture: str = ""


_TYPE = "speculators_model_type"
KINDS = {  # by the names that vLLM's speculators gives them
    "eagle3": Kind("an EAGLE-3 head", "pearl.models.heads.eagle3"),
    "dflash": Kind("a block drafter (DFlash)", architecture="DFlashDraftModel"),
    "dflash2": Kind("a block drafter (DFlash 2)"),
    "domino": Kind("a block drafter (Domino)", architecture="DominoDraftModel"),
    "dspark": Kind("a block drafter (DSpark)", architecture="DSparkDraftModel"),
    "mtp": Kind("a layer for multi-token prediction in a checkpoint of its own"),
    "peagle": Kind("a head that drafts in parallel (P-EAGLE)", architecture="PEagleDraftModel"),
    "xpress": Kind("a block drafter (XPress)"),
}
_NEXT = "such heads are not read yet; name an EAGLE-3 head"


def describes_head(config: Config) -> bool:
    """Return whether a config.json is that of a head, and not of a model."""
    return "draft_vocab_size" in config or bool(_name_of(config))


def kind_of(config: Config) -> HeadKind:
    """Return the kind of head that a config.json describes. Raises `ValueError` for others."""
    name = _name_of(config) or "eagle3"
    stated = f", {_TYPE} {name!r}" if _TYPE in config else ""
    if name not in KINDS:
        raise ValueError(f"its {_TYPE} {name!r} is none that is known: {_NEXT}")
    kind = KINDS[name]
    if not kind.module:
        raise ValueError(f"it is {kind.title}{stated}: {_NEXT}")
    return cast(HeadKind, import_module(kind.module))


def _name_of(config: Config) -> str:
    """Return the name of a kind, by SpecForge's class where a config.json states none; "" where neither does."""
    if _TYPE in config:
        return str(config[_TYPE])
    architectures = config.get("architectures") or ()
    for name, kind in KINDS.items():
        if kind.architecture in architectures:
            return name
    return ""
