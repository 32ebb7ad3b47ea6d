"""Recorded texts: texts of the target, and the token that the draft draws at each position of them.

The target writes the texts. Then the draft reads them and draws its own token for each position.
Both run in this process. Nothing is timed, so the result depends only on the models and the seed.
To replay a published method it suffices to know which draft tokens are right.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq

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

_PIECE = 64  # positions per forward; more would need much memory, as logits span the vocabulary


@dataclass(frozen=True)
class RecordedText:
    """One text. `drawn` and `features` have an item for each token of `answer`.

    Attributes:
        drawn: the token that the draft draws at this position.
        features: the ten largest probabilities of the draft at this position, the entropy of its
            distribution in nats, and the probability of the drawn token; all at temperature 1,
            without top-k and top-p.
        conversation: number of the conversation, from 0.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    drawn: Sequence[int]
    features: Sequence[Sequence[float]]
    conversation: int = 0

    @property
    def right(self) -> list[bool]:
        """For each token of the answer, whether the draft draws that token."""
        return list(map(eq, self.drawn, self.answer))


@dataclass(frozen=True)
class RecordedTexts:
    """The texts of one pair.

    Attributes:
        target, draft: the names of the pair's models.
    """

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
) -> RecordedTexts:
    """Load a pair and record its greedy answers of at most `tokens` tokens; see `record`.

    Raises `ConfigError` if no prompt fits the context, and `ModelError` if the draft has another
    vocabulary.
    """
    trust = config.trust_remote_code
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=trust)
    draft_tokenizer, _ = load_tokenizer(config.draft, trust_remote_code=trust)
    check_same_vocabulary(tokenizer, draft_tokenizer, config.target, config.draft)
    pair = [make_runner(config.model(role), place(config, role)) for role in config.roles]
    options = RequestOptions().resolved()
    recorded = record(
        pair, tokenizer, conversations, options, defaults.eos, tokens, raw=raw, tick=tick
    )
    texts = list(recorded)
    if not texts:
        raise ConfigError(
            "no prompt fits the context: shorten them, lower max_tokens, or raise max_context"
        )
    return RecordedTexts(config.target, config.draft, texts)


def record(
    pair: Sequence[ModelRunner],
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[str]],
    options: RequestOptions,
    eos: Sequence[int],
    tokens: int,
    *,
    raw: bool = False,
    tick: Callable[[str], object] = lambda line: None,
) -> Iterator[RecordedText]:
    """Yield the answer to each turn of the user; the next turn comes after this answer.

    A conversation ends early at a prompt that is too long, or that was recorded before. A prompt is
    too long if the prompt and `tokens` more tokens do not fit both models' contexts.

    Args:
        pair: target and draft.
        options: sampling options. The seed of the n-th text, from 1 on, is `options.seed` + n, as
            in `pearl bench`.
        tokens: the most tokens of an answer.
        raw: use no chat template.
        tick: called with a line of progress.
    """
    seen = set()
    target, draft = pair
    longest = min(target.context, draft.context) - tokens
    raw = raw or not tokenizer.chat_template
    for number, turns in enumerate(conversations):
        conversation = Conversation(tokenizer, raw)
        for turn in turns:
            prompt = conversation.prompt(turn)
            if len(prompt) > longest:
                tick(f"prompt {number + 1} is left out: too long")
                break
            if tuple(prompt) in seen:
                tick(f"prompt {number + 1} is left out: it has come before")
                break
            seen.add(tuple(prompt))
            seeded = options.changed(seed=options.seed + len(seen))
            (answer,) = answers(target, [prompt], [seeded], eos, tokens)
            drawn, features = _drawn_along(draft, prompt, answer, seeded, target.vocab_size)
            tick(f"prompt {number + 1}: {len(answer)} tokens")
            yield RecordedText(prompt, answer, drawn, features, number)
            conversation.add(turn, tokenizer.decode(answer))


@torch.inference_mode()
def answers(
    target: ModelRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[RequestOptions],
    eos: Sequence[int],
    limit: int,
    tick: Callable[[int], object] = lambda tokens: None,
    shaper: Shaper | None = None,
) -> list[list[int]]:
    """Decode up to `limit` tokens per prompt, as many prompts at a time as there are slots.

    Args:
        samplings: sampling options and seed for each prompt.
        eos: ids after which a text ends.
        tick: called after each forward with the number of tokens drawn.
        shaper: changes the logits; only for a single prompt.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    slots = target.capabilities.slots
    for start in range(0, len(prompts), slots):
        numbers = range(start, min(start + slots, len(prompts)))
        draws = {number: DirectDraw(samplings[number]) for number in numbers}
        for number in numbers:
            target.rollback(0, number - start)
        unfinished = list(numbers)
        while unfinished:
            feeds = []
            for number in unfinished:
                fed = texts[number][-1:] or prompts[number]
                feeds.append(Feed(fed, 1, number - start))
            rows = target.forward(feeds)
            for number, feed, row in zip(unfinished, feeds, rows, strict=True):
                text = texts[number]
                if shaper is not None:
                    row = shaper.chain(row, list(feed.tokens))
                position = len(prompts[number]) + len(text)
                text.append(read_draw(draws[number](row[0], position)))
            tick(len(unfinished))
            for number in list(unfinished):
                if len(texts[number]) >= limit or texts[number][-1] in eos:
                    unfinished.remove(number)
    return texts


def rows_along(
    runner: ModelRunner, prompt: Sequence[int], text: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield the logits [positions, vocab] that predict `text`, in pieces. Ids unknown to the runner are fed as 0."""
    ids = [*prompt, *text[:-1]]
    for i, token in enumerate(ids):
        if token >= runner.vocab_size:
            ids[i] = 0
    runner.rollback(0)
    if len(prompt) > 1:
        feed_chain(runner, ids[: len(prompt) - 1], 0)
    for start in range(len(prompt) - 1, len(ids), _PIECE):
        piece = ids[start : start + _PIECE]
        yield feed_chain(runner, piece, len(piece)).float()


@torch.inference_mode()
def _drawn_along(
    draft: ModelRunner,
    prompt: Sequence[int],
    answer: Sequence[int],
    options: RequestOptions,
    target_vocab: int,
) -> tuple[list[int], list[list[float]]]:
    """Return for each position of an answer the draft's token, and the features there."""
    draw = DirectDraw(options)
    vocab = min(draft.vocab_size, target_vocab)  # ids that only one model has are padding
    drawn: list[int] = []
    features = []
    for row in chain.from_iterable(rows_along(draft, prompt, answer)):
        row = row[:vocab]
        token = read_draw(draw(row, len(prompt) + len(drawn)))
        *largest, entropy, chosen = shape_of(row, torch.tensor([token], device=row.device)).tolist()
        missing = [0.0] * (TOP - len(largest))
        drawn.append(token)
        features.append([*largest, *missing, entropy, chosen])
    return drawn, features
