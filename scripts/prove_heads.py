"""The step of `prove_gpu.py` about heads: a line for each kind but EAGLE-3, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_forward import seconds
from prove_bits import Measurement, Scale, tokens_of
from torch.nn.functional import linear

from pearl.models.families import Config, Shapes
from pearl.models.heads import mtp_layer
from pearl.models.heads.dflash import BlockSettings
from pearl.models.heads.dflash2 import DFlash2Settings
from pearl.models.heads.dspark import DSparkSettings
from pearl.models.heads.eagle3 import HeadSettings
from pearl.models.heads.head import Block, Head, HeadTarget
from pearl.models.heads.kinds import kind_of
from pearl.models.heads.xpress import refiner_shapes
from pearl.models.runner import feed_chain

_READ = 64  # tokens of the text
_TAPS = (0, 1)
_LEAST_AGREEMENT = 0.99  # correlation of logits with those in float32


class Drafter(NamedTuple):
    """A kind of head: its settings in config.json, and the shapes of its tensors.

    `shapes(config, target)` returns these shapes.
    """

    settings: Config
    shapes: Callable[[Config, HeadTarget], Shapes]


def _of_dflash(config: Config, target: HeadTarget) -> Shapes:
    return BlockSettings.of(config).shapes(target.features)


def _of_dspark(config: Config, target: HeadTarget) -> Shapes:
    further = DSparkSettings.of(config).shapes(_hidden(target), target, target.vocab_size)
    return _of_dflash(config, target) | further


def _of_dflash2(config: Config, target: HeadTarget) -> Shapes:
    hidden = _hidden(target)
    further = DFlash2Settings.of(config, hidden).shapes(1, hidden, target.vocab_size)
    return _of_dflash(config, target) | further


def _of_xpress(config: Config, target: HeadTarget) -> Shapes:
    further = refiner_shapes(config, _hidden(target), target.vocab_size, target.vocab_size)
    return _of_dflash(config, target) | further


def _of_peagle(config: Config, target: HeadTarget) -> Shapes:
    shapes = HeadSettings.of(config, ()).shapes(target.features, target.vocab_size)
    return shapes | {"mask_hidden": (1, 1, target.features)}


def _of_mtp(config: Config, target: HeadTarget) -> Shapes:
    return mtp_layer.shapes_of(*mtp_layer.layer_of(config))


def _hidden(target: HeadTarget) -> int:
    return target.embedding.shape[1]


_CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
_SELECTOR = {"selector_rank": 64, "selector_top_k": 16}
DRAFTERS = {
    "dflash": Drafter({}, _of_dflash),
    "dspark": Drafter({"markov_rank": 64, "sample_from_anchor": True}, _of_dspark),
    "dflash2": Drafter(_CONVOLUTIONS | _SELECTOR, _of_dflash2),
    "xpress": Drafter({"xpress_rank": 64}, _of_xpress),
    "peagle": Drafter({}, _of_peagle),
    "mtp": Drafter({}, _of_mtp),
}


class Seen(Block):
    """Keeps the logits of the levels, whose tokens are all token 0."""

    def __init__(self, head: Head) -> None:
        super().__init__(head.ids, lambda logits, position: 0, _READ, head.deepest)
        self.logits: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, confidence: float | None = None) -> int:
        self.logits.append(logits.cpu())
        return super().add(logits, confidence)


def heads(scale: Scale) -> Iterator[Measurement]:
    """Compare each kind's logits with those in float32 on a CPU, and time a proposal."""
    runner = scale.runner(scale.wide, 512, taps=_TAPS)
    tokens = tokens_of(runner, _READ + 1)
    feed_chain(runner, tokens, 1, prompt=True)
    target = HeadTarget(
        embedding=runner.embedding.to(scale.dtype),
        vocab_size=runner.vocab_size,
        features=runner.capabilities.features,
        context=512,
        slots=1,
        output=partial(_output_of, runner.embedding.to(scale.dtype)),
    )
    features = runner.features()
    for name, drafter in DRAFTERS.items():
        if name == "mtp":  # it reads the states of one layer
            features = features[:, : _hidden(target)]
            target = target._replace(features=_hidden(target))
        yield _measured(scale, name, drafter, target, torch.tensor(tokens), features)


def _measured(
    scale: Scale,
    name: str,
    drafter: Drafter,
    target: HeadTarget,
    tokens: torch.Tensor,
    features: torch.Tensor,
) -> Measurement:
    config = _config(name, drafter, target)
    weights = _random(drafter.shapes(config, target))
    head = kind_of(config).make(config, weights, target, "")
    assert isinstance(target.embedding, torch.Tensor)
    embedding = target.embedding.float().cpu()
    wide_target = target._replace(embedding=embedding, output=partial(_output_of, embedding))
    wide_head = kind_of(config).make(config, weights, wide_target, "")
    with torch.inference_mode():
        logits = _logits(head, tokens, features)
        wide_logits = _logits(wide_head, tokens, features.float().cpu())
        times = []
        for _ in range(scale.repeats):
            times.append(seconds(partial(_propose, head), scale.device))
    are_known = logits.isfinite() & wide_logits.isfinite()
    pairs = torch.stack((logits[are_known], wide_logits[are_known]))
    agreement = float(torch.corrcoef(pairs)[0, 1])
    must = f"above {_LEAST_AGREEMENT}"
    detail = f"a proposal in {median(times) * 1e3:.2f} ms"
    what = f"{name}: correlation with float32"
    return Measurement(what, agreement, "", must, agreement > _LEAST_AGREEMENT, detail, name)


def _logits(head: Head, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Return the logits of a proposal after `tokens`, [levels, vocab]."""
    head.extend(tokens[1:].to(head.device), features[:_READ], 0)
    block = Seen(head)
    head.propose(block, 0)
    return torch.stack(block.logits)


def _propose(head: Head) -> None:
    head.propose(Block(head.ids, lambda logits, _: int(logits.argmax()), _READ, head.deepest), 0)


def _output_of(embedding: torch.Tensor) -> Any:
    return partial(linear, weight=embedding)


def _config(name: str, drafter: Drafter, target: HeadTarget) -> dict[str, Any]:
    hidden = target.embedding.shape[1]
    count = max(1, hidden // 128)
    layer = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": count,
        "num_key_value_heads": count,
        "head_dim": hidden // count,
    }
    return {
        "speculators_model_type": name,
        "aux_hidden_state_layer_ids": list(_TAPS),
        "block_size": 8,
        "mask_token_id": 0,
        "transformer_layer_config": layer,
        **drafter.settings,
    }


def _random(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        if "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=random) * shape[-1] ** -0.5
    return weights
