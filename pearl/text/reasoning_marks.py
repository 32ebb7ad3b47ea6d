"""The marks of a model's reasoning as tokens: what `reasoning_end` follows a text by."""

from __future__ import annotations

from collections.abc import Sequence

from pearl.config.options import Reasoning
from pearl.text.reasoning import Tags, tags_of
from pearl.text.stream import Tokenizer

_TAIL = 16  # tokens of a prompt that may hold an opening mark at its end


def mark_token(tokenizer: Tokenizer, mark: str) -> int | None:
    """Return the token that is this mark; None where the vocabulary writes it in several."""
    for token in tokenizer.encode(mark, special=False):
        if tokenizer.token(token) == mark:
            return token
    return None


def reasoning_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
    """Return the marks of the reasoning in the text after a prompt; None if the model does not think."""
    tags = tags_of(tokenizer.chat_template)
    if tags is None:
        return None
    ends = [tags.end]
    if tags.other_end:
        ends.append(tags.other_end)
    end_tokens = []
    for end in ends:
        token = mark_token(tokenizer, end)
        if token is not None:
            end_tokens.append(token)
    if len(end_tokens) < len(ends):
        end_tokens = []
    start_token = mark_token(tokenizer, tags.start)
    is_open = _is_open(tokenizer, tags, start_token, end_tokens, prompt[-_TAIL:])
    return Reasoning(tags.start, start_token, tuple(ends), tuple(end_tokens), is_open)


def _is_open(
    tokenizer: Tokenizer,
    tags: Tags,
    start_token: int | None,
    end_tokens: Sequence[int],
    prompt_end: Sequence[int],
) -> bool:
    """Return whether a prompt ends with the opening mark, and perhaps white space."""
    if start_token is None:
        return tags.are_open(tokenizer.decode(prompt_end))
    for start in range(len(prompt_end) - 1, -1, -1):
        if prompt_end[start] == start_token:
            return not tokenizer.decode(prompt_end[start + 1 :]).strip()
        if prompt_end[start] in end_tokens:
            return False
    return False
