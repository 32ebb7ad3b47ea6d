"""Evaluate a draft on the target's own answers: how often the target would accept its tokens.

The target answers each prompt greedily.  Then both models read the answers, and every answer token is an observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from pearl.errors import ModelError
from pearl.lab.distill.answers import Answer, answer, batched
from pearl.lab.distill.draft import check_head, head, hidden_states
from pearl.lab.distill.learning import batch_of, packed
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


Figures = dict[str, float | None]  # see `figures`


def joined(parts: Sequence[Observations]) -> Observations:
    return Observations(*(torch.cat(each) for each in zip(*parts, strict=True)))


def figures(seen: Observations) -> Figures:
    """Means over observations; None for a mean of nothing.

    tokens: number of observations; agreement: share where the draft's likeliest token is the target's; overlap: mean
    1 - TV; repeated: share of repeated tokens; agreement_unrepeated, overlap_unrepeated: over the other tokens.
    """
    new = ~seen.repeated
    means = {
        "agreement": seen.agreed,
        "overlap": seen.overlap,
        "repeated": seen.repeated,
        "agreement_unrepeated": seen.agreed[new],
        "overlap_unrepeated": seen.overlap[new],
    }
    found = {name: float(values.double().mean()) if len(values) else None for name, values in means.items()}
    return {"tokens": len(seen.agreed), **found}


def repeated(tokens: Sequence[int]) -> list[bool]:
    """For each token, whether it ends a run of `REPEATED` tokens that occurred before."""
    runs = [tuple(tokens[max(0, end - REPEATED) : end]) for end in range(1, len(tokens) + 1)]
    first = {run: end for end, run in reversed([*enumerate(runs)])}
    return [len(run) == REPEATED and first[run] < end for end, run in enumerate(runs)]


@torch.inference_mode()
def observe(target: PreTrainedModel, draft: PreTrainedModel, answers: Sequence[Answer]) -> Observations:
    """Let both models read the target's greedy answers; one observation per answer token."""
    parts = []
    for numbers in packed(range(len(answers)), [one.length for one in answers], _BATCH_TOKENS):
        some = [answers[number] for number in numbers]
        batch = batch_of(some, target.device)
        theirs, ours = (
            hidden_states(model, batch.ids.to(model.device)).flatten(0, 1)[batch.rows.to(model.device)]
            for model in (target, draft)
        )
        again = torch.tensor([flag for one in some for flag in repeated(one.tokens)])
        chunks = (each.split(_LOGIT_ROWS) for each in (theirs, ours, batch.top_ids[:, 0], again))
        for states, guesses, wanted, repeats in zip(*chunks, strict=True):
            logits = (guesses @ head(draft).T).float()
            target_probs = (states @ head(target).T).float().softmax(-1)[:, : logits.shape[1]]
            draft_probs = logits.softmax(-1)[:, : target_probs.shape[1]]
            chosen = logits.gather(1, wanted.to(logits.device)[:, None])
            agreed = ~(logits > chosen).any(-1)
            parts.append(Observations(agreed.cpu(), torch.minimum(target_probs, draft_probs).sum(-1).cpu(), repeats))
    return joined(parts)


def evaluate(
    teacher: Teacher,
    draft: PreTrainedModel,
    sets: Mapping[str, Sequence[str]],
    *,
    limit: int,
    batch: int,
    tick: Callable[[int], object] = lambda finished: None,
) -> dict[str, Figures]:
    """The figures of each set of prompts, and of "all" if there are several.

    Args:
        sets: name -> prompts.
        limit: tokens of an answer at most.
        batch: answers generated at once.
        tick: see `answer`.

    Raises `ModelError` if the draft's vocabulary is smaller than the target's.
    """
    if len(head(draft)) < len(head(teacher.model)):
        raise ModelError("the draft's vocabulary is smaller than the target's: it cannot read the target's answers")
    check_head(teacher.model)
    check_head(draft)
    seen = {}
    for name, prompts in sets.items():
        asked = sorted((teacher.encode_prompt(prompt) for prompt in prompts), key=len)
        answers = list[Answer]()
        for some in batched(asked, batch):
            answers += answer(teacher.model, some, limit=limit, eos=teacher.eos, allow_loops=True, tick=tick)
        seen[name] = observe(teacher.model, draft, answers)
    if len(seen) > 1:
        seen["all"] = joined(list(seen.values()))
    return {name: figures(of) for name, of in seen.items()}
