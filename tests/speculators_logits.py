"""Computes logits of heads with speculators' own classes.

speculators' own Python interpreter runs this file, never ours:

    python -P tests/speculators_logits.py HEADS OUT

HEADS is a directory that `tests.block_heads.write_all` has written. OUT becomes a directory of
checkpoints as speculators saves them, and a file `logits`. This has the logits [levels, vocabulary]
by the checkpoint's name, and confidences as "NAME.confidence". The program prints the likeliest
token of each level as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import DynamicCache

DEEPEST = 8  # rows of a head that guesses token by token


def load(directory: Path, target: dict[str, torch.Tensor]) -> Any:
    config = SpeculatorModelConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    # There is no target to read: its embedding and output matrix are given here.
    SpeculatorModel.registered_model_class_from_config(config).load_verifier_weights = lambda _: (
        None
    )
    model = SpeculatorModel.from_pretrained(directory, config=config).eval()
    model.verifier_lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
    if config.speculators_model_type == "peagle":  # embedding and output matrix are its own
        return model
    model.embed_tokens.weight.data = target["embedding"].clone()
    if not model.use_draft_vocab:
        model.lm_head.weight.data = target["output"].clone()
    return model


def predecessors(model: Any, block: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the token before the one that the row predicts."""
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
    kind = model.config.speculators_model_type
    if kind in LOGITS_OF:
        return LOGITS_OF[kind](model, ids, states, anchor), None
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
    if kind == "xpress":
        if not model.config.sample_from_anchor:
            before = ids[None, anchor - 1 : anchor + size - 1]
        # `from_pretrained` leaves this buffer, which is in no file, uninitialised.
        model.refiner_head.causal_tril = torch.ones(size, size).tril()
        bias = model.refiner_head.block_bias(before, hidden_states=hidden.view(1, size, -1))
        logits = logits + bias
    if hasattr(model, "candidate_selector"):
        candidates, scores = model.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
    first = 0 if model.config.sample_from_anchor else 1
    return logits[0, first:], None if confidence is None else confidence[first:]


def peagle_logits(model: Any, ids: torch.Tensor, states: torch.Tensor, anchor: int) -> torch.Tensor:
    """Return the logits for the text's last token and for the mask tokens after it.

    They come from a training step of speculators in which the sampling of positions is replaced.
    """
    core = sys.modules["speculators.models.peagle.core"]
    size = model.config.speculators_config.proposal_methods[0].speculative_tokens
    rows: dict[str, torch.Tensor] = {}
    anchors = torch.cat([torch.arange(anchor), torch.full((size - 1,), anchor - 1)])
    depths = torch.cat([torch.zeros(anchor, dtype=torch.long), torch.arange(1, size)])
    core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    core.compute_metrics = lambda logits, **_: (rows.update(logits=logits), None)
    count = anchor + size
    model(
        hidden_states=states[None, :count],
        input_ids=ids[None, 1 : count + 1],
        document_ids=torch.zeros(1, count, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, count, model.hidden_size),
    )
    return rows["logits"][0, anchor - 1 :]


def mtp_logits(model: Any, ids: torch.Tensor, states: torch.Tensor, anchor: int) -> torch.Tensor:
    """Return the layer's logits for the text's last token and for the tokens after it.

    After the text, the layer reads its own outputs. All forwards share one cache. The first logits
    are checked against those of the model's own forward.
    """
    cache = DynamicCache()
    tokens, before, rows = ids[1 : anchor + 1], states[:anchor], []
    for depth in range(DEEPEST):
        start = cache.get_seq_length()
        count = len(tokens)
        positions = torch.arange(start, start + count)[None]
        hidden = model.mtp_layers[0](
            hidden_states=before[None],
            token_embeddings=model.embed_tokens(tokens)[None],
            attention_mask=torch.full((count, start + count), -torch.inf).triu(start + 1)[
                None, None
            ],
            position_embeddings=model.rotary_emb(before[None], positions),
            past_key_values=cache,
        )
        before = hidden[0, -1:]
        rows.append(model.lm_head(before))
        tokens = ids[anchor + depth + 1 : anchor + depth + 2]
    first = model(input_ids=ids[None], hidden_states=states[None])[0][0][0, anchor - 1]
    torch.testing.assert_close(rows[0][0], first)
    return torch.cat(rows)


LOGITS_OF = {"peagle": peagle_logits, "mtp": mtp_logits}


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
