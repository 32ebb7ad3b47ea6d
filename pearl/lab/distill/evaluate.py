"""Evaluate a draft on the target's own answers: how often the target would accept its tokens.

The target answers each prompt greedily.  Then both models read the answers, and every answer token is an observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from pearl.errors import ModelError
from pearl.lab.distill.answers import answer, batched
from pearl.lab.distill.draft import check_head, head, hidden_states
from pearl.lab.distill.learning import packed
from pearl.lab.distill.teacher import Teacher

REPEATED = 8  # a token is repeated if it ends a run of this length that the answer has had before: a greedy loop
_BATCH_TOKENS = 4096  # tokens of a batch, padding included
_LOGIT_ROWS = 256  # rows of logits of both models in memory at a time


class Observations(NamedTuple):
    """One entry for each answer token.

    Attributes:
        agreed: whether the draft's likeliest token is the target's choice.
        overlap: 1 - TV of the two distributions at temperature 1: the acceptance rate under sampling.
        repeated: whether the token ends a run of `REPEATED` tokens that the answer has had before.
    """

    agreed: torch.Tensor
    overlap: torch.Tensor
    repeated: torch.Tensor


@dataclass(frozen=True)
class Figures:
    """Means over observations; None for a mean of nothing.

    Attributes:
        tokens: number of observations.
        agreement: share where the draft's likeliest token is the target's.
        overlap: mean 1 - TV.
        repeated: share of repeated tokens.
        agreement_unrepeated, overlap_unrepeated: over the tokens that are not repeated.
    """

    tokens: int
    agreement: float | None
    overlap: float | None
    repeated: float | None
    agreement_unrepeated: float | None
    overlap_unrepeated: float | None


def joined(parts: Sequence[Observations]) -> Observations:
    return Observations(*(torch.cat(each) for each in zip(*parts, strict=True)))


def figures(seen: Observations) -> Figures:
    """Summarise observations."""
    new = ~seen.repeated
    return Figures(
        tokens=len(seen.agreed),
        agreement=_mean(seen.agreed),
        overlap=_mean(seen.overlap),
        repeated=_mean(seen.repeated),
        agreement_unrepeated=_mean(seen.agreed[new]),
        overlap_unrepeated=_mean(seen.overlap[new]),
    )


def _mean(values: torch.Tensor) -> float | None:
    return float(values.double().mean()) if len(values) else None


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token, whether it ends a run of `REPEATED` tokens that occurred before."""
    runs = [tuple(tokens[max(0, end - REPEATED) : end]) for end in range(1, len(tokens) + 1)]
    first = {run: end for end, run in reversed([*enumerate(runs)])}
    return [len(run) == REPEATED and first[run] < end for end, run in enumerate(runs)]


@torch.inference_mode()
def observe(
    target: PreTrainedModel, draft: PreTrainedModel, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> Observations:
    """Let both models read each prompt with its answer; one observation per answer token."""
    empty = torch.empty(0)
    parts = [Observations(empty.bool(), empty, empty.bool())]
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if a]
    for numbers in packed(range(len(pairs)), [len(p) + len(a) for p, a in pairs], _BATCH_TOKENS):
        some = [pairs[number] for number in numbers]
        longest = max(len(p) + len(a) for p, a in some)
        ids = torch.tensor([[*p, *a, *[0] * (longest - len(p) - len(a))] for p, a in some])
        rows = torch.cat([i * longest + torch.arange(len(p) - 1, len(p) + len(a) - 1) for i, (p, a) in enumerate(some)])
        tokens = torch.tensor([token for _, a in some for token in a])
        again = torch.tensor([flag for _, a in some for flag in repeated(a)])
        parts.append(Observations(*_compare(target, draft, ids, rows, tokens), again))
    return joined(parts)


def _compare(
    target: PreTrainedModel, draft: PreTrainedModel, ids: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Agreements and overlaps, each [rows].

    Args:
        ids: [batch, length], right-padded.
        rows: indices into the flattened ids, of the states that predict `tokens`.
        tokens: [rows], the target's.
    """
    theirs, ours = (
        hidden_states(model, ids.to(model.device)).flatten(0, 1)[rows.to(model.device)] for model in (target, draft)
    )
    agreed, overlaps = [], []
    chunks = (each.split(_LOGIT_ROWS) for each in (theirs, ours, tokens))
    for states, guesses, wanted in zip(*chunks, strict=True):
        logits = (guesses @ head(draft).T).float()
        target_probs = (states @ head(target).T).float().softmax(-1)[:, : logits.shape[1]]
        draft_probs = logits.softmax(-1)[:, : target_probs.shape[1]]
        chosen = logits.gather(1, wanted.to(logits.device)[:, None])
        agreed.append(~(logits > chosen).any(-1).cpu())
        overlaps.append(torch.minimum(target_probs, draft_probs).sum(-1).cpu())
    return torch.cat(agreed), torch.cat(overlaps)


def evaluate(
    teacher: Teacher,
    draft: PreTrainedModel,
    sets: Mapping[str, Sequence[str]],
    *,
    limit: int,
    batch: int,
    tick: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Figures]:
    """The figures of each set of prompts, and of "all" if there are several.

    Args:
        sets: name -> prompts.
        limit: tokens of an answer at most.
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
        asked = sorted((teacher.encode_prompt(prompt) for prompt in prompts), key=len)
        answers = list[list[int]]()
        for some in batched(asked, batch):
            made = answer(teacher.model, some, limit=limit, eos=teacher.eos, allow_loops=True, tick=tick)
            answers += [one.tokens for one in made]
        seen[name] = observe(teacher.model, draft, asked, answers)
    if len(seen) > 1:
        seen["all"] = joined(list(seen.values()))
    return {name: figures(of) for name, of in seen.items()}
