"""The step of `prove_gpu.py` about block drafters: a line for each kind, with random weights."""

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
from pearl.models.heads.dflash import BlockSettings, DFlashHead
from pearl.models.heads.dflash2 import DFlash2Settings
from pearl.models.heads.dspark import DSparkSettings
from pearl.models.heads.head import Block, HeadTarget
from pearl.models.heads.kinds import kind_of
from pearl.models.runner import feed_chain

_READ = 64  # tokens of the text
_TAPS = (0, 1)
_LEAST_AGREEMENT = 0.99  # correlation of logits with those in float32


class Drafter(NamedTuple):
    """A kind of block drafter: its settings in config.json, and the tensors that it has beside DFlash's.

    `shapes(config, target)` returns the shapes of these tensors.
    """

    settings: Config
    shapes: Callable[[Config, HeadTarget], Shapes]


def _none(config: Config, target: HeadTarget) -> Shapes:
    return {}


def _of_dspark(config: Config, target: HeadTarget) -> Shapes:
    hidden = target.embedding.shape[1]
    return DSparkSettings.of(config).shapes(hidden, target, target.vocab_size)


def _of_dflash2(config: Config, target: HeadTarget) -> Shapes:
    hidden = target.embedding.shape[1]
    return DFlash2Settings.of(config, hidden).shapes(1, hidden, target.vocab_size)


_CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
_SELECTOR = {"selector_rank": 64, "selector_top_k": 16}
DRAFTERS = {
    "dflash": Drafter({}, _none),
    "dspark": Drafter({"markov_rank": 64, "sample_from_anchor": True}, _of_dspark),
    "dflash2": Drafter(_CONVOLUTIONS | _SELECTOR, _of_dflash2),
}


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
    for name, drafter in DRAFTERS.items():
        yield _measured(scale, name, drafter, target, torch.tensor(tokens), runner.features())


def _measured(
    scale: Scale,
    name: str,
    drafter: Drafter,
    target: HeadTarget,
    tokens: torch.Tensor,
    features: torch.Tensor,
) -> Measurement:
    config = _config(name, drafter, target)
    shapes = BlockSettings.of(config).shapes(target.features)
    shapes |= drafter.shapes(config, target)
    weights = _random(shapes)
    head = kind_of(config).make(config, weights, target, "")
    embedding = target.embedding.float().cpu()
    wide_target = target._replace(embedding=embedding, output=partial(_output_of, embedding))
    wide_head = kind_of(config).make(config, weights, wide_target, "")
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        for each, states in ((head, features), (wide_head, features.float().cpu())):
            assert isinstance(each, DFlashHead)
            each.extend(tokens[1:].to(each.device), states[:_READ], 0)
            logits.append(each.logits(each.block_states(int(tokens[-1]), 0)).cpu())
        times = []
        for _ in range(scale.repeats):
            times.append(seconds(partial(_propose, head), scale.device))
    agreement = float(torch.corrcoef(torch.stack([part.flatten() for part in logits]))[0, 1])
    must = f"above {_LEAST_AGREEMENT}"
    detail = f"a proposal in {median(times) * 1e3:.2f} ms"
    what = f"{name}: correlation with float32"
    return Measurement(what, agreement, "", must, agreement > _LEAST_AGREEMENT, detail, name)


def _propose(head: Any) -> None:
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
