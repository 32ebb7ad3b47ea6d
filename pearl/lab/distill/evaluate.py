"""Evaluate a draft on the target's own answers: how often the target would accept its tokens.

The target answers each prompt greedily; a file keeps the answers for other drafts.  Then both models read the answers,
and every answer token is an observation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from pearl.errors import ModelError
from pearl.lab.distill.answers import answer
from pearl.lab.distill.draft import check_head, head, hidden_states
from pearl.lab.distill.learning import packed
from pearl.lab.distill.storage import read_json, write_json
from pearl.lab.distill.teacher import Teacher

REPEATED = 8  # a token is repeated if it ends a run of this length that the answer has had before: a greedy loop
BINS = (0, 16, 32, 64, 128, 256, 1 << 30)  # bounds of the bins of `by_position`
TOPS = (2, 4, 8)  # values of k in `correction_in_top`
_BATCH_TOKENS = 4096  # tokens of a batch, padding included
_LOGIT_ROWS = 256  # rows of logits of both models in memory at a time


class Observations(NamedTuple):
    """One entry for each answer token.

    Attributes:
        rank: number of tokens that the draft finds likelier than the target's choice; 0: they agree.
        overlap: 1 - TV of the two distributions at temperature 1: the acceptance rate under sampling.
        repeated: whether the token ends a run of `REPEATED` tokens that the answer has had before.
        position: in the answer, from 0.
    """

    rank: torch.Tensor
    overlap: torch.Tensor
    repeated: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True)
class Figures:
    """Means over observations; None for a mean of nothing.

    Attributes:
        tokens: number of observations.
        agreement: share where the draft's likeliest token is the target's.
        overlap: mean 1 - TV.
        repeated: share of repeated tokens.
        agreement_unrepeated, overlap_unrepeated: over the tokens that are not repeated.
        by_position: first position of a bin -> (agreement, tokens).
        correction_in_top: k -> share of the positions without agreement at which the target's token is among the
            draft's k likeliest.
    """

    tokens: int
    agreement: float | None
    overlap: float | None
    repeated: float | None
    agreement_unrepeated: float | None
    overlap_unrepeated: float | None
    by_position: dict[int, tuple[float | None, int]]
    correction_in_top: dict[int, float | None]


def joined(parts: Sequence[Observations]) -> Observations:
    return Observations(*(torch.cat(each) for each in zip(*parts, strict=True)))


def figures(seen: Observations) -> Figures:
    """Summarise observations."""
    new, wrong = ~seen.repeated, seen.rank[seen.rank > 0]
    bins = {a: seen.rank[(seen.position >= a) & (seen.position < b)] for a, b in pairwise(BINS)}
    return Figures(
        tokens=len(seen.rank),
        agreement=_mean(seen.rank == 0),
        overlap=_mean(seen.overlap),
        repeated=_mean(seen.repeated),
        agreement_unrepeated=_mean(seen.rank[new] == 0),
        overlap_unrepeated=_mean(seen.overlap[new]),
        by_position={a: (_mean(ranks == 0), len(ranks)) for a, ranks in bins.items() if len(ranks)},
        correction_in_top={k: _mean(wrong < k) for k in TOPS},
    )


def _mean(values: torch.Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token, whether it ends a run of `REPEATED` tokens that occurred before."""
    runs = [tuple(tokens[max(0, end - REPEATED) : end]) for end in range(1, len(tokens) + 1)]
    first = {run: end for end, run in reversed([*enumerate(runs)])}
    return [len(run) == REPEATED and first[run] < end for end, run in enumerate(runs)]


