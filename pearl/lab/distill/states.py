"""Writes answers and the target's hidden states to disk, to train block drafters on them.

The format is that of speculators, vLLM's library for training drafters. The directory holds a
dataset of Arrow files with `input_ids`, `loss_mask` and `seq_len`, one row for each answer with its
prompt. Beside it lie:

    hidden_states/hs_N.safetensors   of row N: token_ids [n] and hidden_states [n, layers + 1, hidden]
    token_freq.pt                    how often each token occurs in answers: {id: count}
    verifier/                        config.json, embedding, last norm and output head of the target

The states of a token are the inputs of the chosen layers and the output of the last layer. This
output is stored as it is *before* the target's last norm, because the trainer applies that norm
itself.

Source: speculators 0.9.0, `train/data.py` and `train/vocab_mapping.py`; hs-connectors 0.9.0,
`transfer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pearl.cache import Watcher
from pearl.lab.distill.answers import RecordedAnswer
from pearl.lab.distill.learning import packed
from pearl.lab.distill.pair import Teacher, decoder_layers, embeddings, head

VERIFIER = "verifier"
_BATCH_TOKENS = 4096  # tokens in a forward, padding included


def write_states(
    teacher: Teacher,
    answers: Sequence[RecordedAnswer],
    layers: Sequence[int],
    directory: Path,
    watcher: Watcher,
) -> None:
    """Write a directory for speculators' trainer, with a row for each answer, in their order.

    Args:
        layers: numbers of the target's layers whose inputs a drafter reads, from 0.
    """
    import datasets

    hidden_states = directory / "hidden_states"
    hidden_states.mkdir(parents=True, exist_ok=True)
    watcher.begin("hidden states", len(answers))
    lengths = list(map(attrgetter("length"), answers))
    for numbers in packed(range(len(answers)), lengths, _BATCH_TOKENS):
        texts = [_text(answers[number]) for number in numbers]
        for number, text, states in zip(
            numbers, texts, states_of(teacher, texts, layers), strict=True
        ):
            tensors = {"token_ids": torch.tensor(text), "hidden_states": states}
            save_file(tensors, hidden_states / f"hs_{number}.safetensors")
        watcher.advance(len(numbers))
    rows = datasets.Dataset.from_list(list(map(_row, answers)))
    rows.set_format("torch")
    rows.save_to_disk(str(directory))
    torch.save(_counts(answers), directory / "token_freq.pt")
    _write_verifier(teacher, directory / VERIFIER)


def _text(answer: RecordedAnswer) -> list[int]:
    return answer.prompt + answer.tokens


def _row(answer: RecordedAnswer) -> dict[str, Any]:
    return {
        "input_ids": _text(answer),
        "loss_mask": [0] * len(answer.prompt) + [1] * len(answer.tokens),
        "seq_len": answer.length,
    }


@torch.inference_mode()
def states_of(
    teacher: Teacher, texts: Sequence[list[int]], layers: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield the states [n, layers + 1, hidden] of each text of n tokens, in bfloat16 on the host.

    They are the inputs of `layers`, then the output of the last layer, for each token.
    """
    model: Any = teacher.model.base_model
    last: list[torch.Tensor] = []
    hook = decoder_layers(teacher.model)[-1].register_forward_hook(
        lambda layer, inputs, outputs: last.append(outputs)
    )
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    try:
        states = model(
            input_ids=ids.to(model.device), use_cache=False, output_hidden_states=True
        ).hidden_states
    finally:
        hook.remove()
    parts = [states[layer] for layer in layers] + last
    batch = torch.stack(parts, 2).to("cpu", torch.bfloat16)
    for text, of_text in zip(texts, batch, strict=True):
        yield of_text[: len(text)].contiguous()


def _counts(answers: Sequence[RecordedAnswer]) -> dict[int, int]:
    tokens: list[int] = []
    for answer in answers:
        tokens += answer.tokens
    ids, counts = torch.tensor(tokens).unique(return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def _write_verifier(teacher: Teacher, directory: Path) -> None:
    """Write the parts of the target that speculators' trainer reads."""
    model: Any = teacher.model
    model.config.save_pretrained(directory)
    tensors = {
        "model.embed_tokens.weight": embeddings(model),
        "model.norm.weight": model.base_model.norm.weight,
        "lm_head.weight": head(model),
    }
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors")
