"""What a request asks for, as one object: made once, checked once, carried whole by every message and command.

A new option is a field of `RequestOptions` and one place that reads it.  The ranges here are those of the wire: what a
peer sends is decoded into these types.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Self

from msgspec import Meta, Struct, structs

from pearl.config.sampling import (
    LEAST_REPETITION_PENALTY,
    MAX_BIASES,
    MAX_GRAMMAR,
    MAX_LOGPROBS,
    MOST_BIAS,
    MOST_EOS,
    MOST_PENALTY,
    MOST_REPETITION_PENALTY,
    MOST_STOPS,
    sampling_problem,
    stop_problem,
)
from pearl.spec.methods import MAX_BRANCHES, MAX_GAMMA, MAX_LOOK_AHEAD, METHODS, WINDOWS, Method
from pearl.spec.rules import MAX_PARAMETERS, RuleSpec, find
from pearl.spec.stops import FIXED, THRESHOLD, decoding_problem

MAX_TEXT = 1 << 16  # bytes of UTF-8: an error message, a stop string
_LARGEST = sys.float_info.max

Position = Annotated[int, Meta(ge=0, lt=2**31)]  # an index in a text, a token id, a length
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Word = Annotated[int, Meta(ge=0)]  # 64 bits: msgpack has no larger integer
Name = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT // 4)]
Ends = Annotated[tuple[Position, ...], Meta(max_length=MOST_EOS)]
Penalty = Annotated[float, Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
Parameters = Annotated[tuple[tuple[Name, Finite], ...], Meta(max_length=MAX_PARAMETERS)]  # one left out: its default
Guesses = Annotated[int, Meta(ge=0, le=MAX_LOOK_AHEAD)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A class that travels: on the wire an array of its fields, in their order."""

    def changed(self, **fields: Any) -> Self:
        """A copy with other values for these fields."""
        return structs.replace(self, **fields)


class Shaping(Record, frozen=True):
    """How the text before them changes logits; see `pearl.decoding.shaping`.

    Attributes:
        prompt: number of tokens that were not generated.
        repetition_penalty: 1 does nothing; the other penalties do nothing at 0.
        logit_bias: (token id, what is added to its logit).
        grammar: what the generated text keeps to (of `pearl.text.grammar`), until one of `ends`; empty: to none.
    """

    prompt: Position
    repetition_penalty: Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[Position, Bias], ...], Meta(max_length=MAX_BIASES)] = ()
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""
    ends: Ends = ()


class Sampling(Record, frozen=True):
    """How to turn logits into tokens; all resolved. `temperature` 0 is greedy; top_k 0, top_p 1, min_p 0: off.

    Attributes:
        sample: the caller's index of this text among those of one seed.
        shaping: None where logits are taken as they are.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=_LARGEST)] = 0.0
    top_k: Position = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Word = 0
    sample: Count = 0
    shaping: Shaping | None = None


class RequestOptions(Record, frozen=True):
    """How a request is decoded.

    Attributes:
        sampling: what its tokens are drawn from.
        gamma: the fixed window in tokens; None: the measured speed ratio.
        parameters: of the acceptance rule, (name, value).
        look_ahead: most guesses, made without a model, that the target is fed in one forward; 0: none.
        draft_lookup: likewise of the draft.
        branches: most other outcomes that the draft prepares continuations for at a time.
        siblings: most runners-up of the draft that the target is fed in one forward.
        draft_stop: the policy that ends the draft's windows before their bound; `stop_parameters`: its own.
        stops: strings that end the text.
        logprobs: number of alternatives to report beside each token's log probability; None: report none.
    """

    method: Name = "pearl"
    window: Name = "stream"
    gamma: Annotated[int, Meta(ge=1, le=MAX_GAMMA)] | None = None
    rule: Name = "ratio"
    parameters: Parameters = ()
    look_ahead: Guesses = 0
    draft_lookup: Guesses = 0
    branches: Annotated[int, Meta(ge=0, le=MAX_BRANCHES)] = 0
    siblings: Guesses = 0
    draft_stop: Name = FIXED
    stop_parameters: Parameters = ()
    sampling: Sampling = Sampling()
    stops: Annotated[tuple[Text, ...], Meta(max_length=MOST_STOPS)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def method_spec(self) -> Method:
        """The method's declaration."""
        return METHODS[self.method]

    @property
    def commits_draws(self) -> bool:
        """Whether the target's own draw is always what is committed, so that proposals cannot change the text."""
        return self.rule_in_force.is_proposal_invariant

    @property
    def sends_runners_up(self) -> bool:
        """Whether the draft says which tokens were nearly drawn, for the target to verify them too."""
        return self.siblings > 0 and self.method_spec.siblings > 0 and self.commits_draws

    @property
    def prepares_bonus(self) -> bool:
        """Whether the target draws the token behind a window itself, and the draft prepares for that outcome too."""
        return self.branches > 0 and self.method_spec.bonus

    @property
    def rule_in_force(self) -> RuleSpec:
        """The rule that decides at this temperature."""
        return find(self.rule).at(self.sampling.temperature)

    @property
    def withholds(self) -> bool:
        """Whether the draft keeps back the token that ends its window; the target's own draw takes its place."""
        return self.draft_stop == THRESHOLD and self.rule_in_force.withholds

    def problem(self) -> str | None:
        """Why no engine can serve this, though each field is in its range."""
        return (
            decoding_problem(self.method, self.rule, self.parameters, self.draft_stop, self.stop_parameters)
            or (
                None
                if self.window in WINDOWS
                else f"unknown window {self.window!r}; choose one of {', '.join(WINDOWS)}"
            )
            or sampling_problem(self.sampling.temperature, self.sampling.top_p, self.sampling.min_p)
            or ("a stop string must not be empty" if "" in self.stops else stop_problem(self.stops))
            or self._bias_problem()
        )

    def _bias_problem(self) -> str | None:
        biases = self.sampling.shaping.logit_bias if self.sampling.shaping is not None else ()
        return "logit_bias has a token id twice" if len(dict(biases)) < len(biases) else None
