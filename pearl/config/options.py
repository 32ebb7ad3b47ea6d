"""The options of a request: one type for Python, the command line, messages and the HTTP schema.

To add an option, add a field to `RequestOptions` and the code that reads the field.  Options are
checked here wherever they come from: a call, a flag, a file, an HTTP body or another process.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, structs

from pearl.config.option_values import (
    CONVERTERS,
    LEAST_REPETITION_PENALTY,
    LONGEST_STOP,
    MAX_BIASES,
    MAX_GRAMMAR,
    MAX_LOGPROBS,
    MAX_PREDICTION,
    MOST_BIAS,
    MOST_PENALTY,
    MOST_PREDICTED,
    MOST_REASONING_ENDS,
    MOST_REPETITION_PENALTY,
    MOST_STOPS,
    TAKES_MANY,
    UNSAMPLED,
    UNSET,
    Biases,
    Default,
    Ends,
    GuessBound,
    Named,
    Schema,
    Stops,
    in_words,
)
from pearl.config.records import LARGEST, Count, Name, Position, Record, Text
from pearl.config.section import shown
from pearl.errors import ConfigError
from pearl.printable import is_unicode
from pearl.spec import methods
from pearl.spec.methods import AS_PUBLISHED, METHODS, WINDOWS, Method, methods_that
from pearl.spec.rules import RULES, RuleSpec, find
from pearl.spec.stops import CAP, FIXED, STOPS, THRESHOLD, check_stop, decoding_problem

_PEARL = METHODS["pearl"]


def described(registry: Mapping[str, Any]) -> str:
    """Return the names and descriptions of a registry's entries, for a help text."""
    return "; ".join(f"{entry.name}: {entry.description}" for entry in registry.values())


def _rules() -> str:
    sampled = []
    greedy = []
    for spec in RULES.values():
        sampled.append(f"{spec.label()}: {spec.description}")
        if spec.greedy:
            greedy.append(f"{spec.label(0)}: {spec.greedy.description}")
    return (
        f"Acceptance rule under sampling; auto takes coupled by default. {'; '.join(sampled)}. "
        f"At temperature 0 all are greedy decoding but {'; '.join(greedy)}."
    )


def _stop_policies() -> str:
    takers = methods_that("takes_stops")
    return (
        f"Where the draft ends a window before its bound. {described(STOPS)}. For methods {takers}; "
        f"under sd --gamma is then the bound, {CAP} by default. Texts stay the same, but for sd under a rule whose "
        "text depends on drafts; its distribution stays the same."
    )


class Reasoning(Record, frozen=True):
    """The marks around the reasoning before an answer, such as <think> and </think>.

    Attributes:
        start: the mark that begins the reasoning.
        start_token: the id of the token whose text is `start`. None if there is no such token; the
            text is then searched for `start`.
        ends: the marks that can end the reasoning; one of them is enough.
        end_tokens: the ids of the tokens whose texts are `ends`. Empty if there are no such tokens;
            the text is then searched for `ends`.
        is_open: whether the reasoning begins in the prompt, which then has the mark `start`.
    """

    start: Text = ""
    start_token: Position | None = None
    ends: Annotated[tuple[Text, ...], Meta(max_length=MOST_REASONING_ENDS)] = ()
    end_tokens: Annotated[tuple[Position, ...], Meta(max_length=MOST_REASONING_ENDS)] = ()
    is_open: bool = False


