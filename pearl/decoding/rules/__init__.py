"""The two halves of an acceptance rule, one for each process, and how they are made from the registry's entry.

A half sees logits, tokens and draft distributions; nothing of windows, epochs or processes.  The target's own draw
(`ar`, bonus tokens, going alone) belongs to no rule: it is `direct.DirectDraw` under every rule.

If a rule's draft is to read the target's hidden states, `ModelProposer` can pass them on: no half needs to change.
"""

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
        logits: the target's logits [len(tokens), vocab] for the positions of the tokens.
        rows: the distribution [vocab] that the draft half returned with each token, on the host or on the device of the
            logits; empty for a rule that needs none.
        start: the position of the first token.
        launched: the result of `TargetHalf.launch` for these logits; None if it was not called.
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
            tops: the shortlist of each row of logits; empty if they are not known.

        Returns:
            (draw, distribution) for each position, both on the device of the logits. `sampling.read_draw` reads the
            draw. The distribution [vocab] float32 is the one that the token was drawn from; None if the rule needs
            none.
        """
        ...

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank the tokens that the target will most likely commit at `position`, by this model's logits.

        Args:
            top: the shortlist of the logits.
            is_root: whether the token before `position` is not this draft's; the target may then judge several tokens
                for `position`.

        Returns:
            (tokens, shares): the `count` likeliest tokens, the likeliest first, and the share of each among `top`.
        """
        ...


class TargetHalf(Protocol):
    """How the target judges. Positions are absolute."""

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Launch the computation that `judge` needs of logits [n, vocab] for `positions` [n]; waits for no device.

        Returns a tensor [n, ...].  A rule whose text does not depend on proposals returns the direct draws, which are
        then being copied to the host.
        """
        ...

    def judge(self, proposed: Proposed) -> Judged:
        """Judge the draft tokens. Raises `NumericalError` if logits that this reads are not finite."""
        ...


def make_half(side: Literal["target", "draft"], options: RequestOptions) -> Any:
    """Make the `TargetHalf`, `DraftHalf` or `joint.JointDraft` of a request's rule, with the parameters it takes."""
    module, _, factory = getattr(options.rule_in_force, side).partition(":")
    half = getattr(import_module(module), factory)
    accepted_names = signature(half).parameters
    arguments = {}
    for name, value in find(options.rule).values(options.parameters).items():
        if name in accepted_names:
            arguments[name] = value
    return half(options, **arguments)
