"""The two halves of an acceptance rule, one for each process, and how they are made from the registry's entry.

A half sees logits, tokens and draft distributions; nothing of windows, epochs or processes.  The target's own draw
(`ar`, bonus tokens, going alone) belongs to no rule: it is `direct.DirectDraw` under all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pearl.decoding.sampling import Shortlist
from pearl.errors import RequestError
from pearl.protocol.events import Odds
from pearl.protocol.options import Sampling
from pearl.spec.rules import Parameters, RuleSpec, find

_GREEDY = "coupled"  # at temperature 0 every rule is this one: accept the target's likeliest token, and only that


@dataclass(frozen=True)
class Judgement:
    """The first `accepted` tokens are accepted; `token` is the correction for the next, None if all were accepted.

    Attributes:
        odds: of the positions judged; None where the rule does not know the draft's distributions.
        is_candidate: whether `token` was accepted too: another that was drawn from the draft's distribution there.
    """

    accepted: int
    token: int | None
    odds: Odds | None = None
    is_candidate: bool = False


class DraftHalf(Protocol):
    """How the draft draws. Made as `factory(sampling, **parameters)`; positions are absolute."""

    def draft(
        self, logits: torch.Tensor, position: int, top: Shortlist | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A draw for `position` from logits [vocab] (see `sampling.read_draw`), and what the target needs to judge it.

        That is None, or a row [vocab] float32: the distribution that the token was drawn from or, for a rule that
        needs scalars, 0 but at the token.  Both are on the logits' device, and nothing waits for it.  `top`: the
        logits' `sampling.shortlist`, where that is known: it may save time.
        """
        ...

    def draft_together(
        self, logits: Sequence[torch.Tensor], positions: Sequence[int], tops: Sequence[Shortlist | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """`draft` for each of `positions` from its row [vocab]. One by one they take longer."""
        ...

    def likeliest(
        self,
        ids: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float64],
        position: int,
        count: int,
        is_root: bool = False,
    ) -> tuple[list[int], list[float]]:
        """The tokens that the target will most likely commit at `position`, as far as this model's row tells.

        Args:
            ids, logits: the largest of the row, descending; see `sampling.shortlist`.
            is_root: whether the text's last token is not this draft's, so that a rule may judge several tokens here.

        Returns:
            The `count` likeliest, the likeliest first, and the share of each among the likeliest.
        """
        ...


class TargetHalf(Protocol):
    """How the target judges. Made as `factory(sampling, **parameters)`; positions are absolute."""

    def launch(self, logits: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Begin what `judge` needs of all rows of logits [n, vocab], for `positions` [n]; nothing waits for the device.

        Returns a tensor [n, ...]: what each row comes to.  Of a rule whose text does not depend on what was proposed
        it is the direct draw of each row, on its way to the host.
        """
        ...

    def judge(
        self,
        logits: torch.Tensor,
        tokens: Sequence[int],
        rows: Sequence[torch.Tensor],
        start: int,
        launched: torch.Tensor | None = None,
    ) -> Judgement:
        """Judges `tokens` from position `start` on against the target's logits [len(tokens), vocab].

        Args:
            launched: what `launch` gave for these logits; None: it was not asked.
            rows: what the draft half gave with each token, [vocab], on the host or on the logits' device; empty for
                a rule that needs nothing.

        Raises `NumericalError` where logits that are looked at are not finite.
        """
        ...


def rule_in_force(name: str, sampling: Sampling) -> RuleSpec:
    """The rule that decides under this sampling: at temperature 0 the direct one, whichever was asked for.

    Raises `RequestError` for a name that is not registered.
    """
    try:
        asked = find(name)
    except ValueError as error:
        raise RequestError(str(error)) from None
    return find(_GREEDY) if sampling.temperature == 0 else asked


def make_draft_half(name: str, sampling: Sampling, parameters: Parameters = ()) -> DraftHalf:
    """Raises `RequestError` for an unknown rule, and for parameters that it does not take."""
    half: DraftHalf = _make("draft", name, sampling, parameters)
    return half


def make_target_half(name: str, sampling: Sampling, parameters: Parameters = ()) -> TargetHalf:
    """Raises `RequestError` for an unknown rule, and for parameters that it does not take."""
    half: TargetHalf = _make("target", name, sampling, parameters)
    return half


def _make(side: str, name: str, sampling: Sampling, parameters: Parameters) -> Any:
    spec = rule_in_force(name, sampling)
    try:
        values = find(name).values(parameters)
    except ValueError as error:
        raise RequestError(str(error)) from None
    module, _, factory = getattr(spec, side).partition(":")
    return getattr(import_module(module), factory)(sampling, **(values if spec.name == name else {}))
