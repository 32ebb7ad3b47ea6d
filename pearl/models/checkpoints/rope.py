"""Rotary position embedding (rope): its cosines and sines, bit for bit those of transformers."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from pearl.models.families import ROPES, Config


class Frequencies(NamedTuple):
    """The frequencies of a rope.

    Attributes:
        angles: [rotated / 2], the angle by which each pair of numbers turns from one position to the next.
        scale: multiplier of cosines and sines; it is 1 except for scalings such as yarn.
    """

    angles: torch.Tensor
    scale: float


class RotaryEmbedding(nn.Module):
    """Computes cosines and sines of positions.

    Args:
        frequencies: the frequencies of each kind of layer, by the kind's name; the only name is ""
            if all layers have the same rope. They are not registered as buffers, so that they stay
            float32 on the CPU.
    """

    def __init__(self, frequencies: Mapping[str, Frequencies]) -> None:
        super().__init__()
        self._frequencies = frequencies

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor, kind: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) of positions [1, n], each [1, n, head_dim].

        They have the dtype and the device of `like`.
        """
        frequencies, scale = self._frequencies[kind]
        angles = positions[..., None].float() * frequencies.to(like.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(like.dtype), (angles.sin() * scale).to(like.dtype)


def parameters_of_rope(config: Config) -> dict[str, Any] | None:
    """Return the `rope_parameters` of a config.json.

    In the notation before transformers 5, they are made from `rope_theta` and `rope_scaling`.
    Return None if the file has both `rope_parameters` and `rope_scaling`.
    """
    rope = config.get("rope_parameters")
    scaling = config.get("rope_scaling")
    if rope and scaling:
        return None
    if rope is None:
        scaling = scaling or {}
        rope = {"rope_theta": config.get("rope_theta"), **scaling}  # a scaling's base has priority
        rope["rope_type"] = scaling.get("rope_type", scaling.get("type", "default"))
    return dict(rope)


def rope_of(config: Config) -> RotaryEmbedding | None:
    """Return the rope of a configuration; None if such a rope is not computed.

    Args:
        config: as in config.json, with `rope_parameters` and `head_dim`.
    """
    ropes = config["rope_parameters"]
    if "rope_type" in ropes:
        ropes = {"": ropes}
    try:
        return RotaryEmbedding({kind: frequencies(rope, config) for kind, rope in ropes.items()})
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def frequencies(rope: Mapping[str, Any], config: Config) -> Frequencies:
    """Return the frequencies of one rope.

    Without scaling they are theta ** (-2 i / dim) for i < dim / 2. For a longrope, the result holds
    for texts up to the length at which the frequencies change. Raises `KeyError` or another error
    if `rope` lacks a setting.
    """
    kind = rope["rope_type"]
    if kind == "default":
        dim = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return Frequencies(1.0 / (rope["rope_theta"] ** exponents), 1.0)
    if kind not in ROPES:
        raise ValueError(kind)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes half a second

    settings: Any = SimpleNamespace(**config)
    settings.rope_parameters = rope
    settings.standardize_rope_params = lambda: None
    angles, scale = ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))
    return Frequencies(angles, scale)