class RequestOptions(Record, frozen=True):
    """How one text is decoded, how its tokens are drawn, and where it ends.

    A field that is None has a default that depends on the method or on the checkpoint.  `resolved`
    fills in these defaults before the options reach a worker.  Users leave the last fields, from
    `prompt_length` on, to the engine.

        SamplingParams(temperature=0.7, seed=1, max_tokens=200)
        SamplingParams(method="sd", gamma=4, rule="opt", parameters={"epsilon": 0.1})

    However the options are made, a bad field raises `ConfigError`, whose message says what is
    allowed.
    """

    method: Annotated[Name, Meta(description=described(METHODS))] = "auto"
    window: Annotated[Name, Meta(description="stream: no full windows; fixed: the paper's.")] = (
        WINDOWS[0]
    )
    gamma: Annotated[
        Annotated[int, Meta(ge=1, le=methods.MAX_GAMMA)] | None,
        Meta(description="Window in tokens; default: the measured speed ratio c."),
    ] = None
    rule: Annotated[Default[Name], Meta(description=_rules())] = UNSET
    parameters: Annotated[Named, Meta(description="Parameters of the rule: (name, value).")] = ()
    look_ahead: Annotated[
        GuessBound,
        Meta(
            description="Most n-grams of the text so far that the target verifies in a forward beside draft tokens; "
            "of these as many as give the most tokens a second. 0 or off: none, as published. Default, auto: "
            f"{_PEARL.look_ahead} for ngram and pearl; some of the papers' methods have more."
        ),
    ] = UNSET
    draft_lookup: Annotated[
        GuessBound,
        Meta(
            description="Most such guesses that the draft verifies in a forward, to draft several tokens by one, as "
            f"far as that pays. 0 or off: none, as published. Default, auto: {_PEARL.draft_lookup} for pearl, else 0."
        ),
    ] = UNSET
    branches: Annotated[
        Default[Annotated[int, Meta(ge=0, le=methods.MAX_BRANCHES)]],
        Meta(
            description="Most outcomes other than the expected one that the draft prepares for, in cheap rows of its "
            f"forwards. 0 or off: none, as published. Default, auto: {_PEARL.branches} for pearl and ssd, else 0."
        ),
    ] = UNSET
    siblings: Annotated[
        GuessBound,
        Meta(
            description="Most runners-up of the draft's tokens that the target verifies beside them in a forward, "
            "under greedy decoding and rule coupled; of these as many as give the most tokens a second. 0 or off: "
            f"none, as published. Default, auto: {_PEARL.siblings} for pearl, which alone takes them."
        ),
    ] = UNSET
    draft_stop: Annotated[Name, Meta(description=_stop_policies())] = FIXED
    stop_parameters: Annotated[
        Named, Meta(description="Parameters of the stop policy: (name, value).")
    ] = ()
    prediction: Annotated[
        Annotated[str, Meta(max_length=MAX_PREDICTION)] | None,
        Meta(
            description="What the answer probably is, such as the file to be edited: a further source of guesses for "
            "methods that take look-ahead. It changes no text."
        ),
    ] = None
    temperature: Annotated[
        Default[Annotated[float, Meta(ge=0.0, le=LARGEST)]],
        Meta(description="0 is greedy; default: the checkpoint's."),
    ] = UNSET
    top_k: Annotated[
        Default[Position], Meta(description="Keep the k likeliest tokens; 0: all.")
    ] = UNSET
    top_p: Annotated[
        Default[Annotated[float, Meta(gt=0.0, le=1.0)]],
        Meta(description="Keep the likeliest tokens that hold this probability."),
    ] = UNSET
    min_p: Annotated[
        Default[Annotated[float, Meta(ge=0.0, le=1.0)]],
        Meta(description="Drop tokens below this share of the likeliest."),
    ] = UNSET
    seed: Annotated[
        Default[Annotated[int, Meta(ge=0)]],
        Meta(description="Of all random draws; default: drawn, and reported."),
    ] = UNSET
    sample: Annotated[Count, Meta(description="Index of this sample under one seed.")] = 0
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most tokens to generate; default: the checkpoint's, else up to the context."
        ),
    ] = None
    stop: Annotated[
        Stops,
        Meta(
            max_length=MOST_STOPS,
            description="End before any of these strings (may be given several times).",
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[Position, ...],
        Meta(
            max_length=MOST_STOPS,
            description="End at any of these token ids, too (may be given several times).",
        ),
    ] = ()
    ignore_eos: Annotated[bool, Meta(description="Do not end at an end-of-sequence token.")] = False
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(
            description="Report each token's log probability under the target, and those of this many of the likeliest "
            "tokens at its place: at temperature 1, unfiltered, without penalties and biases."
        ),
    ] = None
    repetition_penalty: Annotated[
        Default[Annotated[float, Meta(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)]],
        Meta(
            description="Above 1: make tokens of prompt and text less likely; default: the checkpoint's."
        ),
    ] = UNSET
    presence_penalty: Annotated[
        float,
        Meta(
            ge=-MOST_PENALTY,
            le=MOST_PENALTY,
            description="Is subtracted from the logit of each token that was generated.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Meta(
            ge=-MOST_PENALTY,
            le=MOST_PENALTY,
            description="Likewise, times the number of times that it was generated.",
        ),
    ] = 0.0
    logit_bias: Annotated[
        Biases,
        Meta(
            max_length=MAX_BIASES,
            description=f"Add a number, {MOST_BIAS:g} at most, to the logit of a token id (may be given several "
            "times).",
        ),
    ] = ()
    json_schema: Annotated[
        Schema,
        Meta(
            description='Write JSON that this JSON schema allows; {"type": "object"} is any object.'
        ),
    ] = None
    regex: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR // 16)] | None,
        Meta(description="Write text that this regular expression matches, and end."),
    ] = None
    #: Length of the prompt, after which grammars and penalties for generated tokens apply.
    prompt_length: Position = 0
    #: The grammar that `pearl.text.grammar` makes of `json_schema` or `regex`; empty if there is neither.
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""
    #: Ids of tokens. Any one of them ends a text that has a grammar.
    grammar_ends: Ends = ()
    #: The tokens of `prediction`, at most as many as the text may have.
    predicted: Annotated[tuple[Position, ...], Meta(max_length=MOST_PREDICTED)] = ()
    #: The marks around the reasoning; None if the text has no reasoning. Stop strings and grammars
    #: apply only to the answer after the reasoning.
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        values = []
        for name in OPTIONS:
            value = getattr(self, name)
            if name in CONVERTERS:
                value = CONVERTERS[name](value)
            values.append(value)
        try:
            checked = msgspec.convert(values, _Checked)
        except msgspec.ValidationError:
            raise ConfigError("; ".join(_refusals(values))) from None
        for name in OPTIONS:
            structs.force_setattr(self, name, getattr(checked, name))
        problem = next(self._problems(), None)
        if problem:
            raise ConfigError(problem)

    def _problems(self) -> Iterator[str]:
        """Yield problems that the ranges of single fields do not exclude.

        For example, two fields may contradict each other.
        """
        # Some values are in their ranges, but would make every probability NaN.
        for name, low, high, problem in UNSAMPLED:
            value = getattr(self, name)
            if value and not low <= value <= high:
                yield f"{name}: {problem} (got {value!r})"
        if "" in self.stop:
            yield "stop: a stop string must not be empty"
        if any(len(stop) > LONGEST_STOP for stop in self.stop):
            yield f"stop: {TAKES_MANY['stop']}"
        if not all(map(is_unicode, self.stop)):
            yield "stop: a stop string holds half a surrogate pair, which is no character"
        if self.prediction is not None and not is_unicode(self.prediction):
            yield "prediction: holds half a surrogate pair, which is no character"
        if self.seed is not None and self.seed >= 1 << 64:
            yield f"seed: has at most 64 bits (got {self.seed})"
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            yield "logit_bias: has a token id twice"
        if self.json_schema is not None and self.regex is not None:
            yield "json_schema and regex are two grammars: a text follows one"
        for name in ("json_schema", "regex"):
            if self.ignore_eos and getattr(self, name) is not None:
                yield f"{name} ends a text where it is whole, which ignore_eos forbids"
        if self.window not in WINDOWS:
            yield f"window: unknown window {self.window!r}; choose one of {', '.join(WINDOWS)}"
        misfit = decoding_problem(
            self.method, self.rule_in_use, self.parameters, self.draft_stop, self.stop_parameters
        )
        if misfit is not None:
            yield misfit

    def guess_problem(self) -> str | None:
        """Return why a number of guesses does not fit the method; None if all numbers fit.

        This is only for options as a user passes them. A method that auto has chosen ignores the
        numbers that it cannot use.
        """
        method = METHODS[self.method]
        for name in ("look_ahead", "branches", "siblings"):
            if getattr(self, name) and not getattr(method, name):
                return f"{name} is for methods {methods_that(name)}, not {self.method}"
        if self.branches is not None and self.branches > methods.BRANCHES:
            return (
                f"branches: at most {methods.BRANCHES} outcomes are prepared (got {self.branches})"
            )
        if self.draft_lookup and not method.drafts:
            return f"draft_lookup is for methods with a draft, not {self.method}"
        if self.look_ahead == 0 and self.method == "ngram":
            return "method ngram with look_ahead 0 is method ar"
        if self.branches == 0 and self.method == "ssd":
            return "method ssd with branches 0 is method sd"
        return None

    # ---- defaults ----

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        values = {}
        for name, field in OPTIONS.items():
            value = getattr(self, name)
            if value != field.default:
                values[name] = value
        return values

    def overridden_by(self, options: RequestOptions) -> Self:
        """Return a copy in which the fields that `options` sets have the values of `options`.

        A field of `options` that has its default counts as not set.
        """
        return self.changed(**options.given())

    def changed_method(self, name: str) -> Self:
        """Return a copy with another method.

        Branches are set to 0, and the stop policy to `fixed`, if that method takes none.
        """
        method = METHODS[name]
        branches = self.branches if method.branches else 0
        if method.takes_stops:
            return self.changed(method=name, branches=branches)
        return self.changed(method=name, branches=branches, draft_stop=FIXED, stop_parameters=())

    def switched(self, name: str) -> Self:
        """Return a copy with another method, for one text.

        Settings that belong to the old method get their defaults again. The rule stays the same.
        Method auto has the rule `coupled` by default. With this rule, a seed gives the same text
        under the other method.
        """
        if name == self.method:
            return self
        defaults = dict.fromkeys((*AS_PUBLISHED, "gamma"))
        return self.changed(
            **defaults,
            method=name,
            rule=self.rule_in_use,
            draft_stop=FIXED,
            stop_parameters=(),
        )

    def with_seed(self) -> Self:
        """Return these options if they have a seed, otherwise a copy with a random seed.

        A random seed has 53 bits, so that a JavaScript number can hold it.
        """
        if self.seed is not None:
            return self
        return self.changed(seed=secrets.randbits(53))

    def in_use(self, window: int = 0) -> Self:
        """Return a copy with the method's defaults filled in.

        If a text was decoded with these options, the copy with the same seed gives the same text
        again.

        Args:
            window: the window c, in tokens, with which the text was decoded; 0 if none was
                measured.
        """
        gamma = self.gamma_in_use
        method = METHODS[self.method]
        if method.drafts and method.bonus:  # texts under rule ratio depend on c
            gamma = gamma or window or None
        rule = self.rule_in_use
        return self.changed(
            **self.guesses,
            rule=rule,
            gamma=gamma,
            parameters=find(rule).values(self.parameters),
            stop_parameters=check_stop(self.draft_stop).values(self.stop_parameters),
        )

    def resolved(self, defaults: Mapping[str, Any] = {}) -> Self:
        """Return a copy in which fields that are None have their default values.

        Args:
            defaults: the checkpoint's defaults, by field. A sampling option without a default in
                `defaults` gets the value that switches the option off.
        """
        values = {**NEUTRAL, **defaults}
        unset = {name: value for name, value in values.items() if getattr(self, name) is None}
        return self.in_use().changed(**unset)

    @property
    def rule_in_use(self) -> str:
        """Name of the rule: `rule` or, if that is None, the method's default.

        The default of method auto is `coupled`, so that the methods that auto chooses never change
        a text.
        """
        if self.rule is not None:
            return self.rule
        if self.method == "auto":
            return "coupled"
        return next(iter(RULES))

    @property
    def guesses(self) -> dict[str, int]:
        """The limits on guesses, siblings and branches; maps an option's name to its value.

        The options are the keys of `spec.methods.AS_PUBLISHED`. For an option that is None, the
        value is the method's default.
        """
        bounds = {}
        for name in AS_PUBLISHED:
            bounds[name] = getattr(self, name)
            if bounds[name] is None:
                bounds[name] = getattr(self.method_spec, name)
        return bounds

    @property
    def gamma_in_use(self) -> int | None:
        """The option `gamma`, or `CAP` if `gamma` is None and method sd has a stop policy.

        `CAP` (in `pearl.spec.stops`) is a bound that windows seldom reach under a stop policy.
        """
        if self.gamma is None and self.method == "sd" and self.draft_stop != FIXED:
            return CAP
        return self.gamma

    # ---- what follows from the options once they are resolved ----

    @property
    def method_spec(self) -> Method:
        """The method's declaration."""
        return METHODS[self.method]

    @property
    def rule_in_force(self) -> RuleSpec:
        """The rule that judges draft tokens at this temperature."""
        return find(self.rule).at(self.temperature)

    @property
    def commits_draws(self) -> bool:
        """Whether every committed token is the target's own draw, so that proposals cannot change the text."""
        return self.rule_in_force.is_proposal_invariant

    @property
    def sends_runners_up(self) -> bool:
        """Whether the draft sends the runners-up of its tokens, so that the target can verify these too."""
        return self.siblings > 0 and self.method_spec.siblings > 0 and self.commits_draws

    @property
    def prepares_bonus(self) -> bool:
        """Whether the draft prepares branches for the bonus token, which follows a full window."""
        return self.branches > 0 and self.method_spec.bonus

    @property
    def withholds(self) -> bool:
        """Whether the draft does not send a token that ends a window; see `RuleSpec.withholds`."""
        return self.draft_stop == THRESHOLD and self.rule_in_force.withholds

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before temperature and filters: by a penalty, a bias or a grammar."""
        if self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty:
            return True
        return bool(self.logit_bias or self.grammar)

    @property
    def has_grammar(self) -> bool:
        """Whether the user asks for text that follows a JSON schema or a regular expression."""
        return self.json_schema is not None or self.regex is not None


OPTIONS = {field.name: field for field in structs.fields(RequestOptions)}
NEUTRAL = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
}
_Checked = msgspec.defstruct(
    "_Checked", [(name, field.type) for name, field in OPTIONS.items()], array_like=True
)


def _refusals(values: Sequence[Any]) -> Iterator[str]:
    """Yield a message for each field whose value is not allowed; the message says what the field takes."""
    for (name, field), value in zip(OPTIONS.items(), values, strict=True):
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            problem = in_words(str(error))
            if isinstance(value, tuple):
                problem = TAKES_MANY.get(name, problem)
            yield f"{name}: {problem} (got {shown(value)})"
