"""Recording texts: the target answers, the draft is asked at every position what it would have drafted there.

Both run in this process, one after the other, and nothing is timed: what is recorded is a matter of the models and the
seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import SHORTLIST, read_draw
from pearl.drafting.rows import shape_of
from pearl.engine.conversation import Conversation
from pearl.models.recorded import FEATURES, Header, RecordedText
from pearl.models.replay import faint
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.protocol.options import Sampling
from pearl.text.stream import Tokenizer

_PIECE = 64  # positions of the draft in one forward: a row spans the vocabulary


def record(
    target: ModelRunner,
    draft: ModelRunner,
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[str]],
    header: Header,
    *,
    raw: bool = False,
    tick: Callable[[str], object] = lambda said: None,
) -> Iterator[RecordedText]:
    """The answers to the users' turns, each as it is done; its conversation goes on with it.

    A prompt that has come before is left out, and so is one that the context of either model cannot hold with its
    answer, with all that follows it in its conversation.

    Args:
        raw: takes texts as they are, with no chat template.
        tick: is told what has been done.
    """
    seen: set[tuple[int, ...]] = set()
    most = min(target.context, draft.context) - header.max_tokens
    for number, turns in enumerate(conversations, 1):
        conversation = Conversation(tokenizer, raw or tokenizer.apply_chat([{"role": "user", "content": "."}]) is None)
        for turn in turns:
            prompt = conversation.prompt(turn)
            if len(prompt) > most or tuple(prompt) in seen:
                tick(f"prompt {number} is left out: {'too long' if len(prompt) > most else 'it has come before'}")
                break
            seen.add(tuple(prompt))
            text = recorded(target, draft, prompt, header.sampling(len(seen)), header)
            tick(f"prompt {number}: {len(text.answer)} tokens")
            yield text
            conversation.add(turn, prompt, tokenizer.decode(text.answer), text.answer, "length")


@torch.inference_mode()
def answers(
    target: ModelRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    eos: Sequence[int],
    most: int,
    tick: Callable[[int], object] = lambda tokens: None,
) -> list[list[int]]:
    """What seeded decoding gives, each prompt with a sampling of its own; as many at a time as the target has slots.

    `tick` is told of tokens as they are drawn.
    """
    said: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), target.capabilities.slots):
        going = {first + slot: slot for slot in range(target.capabilities.slots) if first + slot < len(prompts)}
        draws = {number: DirectDraw(samplings[number]) for number in going}
        for slot in going.values():
            target.rollback(0, slot)
        while going:
            feeds = [Feed(said[number][-1:] or prompts[number], 1, slot) for number, slot in going.items()]
            for number, row in zip(going, target.forward(feeds), strict=True):
                said[number].append(read_draw(draws[number](row[0], len(prompts[number]) + len(said[number]))))
            tick(len(going))
            going = {n: slot for n, slot in going.items() if len(said[n]) < most and said[n][-1] not in eos}
    return said


@torch.inference_mode()
def recorded(
    target: ModelRunner, draft: ModelRunner, prompt: Sequence[int], sampling: Sampling, header: Header
) -> RecordedText:
    """One text: what seeded decoding gives, and the draft's rows along it."""
    (answer,) = answers(target, [prompt], [sampling], header.eos, header.max_tokens)
    return RecordedText(tuple(prompt), tuple(answer), *_rows(draft, prompt, answer, DirectDraw(sampling), header))


def _rows(
    draft: ModelRunner, prompt: Sequence[int], answer: Sequence[int], draw: DirectDraw, header: Header
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[answer, likeliest and drawn]: ids and logits, as many as runners-up are looked for among; [answer, FEATURES]."""
    known = min(draft.vocab_size, header.vocab_size)  # ids that one of the two lacks are padding
    text, done = [token if token < known else 0 for token in (*prompt, *answer[:-1])], 0
    ids = np.empty((len(answer), min(SHORTLIST, known) + 1), np.int32)
    logits, features = np.empty(ids.shape, np.float32), np.zeros((len(answer), FEATURES), np.float32)
    draft.rollback(0)
    if len(prompt) > 1:
        feed_chain(draft, text[: len(prompt) - 1], 0)
    while done < len(answer):
        some = text[len(prompt) - 1 + done :][:_PIECE]
        for row in feed_chain(draft, some, len(some))[:, :known].float():
            drawn = read_draw(draw(row, len(prompt) + done))
            features[done] = _features(row, drawn)
            top = torch.cat((row.topk(ids.shape[1] - 1).indices, torch.tensor([drawn], device=row.device)))
            ids[done] = top.cpu().numpy()
            values = row[top].cpu().numpy()
            logits[done] = np.maximum(values, values.max() - faint(header.temperature))
            done += 1
    return ids, logits, features


def _features(row: torch.Tensor, drawn: int) -> np.ndarray:
    """As `RecordedText` has them; fewer than ten probabilities are followed by zeros."""
    *top, entropy, chosen = shape_of(row, torch.tensor([drawn], device=row.device)).tolist()
    return np.array([*top, *[0.0] * (FEATURES - 2 - len(top)), entropy, chosen], np.float32)
