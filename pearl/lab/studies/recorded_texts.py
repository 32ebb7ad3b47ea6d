"""Recorded texts: what a pair of models writes, and what its draft draws at every position of it.

Recording runs the target, then the draft along the target's text, in this process and untimed: the result depends only
on the models and the seed.  A published method needs to know of each token only whether the draft is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pearl.config import EngineConfig
from pearl.config.options import RequestOptions
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.decoding.shaping import Shaper
from pearl.drafting.step import shape_of
from pearl.drafting.stops import TOP
from pearl.errors import ConfigError
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.text.conversation import Conversation
from pearl.text.stream import Tokenizer
from pearl.text.tokenizer import check_same_vocabulary
from pearl.worker.build import make_runner
from pearl.worker.placement import place

_PIECE = 64  # positions per forward: a row spans the vocabulary


@dataclass(frozen=True)
class RecordedText:
    """One text. `drawn` and `features` belong to the tokens of `answer`.

    Attributes:
        drawn: the token that the draft draws there.
        features: the ten largest probabilities of the draft's whole row at temperature 1, its entropy in nats, and the
            probability of the token that it draws.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    drawn: Sequence[int]
    features: Sequence[Sequence[float]]

    @property
    def right(self) -> list[bool]:
        """For each token of the answer, whether the draft draws it too."""
        return [drawn == token for drawn, token in zip(self.drawn, self.answer, strict=True)]


@dataclass(frozen=True)
class RecordedTexts:
    """`target`, `draft`: names of the models."""

    target: str
    draft: str
    texts: Sequence[RecordedText]


def record_pair(
    config: EngineConfig,
    conversations: Sequence[Sequence[str]],
    tokens: int,
    *,
    raw: bool = False,
    tick: Callable[[str], object],
) -> tuple[RecordedTexts, list[int]]:
    """Load a pair, and record its greedy answers of at most `tokens`; also of each the number of its conversation.

    Raises `ConfigError` if no prompt fits the context, or for a draft of another vocabulary.
    """
    (tokenizer, defaults), (theirs, _) = (
        load_tokenizer(name, trust_remote_code=config.trust_remote_code)
        for name in (config.target, config.draft)
    )
    check_same_vocabulary(tokenizer, theirs, config.target, config.draft)
    pair = [make_runner(config.model(role), place(config, role)) for role in config.roles]
    found = list(
        record(
            pair,
            tokenizer,
            conversations,
            RequestOptions().resolved(),
            defaults.eos,
            tokens,
            raw=raw,
            tick=tick,
        )
    )
    if not found:
        raise ConfigError(
            "no prompt fits the context: shorten them, lower max_tokens, or raise max_context"
        )
    return RecordedTexts(config.target, config.draft, [text for _, text in found]), [
        number for number, _ in found
    ]


def record(
    pair: Sequence[ModelRunner],
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[str]],
    options: RequestOptions,
    eos: Sequence[int],
    tokens: int,
    *,
    raw: bool = False,
    tick: Callable[[str], object] = lambda what: None,
) -> Iterator[tuple[int, RecordedText]]:
    """The answers to the users' turns, each as it is done, with the number of its conversation, which it continues.

    Skips a repeated prompt and one that does not fit either context with its answer, and the rest of its conversation.

    Args:
        pair: target and draft.
        options: text n, from 1 on, is drawn with its seed + n, as `pearl bench` draws its n-th.
        tokens: most of an answer.
        raw: use no chat template.
        tick: called with a line of progress.
    """
    seen, (target, draft) = set[tuple[int, ...]](), pair
    most = min(target.context, draft.context) - tokens
    raw = raw or not tokenizer.chat_template
    for number, turns in enumerate(conversations):
        conversation = Conversation(tokenizer, raw)
        for turn in turns:
            prompt = conversation.prompt(turn)
            if len(prompt) > most or tuple(prompt) in seen:
                tick(
                    f"prompt {number + 1} is left out: {'too long' if len(prompt) > most else 'it has come before'}"
                )
                break
            seen.add(tuple(prompt))
            text = _record_one(
                target, draft, prompt, options.changed(seed=options.seed + len(seen)), eos, tokens
            )
            tick(f"prompt {number + 1}: {len(text.answer)} tokens")
            yield number, text
            conversation.add(turn, tokenizer.decode(text.answer))


@torch.inference_mode()
def answers(
    target: ModelRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[RequestOptions],
    eos: Sequence[int],
    most: int,
    tick: Callable[[int], object] = lambda tokens: None,
    shaper: Shaper | None = None,
) -> list[list[int]]:
    """Seeded decoding of up to `most` tokens per prompt; as many prompts at a time as the target has slots.

    Args:
        samplings: one per prompt.
        tick: called after each forward with the number of tokens drawn.
        shaper: of a single prompt's logits.
    """
    written: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(prompts), target.capabilities.slots):
        going = {
            first + slot: slot
            for slot in range(target.capabilities.slots)
            if first + slot < len(prompts)
        }
        draws = {number: DirectDraw(samplings[number]) for number in going}
        for slot in going.values():
            target.rollback(0, slot)
        while going:
            feeds = [
                Feed(written[number][-1:] or prompts[number], 1, slot)
                for number, slot in going.items()
            ]
            for number, row in zip(going, target.forward(feeds), strict=True):
                position = len(prompts[number]) + len(written[number])
                shaped = (
                    row
                    if shaper is None
                    else shaper.chain(row, written[number][-1:] or prompts[number])
                )
                written[number].append(read_draw(draws[number](shaped[0], position)))
            tick(len(going))
            going = {
                n: slot
                for n, slot in going.items()
                if len(written[n]) < most and written[n][-1] not in eos
            }
    return written


def rows_along(
    runner: ModelRunner, prompt: Sequence[int], text: Sequence[int]
) -> Iterator[torch.Tensor]:
    """The logits [some, vocab] for each position of `text`, in pieces. Ids unknown to the runner are fed as 0."""
    known = [token if token < runner.vocab_size else 0 for token in (*prompt, *text[:-1])]
    runner.rollback(0)
    if len(prompt) > 1:
        feed_chain(runner, known[: len(prompt) - 1], 0)
    fed = known[len(prompt) - 1 :]
    for first in range(0, len(fed), _PIECE):
        piece = fed[first : first + _PIECE]
        yield feed_chain(runner, piece, len(piece)).float()


@torch.inference_mode()
def _record_one(
    target: ModelRunner,
    draft: ModelRunner,
    prompt: Sequence[int],
    options: RequestOptions,
    eos: Sequence[int],
    tokens: int,
) -> RecordedText:
    (answer,) = answers(target, [prompt], [options], eos, tokens)
    draw, known = (
        DirectDraw(options),
        min(draft.vocab_size, target.vocab_size),
    )  # further ids are padding
    drawn, features = [], []
    rows = (row for piece in rows_along(draft, prompt, answer) for row in piece[:, :known])
    for position, row in enumerate(rows, len(prompt)):
        drawn.append(read_draw(draw(row, position)))
        *largest, entropy, chosen = shape_of(
            row, torch.tensor(drawn[-1:], device=row.device)
        ).tolist()
        features.append([*largest, *[0.0] * (TOP - len(largest)), entropy, chosen])
    return RecordedText(prompt, answer, drawn, features)
