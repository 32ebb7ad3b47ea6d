"""Batched generation: the target's own text, and in the same pass the likeliest tokens of every step.

Rows that are done leave the batch.  Every draw follows from the generator that is handed in, one uniform number a row
and step, made on the host: the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pearl.models.hf import FixedLayer

T = TypeVar("T")

CIRCLE = 16  # an answer that repeats as many tokens of its own goes in circles, and teaches nothing more
_SPARSE = 0.75  # of the batch's rows alive: below, the dead ones are cut out


@dataclass(frozen=True)
class Answer:
    """A prompt and what followed. Row i of `top_ids` and `top_probs` [tokens, top] is about tokens[i]: likeliest first.

    The probabilities are the target's own, at temperature 1, whatever the answer was drawn at.
    """

    prompt: list[int]
    tokens: list[int]
    top_ids: torch.Tensor
    top_probs: torch.Tensor


@dataclass
class _Row:
    """One answer in the making. `seen`: the runs of `CIRCLE` tokens that it has had."""

    index: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, token: int, eos: Collection[int], limit: int, circles: bool) -> bool:
        """Whether this was the last."""
        self.tokens.append(token)
        run = tuple(self.tokens[-CIRCLE:])
        again = not circles and len(run) == CIRCLE and run in self.seen
        self.seen.add(run)
        return token in eos or len(self.tokens) == limit or again


class BatchLayer(FixedLayer):
    """A `FixedLayer` of many rows, of which some can be dropped."""

    def keep(self, rows: torch.Tensor) -> None:
        assert self.keys is not None
        assert self.values is not None
        self.keys, self.values = self.keys[rows], self.values[rows]


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    eos: Collection[int],
    temperatures: Sequence[float] = (0.0,),
    top: int = 1,
    circles: bool = False,
    generator: torch.Generator | None = None,
    tick: Callable[[int], object] = lambda tokens: None,
) -> list[Answer]:
    """Answers all prompts at once, each up to EOS (which is kept), `limit` tokens, or its first circle.

    Args:
        temperatures: taken in turn; above 0 a token is drawn from the `top` likeliest.
        circles: go on where the text repeats itself.
        generator: a host generator; needed where a temperature is above 0.
        tick: told how many tokens each step has made.
    """
    batch = _Batch(model, prompts, limit, top)
    rows = [_Row(i, temperatures[i % len(temperatures)]) for i in range(len(prompts))]
    every, records = list(rows), []
    while rows:
        ids, probs = batch.step()  # [rows, top]
        chosen = _choose(ids, probs, [row.temperature for row in rows], generator)
        records.append(([row.index for row in rows], ids.int(), probs.half()))
        over = [row.add(token, eos, limit, circles) for row, token in zip(rows, chosen.tolist(), strict=True)]
        tick(len(rows))
        rows = [row for row, done in zip(rows, over, strict=True) if not done]
        batch.feed(chosen, torch.tensor([not done for done in over]))
    return _gathered(prompts, every, records)


def _choose(
    ids: torch.Tensor, probs: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator | None
) -> torch.Tensor:
    """One of each row's ids: the first at temperature 0, otherwise drawn. All on the host."""
    ids, probs = ids.cpu(), probs.cpu()
    if not any(temperatures):
        return ids[:, 0]
    heat = torch.tensor(temperatures)[:, None]
    weights = probs.clamp_min(1e-30).pow(1 / heat.clamp_min(1e-2)).cumsum(-1)
    draws = torch.rand(len(ids), 1, generator=generator) * weights[:, -1:]
    drawn = torch.searchsorted(weights, draws, right=True).clamp_max(ids.shape[1] - 1)
    return ids.gather(1, torch.where(heat > 0, drawn, 0))[:, 0]


class _Batch:
    """The model's side: left-padded prompts, a cache, and what is fed next.

    A row that is done stays in the batch, fed with anything, until enough of them are to be worth a copy.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, top: int) -> None:
        self._model, self._top = model, top
        self._head: torch.Tensor = model.get_output_embeddings().weight
        longest = max(map(len, prompts))
        capacity = longest + limit
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._layers = [BatchLayer(capacity) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        fed = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), capacity, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            fed[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self._fed, self._mask = fed.to(model.device), mask.to(model.device)
        self._length = 0
        self._alive = torch.arange(len(prompts))  # rows of the batch that are still being written

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Feeds what waits; the likeliest ids and their probabilities [alive, top]."""
        end = self._length + self._fed.shape[1]
        mask = self._mask[:, :end]
        positions = (mask.cumsum(-1) - 1).clamp_min_(0)[:, self._length :]
        # The head apart: given states of which only the last count, torch would copy it for every row.
        states = self._model.base_model(
            input_ids=self._fed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        self._length = end
        logits = (states[self._alive.to(states.device)] @ self._head.T).float()
        best = logits.topk(self._top)
        return best.indices, torch.exp(best.values - logits.logsumexp(-1, keepdim=True))

    def feed(self, tokens: torch.Tensor, going_on: torch.Tensor) -> None:
        """Next are `tokens` [alive]; rows that do not go on are dead."""
        fed = self._fed.new_zeros(len(self._fed), 1)
        fed[self._alive.to(fed.device), 0] = tokens.to(fed.device)
        self._fed, self._alive = fed, self._alive[going_on]
        if 0 < len(self._alive) < _SPARSE * len(fed):
            rows = self._alive.to(fed.device)
            self._fed, self._mask = self._fed[rows], self._mask[rows]
            for layer in self._layers:
                layer.keep(rows)
            self._alive = torch.arange(len(rows))


def _gathered(
    prompts: Sequence[Sequence[int]], rows: Sequence[_Row], records: list[tuple[list[int], torch.Tensor, torch.Tensor]]
) -> list[Answer]:
    """The records of each step, sorted by answer."""
    order = torch.tensor([index for indices, _, _ in records for index in indices]).argsort(stable=True)
    sizes = [len(row.tokens) for row in rows]
    ids = torch.cat([ids for _, ids, _ in records]).cpu()[order].split(sizes)
    probs = torch.cat([probs for _, _, probs in records]).cpu()[order].split(sizes)
    return [Answer(list(prompts[row.index]), row.tokens, ids[row.index], probs[row.index]) for row in rows]


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`size` at a time, the last perhaps fewer."""
    return (items[i : i + size] for i in range(0, len(items), size))


def fitting_batch(model: PreTrainedModel, length: int) -> int:
    """How many rows of `length` tokens to generate at once: on a GPU what half its free memory holds, at most 1024."""
    if model.device.type != "cuda":
        return 128
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * width * length * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(1, min(1024, int(free / 2 / (2 * cache + 12 * config.vocab_size))))
