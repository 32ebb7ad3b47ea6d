"""Acceptance rules. One half of a rule draws tokens in the draft, the other judges in the target.

A half sees logits, tokens and draft distributions, but nothing of windows, epochs or processes.
Rules are declared in `pearl.spec.rules`; `make_half` makes a half from such a declaration.

Some tokens are drawn from the target alone: all tokens of method `ar`, all tokens while there is no
draft, and bonus tokens. These draws belong to no rule: they are `direct.DirectDraw` under every
rule.
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

Drafted = tuple[Tensor, Tensor | None]  # (draw, distribution that the target needs to judge it)
Tops = Sequence[Shortlist]


class Proposed(NamedTuple):
    """Draft tokens to judge, with what a target half needs to judge them.

    Attributes:
        logits: the target's logits [len(tokens), vocab] for the positions of the tokens.
        rows: the distribution [vocab] that the draft half returned with each token, on the host or
            on the device of the logits; empty for a rule that needs none.
        start: the position of the first token.
        launched: the result of `TargetHalf.launch` for these logits; None if it was not called.
    """

    logits: Tensor
    tokens: Sequence[int]
    rows: Sequence[Tensor]
    start: int
    launched: Tensor | None = None


class DraftHalf(Protocol):
    """The draft's half of a rule that judges token by token.

    Positions count from the start of the prompt.
    """

    def draft(
        self, logits: Sequence[Tensor], positions: Sequence[int], tops: Tops = ()
    ) -> list[Drafted]:
        """Draw a token for each of `positions` from its logits [vocab]; do not wait for the device.

        Args:
            tops: the shortlist (the likeliest tokens) for each position; empty if not known.

        Returns:
            (draw, distribution) for each position, both on the device of the logits.
            `sampling.read_draw` reads the token of a draw. The distribution [vocab] float32 is the
            one that the token was drawn from; None if the rule needs none.
        """
        ...

    def likeliest(
        self, top: Shortlist, position: int, count: int, is_root: bool = False
    ) -> tuple[list[int], list[float]]:
        """Rank the tokens that the target will most likely commit at `position`.

        The ranking uses the draft's own logits, because those of the target are not known here.

        Args:
            top: the shortlist (the likeliest tokens) of the draft's logits.
            count: how many tokens to return.
            is_root: whether the token before `position` was not drafted, so that drafting starts
                there. Some rules judge several candidates at such a position.

        Returns:
            (tokens, shares): the likeliest tokens, the likeliest first, and their shares. A share
            is the token's probability if only the likeliest tokens could be drawn.
        """
        ...


class TargetHalf(Protocol):
    """The target's half of a rule. Positions count from the start of the prompt."""

    def launch(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """Launch what `judge` needs to compute from logits [n, vocab] for `positions` [n].

        Does not wait for the device.  Returns a tensor [n, ...], to be passed as
        `Proposed.launched`.  A rule with `RuleSpec.is_proposal_invariant` returns the target's own
        draws as a tensor on the host. They may still be on their way to the host.
        """
        ...

    def judge(self, proposed: Proposed) -> Judged:
        """Judge the draft tokens. Raises `NumericalError` if logits read here are not finite."""
        ...


def make_half(side: Literal["target", "draft"], options: RequestOptions) -> Any:
    """Make one half of a request's rule: a `TargetHalf`, a `DraftHalf` or a `joint.JointDraft`.

    The half is passed those of the rule's parameters that its constructor takes.
    """
    module, _, factory = getattr(options.rule_in_force, side).partition(":")
    half = getattr(import_module(module), factory)
    accepted_names = signature(half).parameters
    arguments = {}
    for name, value in find(options.rule).values(options.parameters).items():
        if name in accepted_names:
            arguments[name] = value
    return half(options, **arguments)
