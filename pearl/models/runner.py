"""The one interface between the runtime and a model.

This module knows nothing of drafts, targets, windows or processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pearl.errors import RequestError
from pearl.models.feeds import Feed, Tokens
from pearl.models.threads import use_torch_threads

__all__ = ["Capabilities", "Feed", "ModelRunner", "Tokens", "check_feeds", "feed_chain"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runner can do beyond feeding one chain to one slot.

    Attributes:
        slots: number of sequences that the runner holds at the same time.
        tree_nodes: the most tokens of a tree; 0: the runner takes no trees.
        launches: whether a forward of few tokens returns before the device has computed it. If so,
            its tokens may be a tensor that the device has not computed yet.
        row_invariant: whether the bits of a position's logits depend neither on how its sequence
            was cut into chains nor on the other feeds of the forward.
        features: width of the hidden states that the runner keeps for each token fed, for a
            drafting head; 0: it keeps none. See `ForwardRunner`.
        together: whether the feeds of several slots are one forward. Otherwise they are computed
            one after the other.
        prompt_piece: number of a prompt's positions that are computed together, as a piece. Another
            text can reuse the cache of a prompt only in whole pieces, because positions after the
            last whole piece may have been computed in another way, with other bits. 1: another text
            can reuse the cache up to any position.
    """

    slots: int = 1
    tree_nodes: int = 0
    launches: bool = False
    row_invariant: bool = False
    features: int = 0
    together: bool = True
    prompt_piece: int = 1


class ModelRunner(Protocol):
    """A causal language model with a KV cache that can be rolled back, for one or several sequences ("slots").

    Attributes:
        vocab_size: number of token ids that the logits cover (the model's own count, padding ids included).
        context: the most tokens that a slot can hold.
        device: where the logits live.
        capabilities: what the runner supports; a feed that needs more raises `RequestError`.
        weights: type of the weights: float32, bfloat16, int8 ...; empty for a model without weights.
    """

    vocab_size: int
    context: int
    device: torch.device
    capabilities: Capabilities
    weights: str = ""

    def length(self, slot: int = 0) -> int:
        """Return the number of tokens that the slot holds. A tree does not count before `keep`."""
        ...

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        """Feed each slot its tokens; return for each feed its logits [rows, vocab_size], float32.

        A row holds the logits for the position after its token.  A chain continues its slot's
        sequence at once.  A tree waits for `keep`, which chooses the path that continues the
        sequence; another feed to the slot, or a rollback, discards the tree.

        A slot may have only one of the feeds.  Raises `RequestError`, with the cache unchanged, if
        a context would overflow or a feed needs a capability that the runner lacks.  The returned
        tensors belong to the caller: a later forward does not overwrite them.
        """
        ...

    def rollback(self, length: int, slot: int = 0) -> None:
        """Forget all but the first `length` tokens, in O(1). 0 <= length <= self.length(slot).

        A forward after a rollback returns the same logits as on a cache that was filled from scratch.
        """
        ...

    def keep(self, path: Sequence[int], slot: int = 0) -> None:
        """Continue the slot's sequence by the nodes of `path`, a path of the tree that was fed last.

        Each node of the path is the parent of the next.  The slot is then as if only the path had
        been fed.  Only runners that take trees have this method.
        """
        raise AssertionError(f"{type(self).__name__} takes no trees")

    def fork(self, slot: int, into: int, length: int | None = None, shared: int = 0) -> None:
        """Replace the sequence of slot `into` by the first `length` tokens of `slot`.

        Only runners with several slots have this method.

        Args:
            length: number of tokens to copy; None: all.
            shared: how many of these tokens `into` holds already, so that they need not be copied.
        """
        raise AssertionError(f"{type(self).__name__} holds one sequence")

    def use_threads(self, count: int) -> Sequence[int]:
        """Compute with `count` threads of a CPU from now on, the calling thread included.

        No bit of a result may depend on `count`.  Return the native ids of the other threads, so
        that the caller can give each of them a core.  They are torch's threads, unless the runner
        has threads of its own.
        """
        return use_torch_threads(count)

    def synchronize(self) -> None:
        """Wait until the device has finished all forwards. On a CPU they are finished already."""
        if self.device.type == "cuda":
            # Only the current stream, not the stream that sends rows to the other worker.
            torch.cuda.current_stream(self.device).synchronize()

    def is_done(self) -> bool:
        """Return whether `synchronize` would return at once."""
        return self.device.type != "cuda" or bool(torch.cuda.current_stream(self.device).query())


def feed_chain(
    runner: ModelRunner, tokens: Tokens, rows: int, slot: int = 0, prompt: bool = False
) -> torch.Tensor:
    """Feed one chain; return its logits [rows, vocab_size]."""
    return runner.forward([Feed(tokens, rows, slot, prompt=prompt)])[0]


def check_feeds(feeds: Sequence[Feed], runner: ModelRunner, name: str) -> None:
    """Raise `RequestError` if `runner` cannot take the feeds. Messages call the runner `name`."""
    slots = runner.capabilities.slots
    tree_nodes = runner.capabilities.tree_nodes
    for feed in feeds:
        if not 0 <= feed.slot < slots:
            raise RequestError(f"{name} holds {slots} sequences; there is no slot {feed.slot}")
        if feed.parents is not None and len(feed.tokens) > tree_nodes:
            limit = "chains of tokens, and no trees"
            if tree_nodes:
                limit = f"trees of at most {tree_nodes} tokens"
            raise RequestError(f"{name} takes {limit}")
        end = runner.length(feed.slot) + feed.depth
        if end > runner.context:
            raise RequestError(
                f"{end} tokens do not fit the context of {runner.context}. Shorten the prompt, lower "
                "max_tokens, or load the model with a larger context."
            )
        # On a GPU an id outside the table would abort the whole process, not only this request.
        is_known = isinstance(feed.tokens, torch.Tensor)
        if not is_known and not 0 <= min(feed.tokens) <= max(feed.tokens) < runner.vocab_size:
            raise RequestError(
                f"A token id lies outside the model's vocabulary of {runner.vocab_size}: "
                "the prompt was made with another model's tokenizer."
            )
    assert len({feed.slot for feed in feeds}) == len(feeds), "one feed a slot"
