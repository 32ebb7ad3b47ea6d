"""Logits of block drafters by speculators' own classes: run by its interpreter, never by ours.

    python -P tests/speculators_logits.py HEADS OUT

HEADS is what `tests.block_heads.write_all` writes. OUT becomes a folder: checkpoints as speculators saves them, and
`logits`, a file of logits [levels, vocabulary] by the checkpoint's name, and of confidences, "NAME.confidence". It
prints the likeliest token of each level in JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def load(directory: Path, target: dict[str, torch.Tensor]) -> Any:
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(directory, config=config).eval()
    model.embed_tokens.weight.data = target["embedding"].clone()
    if not model.use_draft_vocab:
        model.lm_head.weight.data = target["output"].clone()
    model.verifier_lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
    return model


def predecessors(model: Any, block: torch.Tensor) -> torch.Tensor:
    """The token before the one that each row guesses."""
    if model.config.sample_from_anchor:
        return block
    return torch.cat([block[:1], block[:-1]])


def logits_of(
    directory: Path, target: dict[str, torch.Tensor], saved: Path
) -> tuple[torch.Tensor, torch.Tensor | None]:
    model = load(directory, target)
    model.save_pretrained(saved)
    anchor = int(target["anchor"])
    text = load_file(directory / "text")
    ids, states = text["ids"], text["states"]
    mask = torch.zeros(1, len(ids))
    mask[0, anchor] = 1
    hidden, logits, *_ = model._backbone_forward(
        states[None],
        ids[None],
        mask,
        torch.zeros(1, len(ids), model.hidden_size),
        torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=1,
    )
    size = model.block_size
    before = predecessors(model, ids[anchor : anchor + size])[None]
    confidence = None
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        features = hidden
        if model.config.confidence_head_with_markov:
            features = torch.cat([hidden, model.markov_head.prev_embeddings(before)], -1)
        confidence = model.confidence_head(features)[0].sigmoid()
    if hasattr(model, "candidate_selector"):
        candidates, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    first = 0 if model.config.sample_from_anchor else 1
    return logits[0, first:], None if confidence is None else confidence[first:]


@torch.inference_mode()
def main(heads: Path, out: Path) -> None:
    target = load_file(heads / "target")
    results = {}
    likeliest = {}
    for config in sorted(heads.glob("**/config.json")):
        name = str(config.parent.relative_to(heads))
        logits, confidence = logits_of(config.parent, target, out / name)
        results[name] = logits.contiguous()
        rows = [[int(row.argmax()), round(float(row.max()), 4)] for row in logits]
        confidences = []
        if confidence is not None:
            results[f"{name}.confidence"] = confidence.contiguous()
            confidences = [round(share, 4) for share in confidence.tolist()]
        likeliest[name] = {"likeliest": rows, "confidences": confidences}
    save_file(results, out / "logits")
    print(json.dumps(likeliest))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
