"""The texts and tokens that begin and end a model's reasoning. `reasoning_end` looks for them."""

from collections.abc import Sequence

from pearl.config.options import Reasoning
from pearl.text.reasoning import Tags, is_open_after, tags_for
from pearl.text.stream import Tokenizer


def mark_token(tokenizer: Tokenizer, mark: str) -> int | None:
    """Return the token whose text is `mark`; None if the vocabulary writes `mark` in several tokens."""
    for token in tokenizer.encode(mark, special=False):
        if tokenizer.token(token) == mark:
            return token
    return None


def reasoning_of(tokenizer: Tokenizer, prompt: Sequence[int], prefix: str = "") -> Reasoning | None:
    """Return the marks of the reasoning in the text after a prompt; None if the model does not think.

    Args:
        prefix: the beginning of the reply, if it is part of the prompt.
    """
    tags = tags_for(tokenizer)
    if tags is None:
        return None
    start = _start(tags)
    start_token = mark_token(tokenizer, start)
    if start_token is None:
        start = _as_read(tokenizer, start)
    end_tokens: tuple[int, ...] = ()
    end_token = mark_token(tokenizer, tags.closing)
    if end_token is not None:
        end_tokens = (end_token,)
    is_open = is_open_after(tokenizer, tags, prompt, prefix)
    return Reasoning(start, start_token, (tags.closing,), end_tokens, is_open)


def _start(tags: Tags) -> str:
    """Return the text that reasoning begins with.

    The result is the name of the opening tag's first token. If answers begin with the same token,
    the result is the whole opening tag.
    """
    name = tags.tokens[0]
    return tags.opening if tags.answer.startswith(name) else name


def _as_read(tokenizer: Tokenizer, mark: str) -> str:
    """Return a mark as it appears in a decoded text, where special tokens have no text."""
    return tokenizer.decode(tokenizer.encode(mark, special=False)) or mark
