"""Batched generation of answers, which records the likeliest tokens of every step in the same pass.

Finished rows leave the batch.  Sampling uses one uniform number per row and step from the caller's host generator, so
the random numbers are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pearl.models.transformers.cache_layers import FixedLayer, cache_name

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

    prompt: Sequence[int]
    temperature: float
    tokens: list[int] = field(default_factory=list)
    top: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    is_finished: bool = False

    def add(self, token: int, eos: Collection[int], limit: int, allow_loops: bool) -> None:
        self.tokens.append(token)
        run = tuple(self.tokens[-LOOP_TOKENS:])
        again = not allow_loops and len(run) == LOOP_TOKENS and run in self.seen
        self.seen.add(run)
        self.is_finished = token in eos or len(self.tokens) == limit or again

    @property
    def answer(self) -> Answer:
        ids, probs = (torch.stack(each) for each in zip(*self.top, strict=True))
        return Answer(list(self.prompt), self.tokens, ids, probs)


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
    tick: Callable[[int], object] = lambda finished: None,
) -> list[Answer]:
    """Answer all prompts in one batch, each up to and including EOS, to `limit` tokens, or to its first loop.

    Args:
        temperatures: prompt i gets temperatures[i % n]; 0 is greedy, above 0 samples among the `top` likeliest tokens.
        top: tokens recorded per step.
        allow_loops: do not end an answer that repeats itself.
        generator: a host generator; required if a temperature is above 0.
        tick: called after each step with the number of answers that it has finished.
    """
    batch = _Batch(model, prompts, limit)
    every = rows = [
        _Row(prompt, temperatures[i % len(temperatures)]) for i, prompt in enumerate(prompts)
    ]
    while going := [i for i, row in enumerate(rows) if not row.is_finished]:
        if len(going) < _MIN_ALIVE * len(rows):
            batch.keep(going)
            rows, going = [rows[i] for i in going], list(range(len(going)))
        ids, probs = batch.step(top)
        chosen = _sample(ids, probs, [row.temperature for row in rows], generator)
        for i in going:
            rows[i].top.append((ids[i].int(), probs[i].half()))
            rows[i].add(int(chosen[i]), eos, limit, allow_loops)
        tick(sum(rows[i].is_finished for i in going))
        batch.feed(chosen)
    return [row.answer for row in every]


@torch.inference_mode()
def along(model: PreTrainedModel, texts: Sequence[Answer], top: int) -> list[Answer]:
    """The same texts with what `model` finds likeliest at each place, `top` tokens of it."""
    head: torch.Tensor = model.get_output_embeddings().weight
    found = []
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.tokens]], device=model.device)[:, :-1]
        states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[
            0, len(text.prompt) - 1 :
        ]
        logits = (states @ head.T).float()
        best = logits.topk(top)
        probs = torch.exp(best.values - logits.logsumexp(-1, keepdim=True))
        found.append(replace(text, top_ids=best.indices.int().cpu(), top_probs=probs.half().cpu()))
    return found


def _sample(
    ids: torch.Tensor,
    probs: torch.Tensor,
    temperatures: Sequence[float],
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Pick one id per row: the first at temperature 0, otherwise sampled. Returns [rows].

    Args:
        ids, probs: [rows, top], likeliest first.
        temperatures: one per row.
    """
    if not any(temperatures):
        return ids[:, 0]
    temperature = torch.tensor(temperatures)[:, None]
    weights = probs.clamp_min(1e-30).pow(1 / temperature.clamp_min(1e-2)).cumsum(-1)
    draws = torch.rand(len(ids), 1, generator=generator) * weights[:, -1:]
    drawn = torch.searchsorted(weights, draws, right=True).clamp_max(ids.shape[1] - 1)
    return ids.gather(1, torch.where(temperature > 0, drawn, 0))[:, 0]


class _Batch:
    """Left-padded prompts, their KV cache, and the tokens to feed next."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int
    ) -> None:
        self._model = model
        self._head: torch.Tensor = model.get_output_embeddings().weight
        longest = max(map(len, prompts))
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = Cache(layers=[FixedLayer(longest + limit) for _ in range(layers)])
        self._cache_name = cache_name(model.base_model)
        padded = torch.tensor(
            [[*[-1] * (longest - len(prompt)), *prompt] for prompt in prompts], device=model.device
        )
        self._fed = padded.clamp_min(0)
        self._mask = torch.nn.functional.pad((padded >= 0).long(), (0, limit), value=1)
        self._length = 0

    def step(self, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward; return each row's likeliest ids and their probabilities [rows, top], on the host."""
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
        logits = (states @ self._head.T).float()
        best = logits.topk(top)
        return best.indices.cpu(), torch.exp(best.values - logits.logsumexp(-1, keepdim=True)).cpu()

    def feed(self, tokens: torch.Tensor) -> None:
        """Set the tokens [rows] of the next forward."""
        self._fed = tokens[:, None].to(self._fed.device)

    def keep(self, rows: list[int]) -> None:
        """Remove all other rows."""
        self._fed = self._fed[rows]
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(torch.tensor(rows, device=self._fed.device))


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Split into batches of `size`; the last may be smaller."""
    return (items[i : i + size] for i in range(0, len(items), size))
