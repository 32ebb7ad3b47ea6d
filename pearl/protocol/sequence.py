"""One sequence as target or draft has it: the committed prefix, the pending tokens, and what the KV cache holds."""

from collections.abc import Iterable, Sequence

# A Mersenne prime: products of two residues stay cheap in Python's integers.
_MODULUS = (1 << 61) - 1
_BASE = 1_000_003_579_127


def extend_digest(digest: int, tokens: Iterable[int]) -> int:
    """Return a prefix's rolling polynomial hash, extended by `tokens`. O(1) per token; the hash is below 2**61."""
    for token in tokens:
        digest = (digest * _BASE + token + 1) % _MODULUS
    return digest


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class TokenSequence:
    """`tokens[:committed]` is the prefix, the rest is pending; the KV cache holds `tokens[:fed]`.

    `cached` counts the tokens in the cache, valid or not: if `cached` exceeds `fed`, a rollback is due before the next
    forward. `prompt` is the length of the prefix that the sequence began with.

    Args:
        piece: see `Capabilities.prompt_piece`.
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
        """Return how many tokens of `prefix`, from the first on, the cache holds."""
        return common_prefix(self.tokens[: self.fed], prefix)

    def restart(self, prefix: Sequence[int]) -> None:
        """Begin with a whole prefix; keep the cache of the tokens that this prefix has in common with the old text.

        The last token is always fed again, to get its row.
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
        """Mark the next `count` unfed tokens as cached and return them. Needs `cached <= fed`."""
        tokens = self.tokens[self.fed : self.fed + count]
        self.fed += len(tokens)
        self.cached = self.fed
        return tokens
