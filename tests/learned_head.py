"""A tiny EAGLE-3 head that knows texts of its target by heart.

It is not trained: each of its outputs shall be a code of the next token, and the last matrix of its MLP, with far more
activations than there are outputs, is solved for.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pearl.models.forward.layers import tapped
from tests.eagle3 import HIDDEN, KNOWN, VOCAB, Reference, config_with, weights_of

_WIDTH = 1536  # activations
_GUESSES = 4  # of each position
_RIDGE = 1e-3
_DOWN = "layers.0.mlp.down_proj"


class LearnedText(NamedTuple):
    """A prompt, and the greedy answer of the target."""

    prompt: list[int]
    tokens: list[int]


class _Recorder(Reference):
    """Computes a head without its MLP, whose activations it keeps."""

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name != _DOWN:
            return super().product(x, name)
        self.activations = x
        return torch.zeros(HIDDEN)

    def cut(self, length: int) -> None:
        """Forget the keys and values of all positions from `length` on; the first is position 1."""
        for cached in (*self.keys, *self.values):
            del cached[length - 1 :]


@torch.inference_mode()
def write_learned_head(directory: Path, target: Path, prompts: list[list[int]]) -> Path:
    """Write a head of the target, with `texts.json`: the texts that it knows."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    texts = [LearnedText(prompt, _greedy(model, prompt)) for prompt in prompts]
    config = config_with({"draft_vocab_size": KNOWN}, {"intermediate_size": _WIDTH})
    weights = weights_of(config)
    random = torch.Generator().manual_seed(1)
    for name in ("gate", "up"):
        matrix = torch.randn(_WIDTH, HIDDEN, generator=random) * HIDDEN**-0.5
        weights[f"layers.0.mlp.{name}_proj.weight"] = matrix
    weights["embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
    codes = torch.randn(VOCAB, HIDDEN, generator=random)
    codes /= codes.square().mean(-1, keepdim=True).sqrt()
    samples = [_samples(model, config, weights, codes, text) for text in texts]
    activations = torch.cat([sample[0] for sample in samples]).double()
    missing = torch.cat([sample[1] for sample in samples]).double()
    products = activations.T @ activations + _RIDGE * torch.eye(_WIDTH)
    weights[f"{_DOWN}.weight"] = torch.linalg.solve(products, activations.T @ missing).T.float()
    weights |= _vocabulary(texts, codes)
    directory.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "texts.json").write_text(json.dumps(texts))
    return directory


def texts_of(head: Path) -> list[LearnedText]:
    return [LearnedText(*text) for text in json.loads((head / "texts.json").read_text())]


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(40):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _samples(
    model: Any,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    codes: torch.Tensor,
    text: LearnedText,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (activations, what they shall add) of each position's guesses.

    The first guess reads the target's state, the later ones the codes that the head will have put out.
    """
    ids = text.prompt + text.tokens
    states = model.base_model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    layers = tapped(model.config.num_hidden_layers)
    features = torch.cat([states[layer][0] for layer in layers], -1)
    recorder = _Recorder(config, weights)
    fused = recorder.product(features, "fc")
    activations = []
    missing = []
    for position in range(1, len(ids) - 1):
        for place in range(position, min(position + _GUESSES, len(ids) - 1)):
            state = fused[place - 1] if place == position else codes[ids[place]]
            output = recorder.read(ids[place], state, place, position)
            activations.append(recorder.activations)
            missing.append(codes[ids[place + 1]] - output)
        recorder.cut(position + 1)
    return torch.stack(activations), torch.stack(missing)


def _vocabulary(texts: list[LearnedText], codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the head's own tokens, the likeliest ones, and its output matrix."""
    counts = torch.zeros(VOCAB)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.tokens), minlength=VOCAB)
    ids = counts.topk(KNOWN).indices.sort().values
    return {
        "d2t": ids - torch.arange(KNOWN),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": codes[ids] / 2,
    }
