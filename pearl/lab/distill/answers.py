"""Batched generation of answers, which records the likeliest tokens of every step in the same pass.

Finished rows leave the batch.  Sampling uses one uniform number per row and step from the caller's host generator, so
the random numbers are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pearl.models.hf import FixedLayer, cache_name

T = TypeVar("T")

LOOP_TOKENS = 16  # end an answer that repeats a run of this length: loops teach nothing
_MIN_ALIVE = 0.75  # remove finished rows from the batch once a smaller share is unfinished


@dataclass(frozen=True)
class Answer:
    """A prompt and its answer.

    Attributes:
        prompt, tokens: ids; `tokens` ends with EOS if the answer did.
        top_ids, top_probs: [tokens, top]; row i has the target's likeliest tokens at the place of tokens[i], likeliest
            first. Probabilities at temperature 1, whatever temperature the answer was sampled at.
    """

    prompt: list[int]
    tokens: list[int]
    top_ids: torch.Tensor
    top_probs: torch.Tensor

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass
class _Row:
    """One answer being generated. `seen`: its runs of `LOOP_TOKENS` tokens so far."""

    index: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, token: int, eos: Collection[int], limit: int, allow_loops: bool) -> bool:
        """Append a token; return whether the answer is finished."""
        self.tokens.append(token)
        run = tuple(self.tokens[-LOOP_TOKENS:])
        again = not allow_loops and len(run) == LOOP_TOKENS and run in self.seen
        self.seen.add(run)
        return token in eos or len(self.tokens) == limit or again


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    limit: int,
    eos: Collection[int],
    temperatures: Sequence[float] = (0.0,),
    top: int = 1,
    allow_loops: bool = False,
    generator: torch.Generator | None = None,
    tick: Callable[[int], object] = lambda tokens: None,
) -> list[Answer]:
    """Answer all prompts in one batch, each up to and including EOS, to `limit` tokens, or to its first loop.

    Args:
        temperatures: prompt i gets temperatures[i % n]; 0 is greedy, above 0 samples among the `top` likeliest tokens.
        top: tokens recorded per step.
        allow_loops: do not end an answer that repeats itself.
        generator: a host generator; required if a temperature is above 0.
        tick: called after each step with the number of tokens generated in it.
    """
    batch = _Batch(model, prompts, limit, top)
    rows = [_Row(i, temperatures[i % len(temperatures)]) for i in range(len(prompts))]
    every, records = list(rows), []
    while rows:
        ids, probs = batch.step()  # [rows, top]
        chosen = _sample(ids, probs, [row.temperature for row in rows], generator)
        records.append(([row.index for row in rows], ids.int(), probs.half()))
        finished = [row.add(token, eos, limit, allow_loops) for row, token in zip(rows, chosen.tolist(), strict=True)]
        tick(len(rows))
        rows = [row for row, done in zip(rows, finished, strict=True) if not done]
        batch.feed(chosen, torch.tensor([not done for done in finished]))
    return _gather(prompts, every, records)


def _sample(
    ids: torch.Tensor, probs: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator | None
) -> torch.Tensor:
    """Pick one id per row: the first at temperature 0, otherwise sampled. Returns [rows], on the host.

    Args:
        ids, probs: [rows, top], likeliest first.
        temperatures: one per row.
    """
    ids, probs = ids.cpu(), probs.cpu()
    if not any(temperatures):
        return ids[:, 0]
    temperature = torch.tensor(temperatures)[:, None]
    weights = probs.clamp_min(1e-30).pow(1 / temperature.clamp_min(1e-2)).cumsum(-1)
    draws = torch.rand(len(ids), 1, generator=generator) * weights[:, -1:]
    drawn = torch.searchsorted(weights, draws, right=True).clamp_max(ids.shape[1] - 1)
    return ids.gather(1, torch.where(temperature > 0, drawn, 0))[:, 0]


class _Batch:
    """Left-padded prompts, their KV cache, and the tokens to feed next.

    Finished rows stay in the batch as padding until they are enough to be worth copying the cache without them.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, top: int) -> None:
        self._model, self._top = model, top
        self._head: torch.Tensor = model.get_output_embeddings().weight
        longest = max(map(len, prompts))
        capacity = longest + limit
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._layers = [FixedLayer(capacity) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        fed = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), capacity, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            fed[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self._fed, self._mask = fed.to(model.device), mask.to(model.device)
        self._cache_name = cache_name(model.base_model)
        self._length = 0
        self._alive = torch.arange(len(prompts))  # indices of the unfinished rows

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward; return the likeliest ids of the unfinished rows and their probabilities [alive, top]."""
        end = self._length + self._fed.shape[1]
        mask = self._mask[:, :end]
        positions = (mask.cumsum(-1) - 1).clamp_min_(0)[:, self._length :]
        # The head is applied below: on a slice of all states torch would copy its weights for every row.
        states = self._model.base_model(
            input_ids=self._fed,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        ).last_hidden_state[:, -1]
        self._length = end
        logits = (states[self._alive.to(states.device)] @ self._head.T).float()
        best = logits.topk(self._top)
        return best.indices, torch.exp(best.values - logits.logsumexp(-1, keepdim=True))

    def feed(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> None:
        """Set the tokens of the next forward.

        Args:
            tokens: [alive], one per row that was unfinished.
            unfinished: [alive], bool: rows that go on.
        """
        fed = self._fed.new_zeros(len(self._fed), 1)
        fed[self._alive.to(fed.device), 0] = tokens.to(fed.device)
        self._fed, self._alive = fed, self._alive[unfinished]
        if 0 < len(self._alive) < _MIN_ALIVE * len(fed):
            rows = self._alive.to(fed.device)
            self._fed, self._mask = self._fed[rows], self._mask[rows]
            for layer in self._layers:
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            self._alive = torch.arange(len(rows))


def _gather(
    prompts: Sequence[Sequence[int]], rows: Sequence[_Row], records: list[tuple[list[int], torch.Tensor, torch.Tensor]]
) -> list[Answer]:
    """Regroup the records of each step (row indices, ids, probabilities) by answer."""
    order = torch.tensor([index for indices, _, _ in records for index in indices]).argsort(stable=True)
    sizes = [len(row.tokens) for row in rows]
    ids = torch.cat([ids for _, ids, _ in records]).cpu()[order].split(sizes)
    probs = torch.cat([probs for _, _, probs in records]).cpu()[order].split(sizes)
    return [Answer(list(prompts[row.index]), row.tokens, ids[row.index], probs[row.index]) for row in rows]


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Split into batches of `size`; the last may be smaller."""
    return (items[i : i + size] for i in range(0, len(items), size))
