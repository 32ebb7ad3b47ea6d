"""Batched generation of answers; every forward also records the likeliest tokens.

Finished rows leave the batch. Sampling takes one uniform number per row and step from the caller's
host generator, so the random numbers are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from operator import attrgetter

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pearl.lab.distill.pair import head, hidden_states
from pearl.models.transformers.cache_layers import FixedLayer, cache_name

LOOP_TOKENS = 16  # an answer ends if its last 16 tokens occurred in it before: loops teach nothing
_MIN_ALIVE = 0.75  # finished rows leave the batch when a smaller share of its rows is unfinished


@dataclass(frozen=True)
class RecordedAnswer:
    """A prompt and its answer.

    Attributes:
        prompt: ids of the prompt.
        tokens: ids of the answer, with EOS if the answer ended with it.
        top_ids, top_probs: [tokens, top]; row i has the target's likeliest tokens for the position of tokens[i],
            likeliest first. Probabilities are at temperature 1, even if the answer was sampled at another temperature.
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
    """One answer that is being generated.

    Attributes:
        runs: all sequences of `LOOP_TOKENS` tokens that have occurred in the answer.
    """

    prompt: Sequence[int]
    temperature: float
    tokens: list[int] = field(default_factory=list)
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_probs: list[torch.Tensor] = field(default_factory=list)
    runs: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, token: int, eos: Collection[int], limit: int, allow_loops: bool) -> bool:
        """Add a token; return whether the answer ends here: by EOS, by `limit`, or by a loop."""
        self.tokens.append(token)
        run = tuple(self.tokens[-LOOP_TOKENS:])
        is_loop = not allow_loops and len(run) == LOOP_TOKENS and run in self.runs
        self.runs.add(run)
        return token in eos or len(self.tokens) == limit or is_loop

    @property
    def answer(self) -> RecordedAnswer:
        ids = torch.stack(self.top_ids)
        return RecordedAnswer(list(self.prompt), self.tokens, ids, torch.stack(self.top_probs))


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
) -> list[RecordedAnswer]:
    """Answer all prompts in one batch.

    An answer ends with EOS, at `limit` tokens, or as soon as its last `LOOP_TOKENS` tokens have
    occurred before.

    Args:
        temperatures: prompt i is answered at temperatures[i % number of temperatures]. 0 is greedy;
            above 0, tokens are sampled among the `top` likeliest.
        top: number of likeliest tokens recorded per step.
        allow_loops: do not end an answer that repeats itself.
        generator: a host generator; required if a temperature is above 0.
        tick: called after each step with the number of answers that ended in this step.
    """
    batch = _Batch(model, prompts, limit)
    answers = []
    for prompt, temperature in zip(prompts, cycle(temperatures), strict=False):
        answers.append(_Row(prompt, temperature))
    rows = answers  # the rows in the batch; `_MIN_ALIVE` decides when finished rows leave it
    unfinished = list(range(len(rows)))
    while unfinished:
        if len(unfinished) < _MIN_ALIVE * len(rows):
            batch.keep(unfinished)
            rows = [rows[i] for i in unfinished]
            unfinished = list(range(len(rows)))
        ids, probs = batch.step(top)
        chosen = _sample(ids, probs, list(map(attrgetter("temperature"), rows)), generator)
        batch.feed(chosen)
        count = len(unfinished)
        for i in tuple(unfinished):
            rows[i].top_ids.append(ids[i].int())
            rows[i].top_probs.append(probs[i].half())
            if rows[i].add(int(chosen[i]), eos, limit, allow_loops):
                unfinished.remove(i)
        tick(count - len(unfinished))
    return [row.answer for row in answers]


@torch.inference_mode()
def along(
    model: PreTrainedModel, texts: Sequence[RecordedAnswer], top: int
) -> list[RecordedAnswer]:
    """Return the same texts with the `top` tokens that `model` finds likeliest at each position."""
    recorded_texts = []
    for text in texts:
        ids = torch.tensor([text.prompt + text.tokens], device=model.device)[:, :-1]
        states = hidden_states(model, ids)[0, len(text.prompt) - 1 :]
        top_ids, top_probs = _likeliest(states, head(model), top)
        recorded_texts.append(replace(text, top_ids=top_ids.int(), top_probs=top_probs.half()))
    return recorded_texts


def _likeliest(
    states: torch.Tensor, matrix: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest ids and their probabilities, each [rows, top], on the host.

    Args:
        states: last hidden states [rows, width].
        matrix: output head [vocab, width].
    """
    logits = (states @ matrix.T).float()
    top_logits = logits.topk(top)
    probs = torch.exp(top_logits.values - logits.logsumexp(-1, keepdim=True))
    return top_logits.indices.cpu(), probs.cpu()


def _sample(
    ids: torch.Tensor,
    probs: torch.Tensor,
    temperatures: Sequence[float],
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return an id for each row: the likeliest at temperature 0, otherwise a sampled one.

    Args:
        ids, probs: [rows, top], likeliest first.
        temperatures: one per row.
        generator: a host generator; required if a temperature is above 0.
    """
    if not any(temperatures):
        return ids[:, 0]
    temperature = torch.tensor(temperatures)[:, None]
    # Divided by the likeliest token's probability, so that this token's power is 1. Without the
    # division all powers may round to 0 at a low temperature.
    shares = (probs / probs[:, :1]).clamp_min(1e-30)
    weights = shares.pow(1 / temperature.clamp_min(1e-2)).cumsum(-1)
    points = torch.rand(len(ids), 1, generator=generator) * weights[:, -1:]
    ranks = torch.searchsorted(weights, points, right=True).clamp_max(ids.shape[1] - 1)
    return ids.gather(1, torch.where(temperature > 0, ranks, 0))[:, 0]


class _Batch:
    """Left-padded prompts, their KV cache, and the tokens to feed next."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int
    ) -> None:
        self._model = model
        longest = max(map(len, prompts))
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._cache = Cache(layers=[FixedLayer(longest + limit) for _ in range(layers)])
        self._cache_name = cache_name(model.base_model)
        padded = torch.full((len(prompts), longest), -1)
        for row, prompt in zip(padded, prompts, strict=True):
            row[longest - len(prompt) :] = torch.tensor(prompt)
        padded = padded.to(model.device)
        self._fed = padded.clamp_min(0)
        self._mask = torch.nn.functional.pad((padded >= 0).long(), (0, limit), value=1)
        self._length = 0

    def step(self, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward; return each row's likeliest ids and their probabilities [rows, top], on the host."""
        end = self._length + self._fed.shape[1]
        mask = self._mask[:, :end]
        positions = (mask.cumsum(-1) - 1).clamp_min_(0)[:, self._length :]
        cache = {self._cache_name: self._cache}
        # The head is applied in `_likeliest`, to the last states alone.  If the model applied it to a
        # slice of all states, torch would copy the head's weights for every row.
        states = self._model.base_model(
            input_ids=self._fed,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **cache,
        ).last_hidden_state[:, -1]
        self._length = end
        return _likeliest(states, head(self._model), top)

    def feed(self, tokens: torch.Tensor) -> None:
        """Set the tokens [rows] that the next forward feeds."""
        self._fed = tokens[:, None].to(self._fed.device)

    def keep(self, rows: list[int]) -> None:
        """Remove all rows except `rows`."""
        self._fed = self._fed[rows]
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(torch.tensor(rows, device=self._fed.device))
