"""The kinds of heads: those that are read, and those that are refused by name.

Must not import torch, because the front uses this module, too.

To add a kind, write its file beside `eagle3` with the functions of `HeadKind`, and name the file in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from pearl.models.families import Config

if TYPE_CHECKING:
    from pearl.models.forward.linear_layers import Rounding
    from pearl.models.heads.head import Head, HeadTarget, Tensors


class HeadKind(Protocol):
    """The functions that the file of a kind has.

    Both raise `ValueError` for a head of this kind that PEARL cannot compute.
    """

    def target_layers(self, config: Config) -> tuple[int, ...] | None:
        """Return the target's layers whose inputs a head reads; None: those of `forward.layers.tapped`.

        Args:
            config: the head's config.json.
        """
        ...

    def make(
        self, config: Config, tensors: Tensors, target: HeadTarget, rounding: Rounding
    ) -> Head:
        """Return the head of a checkpoint. `tensors` are by their names in the checkpoint."""
        ...


class Kind(NamedTuple):
    """A kind of head.

    Attributes:
        title: the kind's name in messages.
        module: the module that reads such heads; "": they are not read yet.
        architecture: the class of such heads in SpecForge; "": it has none, or its files do not name it.
    """

    title: str
    module: str = ""
    architecture: str = ""


_TYPE = "speculators_model_type"
KINDS = {  # by the names that vLLM's speculators gives them
    "eagle3": Kind("an EAGLE-3 head", "pearl.models.heads.eagle3"),
    "dflash": Kind(
        "a block drafter (DFlash)", "pearl.models.heads.dflash", architecture="DFlashDraftModel"
    ),
    "dflash2": Kind("a block drafter (DFlash 2)", "pearl.models.heads.dflash2"),
    "domino": Kind("a block drafter (Domino)", architecture="DominoDraftModel"),
    "dspark": Kind(
        "a block drafter (DSpark)", "pearl.models.heads.dspark", architecture="DSparkDraftModel"
    ),
    "mtp": Kind("a layer for multi-token prediction", "pearl.models.heads.mtp_layer"),
    "peagle": Kind(
        "a head that drafts in parallel (P-EAGLE)",
        "pearl.models.heads.peagle",
        architecture="PEagleDraftModel",
    ),
    "xpress": Kind("a block drafter (XPress)", "pearl.models.heads.xpress"),
}
_NEXT = "such heads are not read yet; name a head of another kind"


def describes_head(config: Config) -> bool:
    """Return whether a config.json describes a head, and not a model."""
    return "draft_vocab_size" in config or bool(_name_of(config))


def kind_of(config: Config) -> HeadKind:
    """Return the kind of head that a config.json describes. Raises `ValueError` if it is unknown, or not read yet."""
    name = _name_of(config) or "eagle3"
    stated = f", {_TYPE} {name!r}" if _TYPE in config else ""
    if name not in KINDS:
        raise ValueError(f"its {_TYPE} {name!r} is none that is known: {_NEXT}")
    kind = KINDS[name]
    if not kind.module:
        raise ValueError(f"it is {kind.title}{stated}: {_NEXT}")
    return cast(HeadKind, import_module(kind.module))


def title_of(config: Config) -> str:
    """Return the name, in messages, of the kind of head that a config.json describes."""
    return KINDS[_name_of(config) or "eagle3"].title


def layers_of(config: Config) -> Config:
    """Return the settings of a head's decoder layers, in the form of a model's config.json."""
    settings = config.get("transformer_layer_config")
    if not isinstance(settings, dict):
        return config
    if _name_of(config) == "mtp":  # whose settings are its target's
        return {**settings, "num_hidden_layers": 1}
    return settings


def _name_of(config: Config) -> str:
    """Return the kind that a config.json names, as speculators does or by SpecForge's class; "" if it names none."""
    if _TYPE in config:
        return str(config[_TYPE])
    architectures = config.get("architectures") or ()
    for name, kind in KINDS.items():
        if kind.architecture in architectures:
            return name
    return ""
