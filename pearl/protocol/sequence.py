"""A sequence of tokens as target or draft knows it, and how much of it the KV cache holds."""

from collections.abc import Iterable, Sequence

# A Mersenne prime. Products of two residues are still cheap with Python's integers.
_MODULUS = (1 << 61) - 1
_BASE = 1_000_003_579_127


def extend_digest(digest: int, tokens: Iterable[int]) -> int:
    """Append `tokens` to a prefix whose hash is `digest`; return the hash of the longer prefix.

    The hash is a rolling polynomial hash.
    Takes O(1) time per token. The hash is below 2**61; the hash of no tokens is 0.
    """
    for token in tokens:
        digest = (digest * _BASE + token + 1) % _MODULUS
    return digest


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of `a` and `b`."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class TokenSequence:
    """A sequence of committed and pending tokens, and the state of its KV cache.

    Pending tokens are drafted and not judged yet.

    Args:
        piece: how many prompt tokens are computed together; see `Capabilities.prompt_piece`.

    Attributes:
        tokens: all tokens, the committed ones first.
        committed: number of committed tokens. `tokens[committed:]` are pending.
        fed: number of leading tokens whose entries in the KV cache are valid.
        cached: number of tokens in the KV cache. If it exceeds `fed`, the cache has to be rolled
            back to `fed` before the next forward.
        prompt: length of the prefix that the sequence began with.
        digest: rolling hash of the committed tokens.
    """

    def __init__(self, piece: int = 1) -> None:
        self.tokens: list[int] = []
        self.piece = piece
        self.prompt = self.committed = self.fed = self.cached = self.digest = 0

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.committed :]

    @property
    def first_pending(self) -> int | None:
        return self.tokens[self.committed] if self.committed < len(self.tokens) else None

    def held(self, prefix: Sequence[int]) -> int:
        """Return how many leading tokens of `prefix` the KV cache holds."""
        return common_prefix(self.tokens[: self.fed], prefix)

    def restart(self, prefix: Sequence[int]) -> None:
        """Replace the sequence by `prefix`, all of whose tokens are committed.

        The KV cache is reused as far as the old sequence and `prefix` begin with the same tokens.
        The last token always counts as not fed, because the logits after it are needed.
        """
        self.fed = min(self.held(prefix), len(prefix) - 1)
        if self.piece > 1:
            self.fed = min(self.fed, self.prompt) // self.piece * self.piece
        self.tokens = list(prefix)
        self.committed = self.prompt = len(prefix)
        self.digest = extend_digest(0, prefix)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append pending tokens."""
        self.tokens.extend(tokens)

    def accept(self) -> None:
        """Commit the first pending token."""
        self.digest = extend_digest(self.digest, [self.tokens[self.committed]])
        self.committed += 1

    def correct(self, token: int) -> None:
        """Discard all pending tokens, and commit `token` in their place."""
        self.drop_pending()
        self.tokens.append(token)
        self.accept()

    def drop_pending(self) -> None:
        del self.tokens[self.committed :]
        self.fed = min(self.fed, self.committed)

    def feed(self, count: int) -> list[int]:
        """Return the next `count` unfed tokens, and mark them as fed and cached.

        `cached` must not exceed `fed` before the call.
        """
        tokens = self.tokens[self.fed : self.fed + count]
        self.fed += len(tokens)
        self.cached = self.fed
        return tokens
