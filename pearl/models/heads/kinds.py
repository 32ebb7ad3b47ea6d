"""The kinds of heads that are read, and those that are refused by name.

To add a kind, write its file beside `eagle3` and give it a line in `KINDS`.
"""

from __future__ import annotations

from typing import Protocol

from pearl.models.families import Config
from pearl.models.forward.linear_layers import Rounding
from pearl.models.heads import eagle3
from pearl.models.heads.eagle3 import Eagle3Head
from pearl.models.heads.head import HeadTarget, Tensors


class HeadKind(Protocol):
    """The functions that a kind's file has.

    Both raise `ValueError` for what such a head may compute and PEARL does not.
    """

    def target_layers(self, config: Config) -> tuple[int, ...] | None:
        """Return the target's layers whose inputs the head of a config.json reads; None: those of `tapped`."""
        ...

    def make(
        self, config: Config, tensors: Tensors, target: HeadTarget, rounding: Rounding
    ) -> Eagle3Head:
        """Return the head of a checkpoint, whose tensors have their names there."""
        ...


_TYPE = "speculators_model_type"
KINDS: dict[str, HeadKind] = {"eagle3": eagle3}  # by the names that vLLM's speculators gives them
_NEXT = "such heads are not read yet; name an EAGLE-3 head"
_NOT_BUILT = {
    "dflash": "a block drafter (DFlash)",
    "dflash2": "a block drafter (DFlash 2)",
    "dspark": "a block drafter (DSpark)",
    "mtp": "a layer for multi-token prediction in a checkpoint of its own",
    "peagle": "a head that drafts in parallel (P-EAGLE)",
    "xpress": "a block drafter (XPress)",
}
_CLASSES_NOT_BUILT = {  # of SpecForge
    "DFlashDraftModel": _NOT_BUILT["dflash"],
    "DSparkDraftModel": _NOT_BUILT["dspark"],
    "DominoDraftModel": "a block drafter (Domino)",
    "PEagleDraftModel": _NOT_BUILT["peagle"],
}


def kind_of(config: Config) -> HeadKind:
    """Return the kind of head that a config.json describes. Raises `ValueError` for others."""
    name = config.get(_TYPE)
    if name is None:
        for architecture in config.get("architectures") or ():
            if architecture in _CLASSES_NOT_BUILT:
                raise ValueError(f"it is {_CLASSES_NOT_BUILT[architecture]}: {_NEXT}")
        return KINDS["eagle3"]
    if name in _NOT_BUILT:
        raise ValueError(f"it is {_NOT_BUILT[name]}, {_TYPE} {name!r}: {_NEXT}")
    if name not in KINDS:
        raise ValueError(f"its {_TYPE} {name!r} is none that is known: {_NEXT}")
    return KINDS[name]