class GreedyAnswers:
    """The target's greedy answers of up to `limit` tokens, cached in a file of `directory` per target and limit."""

    def __init__(self, teacher: Teacher, directory: Path, limit: int) -> None:
        self._teacher, self._limit = teacher, limit
        self._path = directory / f"answers-{teacher.digest}-{limit}.json"
        self._known: dict[str, list[int]] = read_json(self._path) or {}

    def of(
        self, prompts: Sequence[list[int]], batch: int, tick: Callable[[int], object] = lambda tokens: None
    ) -> list[list[int]]:
        """The answers to some prompts; generates the missing ones, `batch` at a time. Raises `DistillError`."""
        missing = sorted((p for p in prompts if _digest(p) not in self._known), key=len)
        for start in range(0, len(missing), batch):
            some = missing[start : start + batch]
            model, eos = self._teacher.model, self._teacher.eos
            made = answer(model, some, limit=self._limit, eos=eos, allow_loops=True, tick=tick)
            self._known |= {_digest(one.prompt): one.tokens for one in made}
            write_json(self._path, self._known)
        return [self._known[_digest(prompt)] for prompt in prompts]


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.blake2b(",".join(map(str, prompt)).encode(), digest_size=16).hexdigest()


@torch.inference_mode()
def observe(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> Observations:
    """Let both models read each prompt with its answer; one observation per answer token."""
    empty = torch.empty(0)
    parts = [Observations(empty.long(), empty, empty.bool(), empty.long())]
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if a]
    for numbers in packed(range(len(pairs)), [len(p) + len(a) for p, a in pairs], _BATCH_TOKENS):
        some = [pairs[number] for number in numbers]
        longest = max(len(p) + len(a) for p, a in some)
        ids = torch.tensor([[*p, *a, *[0] * (longest - len(p) - len(a))] for p, a in some])
        rows = torch.cat([i * longest + torch.arange(len(p) - 1, len(p) + len(a) - 1) for i, (p, a) in enumerate(some)])
        tokens = torch.tensor([token for _, a in some for token in a])
        again = torch.tensor([flag for _, a in some for flag in repeated(a)])
        position = torch.cat([torch.arange(len(a)) for _, a in some])
        parts.append(Observations(*_compare(target, draft, ids, rows, tokens), again, position))
    return joined(parts)


def _compare(
    target: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and overlaps, each [rows].

    Args:
        ids: [batch, length], right-padded.
        rows: indices into the flattened ids, of the states that predict `tokens`.
        tokens: [rows], the target's.
    """
    theirs, ours = (
        hidden_states(model, ids.to(model.device)).flatten(0, 1)[rows.to(model.device)] for model in (target, draft)
    )
    ranks, overlaps = [], []
    chunks = (each.split(_LOGIT_ROWS) for each in (theirs, ours, tokens))
    for states, guesses, wanted in zip(*chunks, strict=True):
        logits = (guesses @ head(draft).T).float()
        target_probs = (states @ head(target).T).float().softmax(-1)[:, : logits.shape[1]]
        draft_probs = logits.softmax(-1)[:, : target_probs.shape[1]]
        chosen = logits.gather(1, wanted.to(logits.device)[:, None])
        ranks.append((logits > chosen).sum(-1).cpu())
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1).cpu())
    return torch.cat(ranks), torch.cat(overlaps)


def evaluate(
    teacher: Teacher,
    draft: PreTrainedModel,
    sets: Mapping[str, Sequence[str]],
    kept: GreedyAnswers,
    *,
    batch: int,
    tick: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Figures]:
    """The figures of each set of prompts, and of "all" if there are several.

    Args:
        sets: name -> prompts.
        batch: answers generated at once.
        tick: called after each step of answering with the number of tokens generated in it.

    Raises `ModelError` if the draft's vocabulary is smaller than the target's.
    """
    if len(head(draft)) < len(head(teacher.model)):
        raise ModelError("the draft's vocabulary is smaller than the target's: it cannot read the target's answers")
    check_head(teacher.model)
    check_head(draft)
    seen = {}
    for name, prompts in sets.items():
        asked = [teacher.encode_prompt(prompt) for prompt in prompts]
        seen[name] = observe(teacher.model, draft, asked, kept.of(asked, batch, tick))
    if len(seen) > 1:
        seen["all"] = joined(list(seen.values()))
    return {name: figures(of) for name, of in seen.items()}
