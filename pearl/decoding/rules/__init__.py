"""The two halves of an acceptance rule, one for each process, and how they are made from the registry's entry.

A half sees logits, tokens and draft distributions; nothing of windows, epochs or processes.  The target's own draw
(`ar`, bonus tokens, going alone) belongs to no rule: it is `direct.DirectDraw` under all of them.

A rule whose draft reads the target's hidden states would get them through its `ModelProposer`: no half needs to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from pearl.config.options import RequestOptions
from pearl.decoding.sampling import Shortlist
from pearl.protocol.events import Judged
from pearl.spec.rules import find

Drafted = tuple[Tensor, Tensor | None]  # a draw, and what the target needs to judge it
Tops = Sequence[Shortlist]


class Proposed(NamedTuple):
    """Draft tokens to judge.

    Attributes:
        logits: [len(tokens), vocab], the target's for their positions.
        rows: the distribution of each token, from the draft half, [vocab], on the host or on the logits' device; empty
            for a rule that needs none.
        start: the position of the first.
        launched: the result of `TargetHalf.launch` for these logits; None: it was not called.
    """

    logits: Tensor
    tokens: Sequence[int]
    rows: Sequence[Tensor]
    start: int
    launched: Tensor | None = None


class DraftHalf(Protocol):
    """How the draft draws, for rules that judge token by token. Positions are absolute."""

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        """Draw a token for each of `positions` from its logits [vocab]; waits for no device.

        Args:
            tops: the shortlist of each row, if they are known.

        Returns:
            (draw, distribution) for each: see `sampling.read_draw`; the distribution [vocab] float32 that it was drawn
            from, None if the rule needs none. Both are on the logits' device.
        """
        ...

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank the tokens that the target will most likely commit at `position`, by this model's row.

        Args:
            top: the largest of the row.
            is_root: whether the text's last token is not this draft's, so that a rule may judge several tokens here.

        Returns:
            (tokens, shares): the `count` likeliest tokens, the likeliest first, and the share of each among `top`.
        """
        ...


class TargetHalf(Protocol):
    """How the target judges. Positions are absolute."""

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Launch what `judge` needs of all rows of logits [n, vocab], for `positions` [n]; waits for no device.

        Returns a tensor [n, ...].  A rule whose text does not depend on what was proposed returns the direct draws, on
        their way to the host.
        """
        ...

    def judge(self, proposed: Proposed) -> Judged:
        """Judge tokens. Raises `NumericalError` where logits that are looked at are not finite."""
        ...


def make_half(side: Literal["target", "draft"], options: RequestOptions) -> Any:
    """Make a `TargetHalf`, a `DraftHalf` or a `joint.JointDraft`, with those of the rule's parameters that it takes."""
    module, _, factory = getattr(options.rule_in_force, side).partition(":")
    half = getattr(import_module(module), factory)
    accepted_names = signature(half).parameters
    arguments = {}
    for name, value in find(options.rule).values(options.parameters).items():
        if name in accepted_names:
            arguments[name] = value
    return half(options, **arguments)
