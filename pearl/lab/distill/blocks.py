"""Trains block drafters of the target with the library speculators, on data that `states` wrote.

A block drafter guesses several tokens in one forward, from the target's hidden states of all tokens
before the last one. Model, loss and trainer are those of speculators. Only the choice of a device
is ours: speculators always takes an accelerator, and cannot train on a CPU.

Source: "DFlash", "DFlash 2", "DSpark", "P-EAGLE", "XPress", 2026; speculators 0.9.0.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import checkpointer
from speculators.train import trainer as speculators_trainer
from speculators.train.cli import create_transformer_layer_config
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.states import VERIFIER

_WINDOW = 2048  # for layers with a sliding window, of which our drafters have none
_LOSS = "kl_div"
_PASSED = 0.5  # factor by which each of two matrices scales a state, see `_pass_states_on`

Report = Callable[[int, dict[str, float]], None]


class _Trainer(Trainer):
    """speculators' trainer, on the device of the target.

    Args:
        report: called after each epoch with its number and its metrics on held-out answers.
    """

    def __init__(self, device: torch.device, report: Report, *arguments: Any) -> None:
        self._device = device
        self._report = report
        super().__init__(*arguments)

    def setup_trainer(self) -> None:
        """Set the device: the trainer moves the model and the batches to `local_rank`."""
        self.local_rank = self._device
        self.device_type = self._device.type
        super().setup_trainer()

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        metrics: dict[str, float] = super().val_epoch(epoch)
        self._report(epoch, metrics)
        return metrics


class _Clock(speculators_trainer._StepTimer):
    """The trainer's clock on a CPU, where there is no accelerator to wait for."""

    def mark(self, name: str) -> None:
        self.mark_value(name, time.perf_counter())

    def now(self) -> float | None:
        return time.perf_counter() if self.enabled else None


def train(
    config: DistillConfig,
    states: Path,
    layers: Sequence[int],
    held_out: int,
    device: torch.device,
    report: Report,
) -> Path:
    """Train a block drafter; return the directory of its last checkpoint.

    Training goes on from the last checkpoint in the run's directory, if there is one.

    Args:
        states: a directory that `write_states` wrote.
        layers: the target's layers that `write_states` was called with.
        held_out: number of the last answers in `states` that are not trained on, but used to
            measure the drafter.
        report: called after each epoch with its number and its metrics on held-out answers.
    """
    torch.manual_seed(config.seed)
    if device.type == "cpu":
        speculators_trainer._StepTimer = _Clock
        checkpointer.get_current_device = lambda: "cpu"
    kind: Any = SpeculatorModel.registry[config.head]
    model = _new_model(kind, config, states, layers)
    loaders = _loaders(config, states, held_out, model)
    for_training, for_measuring = kind.get_trainer_kwargs(
        loss_fn=_LOSS,
        loss_implementation="eager",
        max_anchors=config.batch_tokens // config.block_size,
        num_depths=config.block_size,
    )
    trainer_config = TrainerConfig(
        lr=config.learning_rate,
        num_epochs=config.passes,
        save_path=str(states.parent / "training"),
        resume_from_checkpoint=True,
        train_call_kwargs=for_training,
        val_call_kwargs=for_measuring,
        optimizer=config.optimizer,
        muon_lr=config.learning_rate,
        hidden_states_dtype=getattr(torch, config.dtype),
        log_freq=config.checkpoint_steps,
    )
    trainer = _Trainer(device, report, model, trainer_config, *loaders)
    trainer.run_training()
    return trainer.checkpointer.path / str(config.passes - 1)


def _new_model(kind: Any, config: DistillConfig, states: Path, layers: Sequence[int]) -> Any:
    """Return a block drafter before training."""
    verifier = str(states / VERIFIER)
    layer_config = create_transformer_layer_config(
        verifier_name_or_path=verifier,
        num_layers=config.head_layers,
        draft_arch="qwen3",
        hidden_act="silu",
        sliding_window=_WINDOW,
        full_attention_indices=list(range(config.head_layers)),
    )
    sees_states = issubclass(kind, DFlashDraftModel)
    if sees_states:  # a position knows the text only through keys and values
        layer_config.num_key_value_heads = layer_config.num_attention_heads
    vocab = layer_config.vocab_size
    tokens = min(config.head_tokens or vocab, vocab)
    if config.head == "dflash2":  # its selector scores tokens of the whole vocabulary
        tokens = vocab
    counts = torch.load(states / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, tokens, vocab)
    model = kind.from_training_args(
        layer_config,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=tokens,
        verifier_name_or_path=verifier,
        target_layer_ids=list(layers),
        draft_attn_impl="sdpa",
        block_size=config.block_size,
        mask_token_id=next(token for token in range(vocab) if token not in counts),
        num_depths=config.block_size,
        markov_rank=config.markov_rank,
        selector_rank=config.markov_rank,
        xpress_rank=config.markov_rank,
    )
    _begin_near_the_target(model)
    if sees_states:
        _pass_states_on(model)
    return model


@torch.no_grad()
def _begin_near_the_target(model: Any) -> None:
    """Set a drafter's first weights: the target's last norm, and a simple projection of states.

    Of the states that the drafter reads, the projection passes on the last one, and ignores those
    of earlier layers.
    """
    model.norm.weight.copy_(model.verifier_norm.weight)
    hidden = model.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, -hidden:].copy_(torch.eye(hidden))


@torch.no_grad()
def _pass_states_on(model: Any) -> None:
    """Set the first weights of attention so that its output is a scaled mean of its input states.

    Value and output projection become multiples of the identity, so they mix neither components nor
    heads.
    """
    for layer in model.layers:
        for matrix in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight):
            matrix.copy_(_PASSED * torch.eye(*matrix.shape))


def _loaders(config: DistillConfig, states: Path, held_out: int, model: Any) -> tuple[Any, Any]:
    rows = len(list((states / "hidden_states").iterdir()))
    return create_train_val_loaders(
        data_path=str(states),
        total_seq_len=config.batch_tokens,
        hidden_states_dtype=getattr(torch, config.dtype),
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path=str(states / VERIFIER),
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=model.config.transformer_layer_config.hidden_size,
        num_target_layers=len(model.target_layer_ids),
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch if config.head == "peagle" else None,
        train_data_ratio=(rows - held_out + 0.5) / rows,  # rounded down to a number of rows
        seed=config.seed,
    )


def export(config: DistillConfig, checkpoint: Path, directory: Path) -> None:
    """Copy a checkpoint of the trainer to `directory`, as a head of the target `config.target`."""
    settings = json.loads((checkpoint / "config.json").read_text())
    settings["speculators_config"]["verifier"]["name_or_path"] = config.target
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    shutil.copy(checkpoint / "model.safetensors", directory)
