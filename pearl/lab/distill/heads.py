"""Trains heads of the target with vLLM's speculators, on answers and states that `states` wrote.

A head guesses the next tokens from the target's hidden states. EAGLE-3 guesses one token with each of its forwards,
and the other kinds a block of tokens with one forward. Model, loss and trainer are those of speculators. Only the
choice of a device is ours: speculators always takes an accelerator, and cannot train on a CPU.

Source: "EAGLE-3", 2025; "DFlash", "DFlash 2", "DSpark", "P-EAGLE", "XPress", 2026; speculators 0.9.0.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel
from speculators.models.eagle3.data import shift_batch
from speculators.models.utils import resolve_verifier_norm_class
from speculators.train import checkpointer
from speculators.train import trainer as speculators_trainer
from speculators.train.cli import create_transformer_layer_config
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.states import VERIFIER

_WINDOW = 2048  # positions that a layer with a sliding window sees; our heads have no such layers
_LOSS = "kl_div"
# Iterations in each step of the optimizer Muon. On a CPU three take a sixth of a small head's training time, and five a
# quarter.
_NEWTON_SCHULZ = 3
_LATER = 0.8  # weight of an EAGLE-3 step's loss / weight of the previous step's loss
_PASSED = 0.5  # factor by which each of two matrices scales a state, see `_pass_states_on`
# Rotary embedding turns by this many radians a position in the components that tell near states from far ones.
_NEAR_RATES = (0.035, 0.5)
_NEARNESS = 4.0  # size of these components in queries and keys; random weights give about 0.5
_SHARPER = 2**0.5  # factor on the weights of the norms of queries and keys
_MEASURED = 24  # number of texts whose mean state is taken


class Kind(NamedTuple):
    """What is particular to the training of a kind of head.

    Attributes:
        shift: the function by which speculators aligns a text's tokens with its states; None if it
            does not move them.
        sees_states: whether the head knows the text only through keys and values that it computes
            from the target's states.
        is_whole: whether the head's output matrix must have all tokens of the target.
    """

    shift: Callable[[Any], Any] | None = None
    sees_states: bool = False
    is_whole: bool = False


KINDS = {
    "dflash": Kind(sees_states=True),
    "dflash2": Kind(sees_states=True, is_whole=True),  # its selector scores the whole vocabulary
    "dspark": Kind(sees_states=True),
    "eagle3": Kind(shift_batch),
    "peagle": Kind(shift_batch),
    "xpress": Kind(sees_states=True),
}

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
        """Set `local_rank`, the device to which the trainer moves the model and the batches."""
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
    """Train a head; return the directory of its last checkpoint.

    Training goes on from the last checkpoint in the run's directory, if there is one.

    Args:
        states: a directory that `write_states` wrote.
        layers: the target's layers that `write_states` was called with.
        held_out: how many answers are not trained on, but used to measure the head. They are the
            last ones in `states`.
        report: called after each epoch with its number and its metrics on held-out answers.
    """
    torch.manual_seed(config.seed)
    if device.type == "cpu":
        speculators_trainer._StepTimer = _Clock
        checkpointer.get_current_device = lambda: "cpu"
    model = _new_model(config, states, layers)
    loaders = _loaders(config, states, held_out, model)
    for_training, for_measuring = model.get_trainer_kwargs(
        loss_fn=_LOSS,
        loss_implementation="eager",
        max_anchors=config.batch_tokens // config.block_size,
        num_depths=config.block_size,
        ttt_steps=config.block_size,
        ttt_step_loss_decay=_LATER,
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
        muon_ns_steps=_NEWTON_SCHULZ,
        hidden_states_dtype=getattr(torch, config.dtype),
        log_freq=config.checkpoint_steps,
    )
    trainer = _Trainer(device, report, model, trainer_config, *loaders)
    trainer.run_training()
    return trainer.checkpointer.path / str(config.passes - 1)


def _new_model(config: DistillConfig, states: Path, layers: Sequence[int]) -> Any:
    """Return a head before training."""
    kind = KINDS[config.head]
    verifier = str(states / VERIFIER)
    layer_config = create_transformer_layer_config(
        verifier_name_or_path=verifier,
        num_layers=config.head_layers,
        draft_arch="qwen3",
        hidden_act="silu",
        sliding_window=_WINDOW,
        full_attention_indices=list(range(config.head_layers)),
    )
    if kind.sees_states:
        layer_config.num_key_value_heads = layer_config.num_attention_heads
    vocab = layer_config.vocab_size
    tokens = vocab
    if config.head_tokens and not kind.is_whole:
        tokens = min(config.head_tokens, vocab)
    counts = torch.load(states / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, tokens, vocab)
    model_class: Any = SpeculatorModel.registry[config.head]
    model = model_class.from_training_args(
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
        ttt_steps=config.block_size,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        markov_rank=config.markov_rank,
        selector_rank=config.markov_rank,
        xpress_rank=config.markov_rank,
    )
    _take_last_norm(model)
    if kind.sees_states:
        _pass_states_on(model)
        _attend_to_the_last_states(model, states, counts)
    return model


@torch.no_grad()
def _take_last_norm(model: Any) -> None:
    """Make the model compute the target's last norm as the target's family does.

    The head's own last norm begins with the same factors. A Gemma's norm multiplies by 1 + weights.
    speculators does so for block drafters, but for EAGLE-3 and P-EAGLE it multiplies by the weights
    alone.
    """
    width = model.hidden_size
    eps = model.config.transformer_layer_config.rms_norm_eps
    norm = resolve_verifier_norm_class(model.config)(width, eps=eps)
    norm.load_state_dict(model.verifier_norm.state_dict())
    model.norm.weight.copy_(norm(torch.ones(width)))  # the norm of ones is its factors
    model.verifier_norm = norm.requires_grad_(False)


@torch.no_grad()
def _pass_states_on(model: Any) -> None:
    """Set the initial weights so that each layer adds a mean of the target's states, scaled.

    The mean is over positions. Of the target's layers that the head reads, `model.fc` passes on the
    states of the last one. Value and output projection become multiples of the identity, so they
    mix neither components nor heads.
    """
    hidden = model.hidden_size
    model.fc.weight.zero_()
    model.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    for layer in model.layers:
        for matrix in (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight):
            matrix.copy_(_PASSED * torch.eye(*matrix.shape))


@torch.no_grad()
def _attend_to_the_last_states(model: Any, states: Path, counts: dict[int, int]) -> None:
    """Set the initial weights so that each position attends mostly to the states just before it.

    Queries and keys get the same few components, which the rotary embedding turns with the position.
    So the farther apart a query and a key are, the smaller is their product. The query projection
    turns the mean token and the mask token into these components. The key projection does so with
    the mean state.
    """
    state = _mean_state(model, states)
    slowest, fastest = _NEAR_RATES
    rates = model.rotary_emb.inv_freq
    is_near = (rates > slowest) & (rates < fastest)
    ids = torch.tensor(list(counts))
    share = torch.tensor(list(counts.values())) / sum(counts.values())
    mask = torch.tensor(model.mask_token_id)
    for layer in model.layers:
        attention = layer.self_attn
        token = share @ layer.input_layernorm(model.embed_tokens(ids))
        rows = torch.stack((token, layer.input_layernorm(model.embed_tokens(mask))))
        common = torch.zeros(attention.head_dim)
        common[: len(is_near)][is_near] = _NEARNESS
        parts = common.repeat(len(attention.q_proj.weight) // attention.head_dim)
        attention.q_proj.weight += torch.outer(parts, torch.linalg.pinv(rows).sum(1))
        attention.k_proj.weight += torch.outer(parts, state / state.square().sum())
        attention.q_norm.weight *= _SHARPER
        attention.k_norm.weight *= _SHARPER


def _mean_state(model: Any, states: Path) -> torch.Tensor:
    """Return the mean over all positions of the states that the head's layers read.

    These are the target's states after `model.fc` and `model.hidden_norm`.
    """
    parts = []
    for number in range(min(_MEASURED, len(list((states / "hidden_states").iterdir())))):
        tensors = load_file(states / "hidden_states" / f"hs_{number}.safetensors")
        parts.append(tensors["hidden_states"][:, :-1].flatten(1).float())
    seen: torch.Tensor = model.hidden_norm(model.fc(torch.cat(parts)))
    return seen.mean(0)


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
        preprocess=KINDS[config.head].shift,
        train_data_ratio=(rows - held_out + 0.5) / rows,  # rounded down to a number of rows
        seed=config.seed,
    )


def export(config: DistillConfig, checkpoint: Path, directory: Path) -> None:
    """Copy a checkpoint of the trainer to `directory`, as a head of the target `config.target`."""
    settings = json.loads((checkpoint / "config.json").read_text())
    settings["speculators_config"]["verifier"]["name_or_path"] = config.target
    (directory / "config.json").write_text(json.dumps(settings, indent=1))
    shutil.copy(checkpoint / "model.safetensors", directory)
