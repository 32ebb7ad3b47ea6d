"""The kinds of heads: those that are read, and those that are refused by name.

This module must not import torch, because the user's process, which holds no model, uses it too.

To add a kind, write a module beside `eagle3` with the functions of `HeadKind`, and name the module
in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from pearl.models.families import Config

if TYPE_CHECKING:
    from pearl.models.forward.linear_layers import Rounding
    from pearl.models.heads.head import Head, HeadTarget, Tensors


class HeadKind(Protocol):
    """The functions that the module of each kind defines.

    Both raise `ValueError` for a head of this kind that PEARL cannot compute.
    """

    def target_layers(self, config: Config) -> tuple[int, ...] | None:
        """Return the target's layers whose inputs a head reads.

        Return None if `config` does not name them: the head then reads three layers that
        `forward.layers.tapped` chooses.

        Args:
            config: the head's config.json.
        """
        ...

    def make(
        self, config: Config, tensors: Tensors, target: HeadTarget, rounding: Rounding
    ) -> Head:
        """Return the head of a checkpoint.

        Args:
            config: the head's config.json.
            tensors: the checkpoint's tensors by name.
            rounding: how matrices are rounded; see `linear_layers.matrix`.
        """
        ...


class Kind(NamedTuple):
    """A kind of head.

    Attributes:
        title: the kind's name in messages.
        module: the module that reads such heads; "": they are not read yet.
        architecture: SpecForge's class for such heads, which `architectures` of config.json names;
            "" if SpecForge has no such class, or does not write its name.
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
    """Return the kind of head that a config.json describes.

    Raises `ValueError` if the kind is unknown, or not read yet.
    """
    name = _name_of(config) or "eagle3"
    stated = f", {_TYPE} {name!r}" if _TYPE in config else ""
    if name not in KINDS:
        raise ValueError(f"its {_TYPE} {name!r} is none that is known: {_NEXT}")
    kind = KINDS[name]
    if not kind.module:
        raise ValueError(f"it is {kind.title}{stated}: {_NEXT}")
    return cast(HeadKind, import_module(kind.module))


def title_of(config: Config) -> str:
    """Return how messages name the kind of head that a config.json describes."""
    return KINDS[_name_of(config) or "eagle3"].title


def layers_of(config: Config) -> Config:
    """Return the settings of a head's decoder layers, in the form of a model's config.json."""
    settings = config.get("transformer_layer_config")
    if not isinstance(settings, dict):
        return config
    if _name_of(config) == "mtp":  # these settings describe the target, with all its layers
        return {**settings, "num_hidden_layers": 1}
    return settings


def _name_of(config: Config) -> str:
    """Return the key in `KINDS` of the kind that a config.json names; "" if it names none.

    speculators writes the key itself; SpecForge writes the name of a class.
    """
    if _TYPE in config:
        return str(config[_TYPE])
    architectures = config.get("architectures") or ()
    for name, kind in KINDS.items():
        if kind.architecture in architectures:
            return name
    return ""
