"""How a request is decoded: method, window, rule, stop policy, and what guesses beside the draft."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, create_model, model_validator

from pearl.config.section import Section
from pearl.errors import ConfigError
from pearl.spec import methods
from pearl.spec.methods import AS_PUBLISHED, METHODS
from pearl.spec.rules import RULES, Parameters, find, named_parameters
from pearl.spec.stops import CAP, FIXED, STOPS, check_stop, decoding_problem

NUMBER_WORDS: dict[str, int | None] = {"auto": None, "off": 0}
WordedNumber = BeforeValidator(lambda given: NUMBER_WORDS.get(given, given) if isinstance(given, str) else given)
Guesses = Annotated[Annotated[int, Field(ge=0, le=methods.MAX_LOOK_AHEAD)] | None, WordedNumber]
Outcomes = Annotated[Annotated[int, Field(ge=0, le=methods.BRANCHES)] | None, WordedNumber]

_Decoding = TypeVar("_Decoding", bound="DecodingConfig")


def with_registered_rules(section: type[_Decoding]) -> type[_Decoding]:
    """The section with the registered methods, rules and stop policies, and an optional field for each parameter."""
    summaries = "; ".join(f"{spec.label()}: {spec.description}" for spec in RULES.values())
    own = "; ".join(f"{spec.label(0)}: {spec.greedy.description}" for spec in RULES.values() if spec.greedy)
    about = f"Acceptance rule under sampling; auto takes coupled by default. {summaries}."
    about += f" At temperature 0 all are greedy decoding but {own}."
    choice = Field(default=next(iter(RULES)), description=about)
    takes = ", ".join(name for name, method in METHODS.items() if method.takes_stops)
    policies = "; ".join(f"{spec.name}: {spec.description}" for spec in STOPS.values())
    stop = Field(
        default=FIXED,
        description=f"Where the draft ends a window before its bound. {policies}. For methods {takes}; "
        f"under sd --gamma is then the bound, {CAP} by default. Texts stay the same, but for sd under a rule whose "
        "text depends on drafts; its distribution stays the same.",
    )
    fields: dict[str, Any] = {
        "method": (Literal[tuple(METHODS)], section.model_fields["method"]),
        "rule": (Literal[tuple(RULES)], choice),
        "draft_stop": (Literal[tuple(STOPS)], stop),
    }
    of_rules, of_stops = named_parameters(RULES.values()), named_parameters(STOPS.values())
    assert not set(of_rules) & set(of_stops), "a flag is either a rule's or a stop policy's"
    for name, declared in (of_rules | of_stops).items():
        whose = "rule" if name in of_rules else "draft_stop"
        described = " ".join(f"Of {whose} {owner}: {one}: {one.description}." for owner, one in declared.items())
        low, high = min(one.low for one in declared.values()), max(one.high for one in declared.values())
        kind = next(iter(declared.values())).kind
        fields[name] = (kind | None, Field(default=None, ge=low, le=high, description=described))
    return create_model(section.__name__, __base__=section, __doc__=section.__doc__, __module__=__name__, **fields)


@with_registered_rules
class DecodingConfig(Section):
    """How a request is decoded: the method, its window, the acceptance rule and that rule's parameters."""

    method: str = Field(default="auto", description="; ".join(f"{m.name}: {m.description}" for m in METHODS.values()))
    window: Literal["stream", "fixed"] = Field(
        default="stream", description="stream: no full windows; fixed: the paper's."
    )
    gamma: int | None = Field(
        default=None, ge=1, le=methods.MAX_GAMMA, description="Window in tokens; default: the measured speed ratio c."
    )
    rule: str = next(iter(RULES))
    draft_stop: str = FIXED
    look_ahead: Guesses = Field(
        default=None,
        description="Most n-grams of the text so far that the target verifies in a forward beside draft tokens; of "
        "these as many as give the most tokens a second. 0 or off: none, as published. Default, auto: "
        f"{methods.LOOK_AHEAD} for ngram and pearl; some of the papers' methods have more.",
    )
    draft_lookup: Guesses = Field(
        default=None,
        description="Most such guesses that the draft verifies in a forward, to draft several tokens by one, as far "
        f"as that pays. 0 or off: none, as published. Default, auto: {methods.DRAFT_LOOKUP} for pearl, else 0.",
    )
    branches: Outcomes = Field(
        default=None,
        description="Most outcomes other than the expected one that the draft prepares for, in cheap rows of its "
        f"forwards. 0 or off: none, as published. Default, auto: {methods.BRANCHES} for pearl and ssd, else 0.",
    )

    siblings: Guesses = Field(
        default=None,
        description="Most runners-up of the draft's tokens that the target verifies beside them in a forward, under "
        "greedy decoding and rule coupled; of these as many as give the most tokens a second. 0 or off: none, as "
        f"published. Default, auto: {methods.SIBLINGS} for pearl, which alone takes them.",
    )

    @property
    def rule_in_use(self) -> str:
        """`rule`; by default method auto takes the one under which no choice of auto changes a text."""
        return "coupled" if self.method == "auto" and "rule" not in self.model_fields_set else self.rule

    def in_use(self, window: int = 0) -> Self:
        """A copy with every default that a text depends on resolved: with it a seed gives the same text again.

        Args:
            window: c of the text, if measured.
        """
        chosen = {**self.guesses, "rule": self.rule_in_use, "gamma": self.gamma_in_use}
        if METHODS[self.method].drafts and METHODS[self.method].bonus:  # whose ratio texts depend on c
            chosen["gamma"] = self.gamma_in_use or window or None
        values = find(self.rule_in_use).values(self.parameters)
        return self.model_copy(update=chosen | values | check_stop(self.draft_stop).values(self.stop_parameters))

    @property
    def guesses(self) -> dict[str, int]:
        """The settings of `AS_PUBLISHED`, with their defaults."""
        method, given = METHODS[self.method], {name: getattr(self, name) for name in AS_PUBLISHED}
        return {name: getattr(method, name) if value is None else value for name, value in given.items()}

    @property
    def parameters(self) -> Parameters:
        """The rule's parameters that are set: (name, value)."""
        return self._set(named_parameters(RULES.values()))

    @property
    def stop_parameters(self) -> Parameters:
        """The stop policy's parameters that are set."""
        return self._set(named_parameters(STOPS.values()))

    def _set(self, names: Iterable[str]) -> Parameters:
        given = ((name, getattr(self, name, None)) for name in names)
        return tuple((name, value) for name, value in given if value is not None)

    @property
    def gamma_in_use(self) -> int | None:
        """`gamma`; for sd with a stop policy by default a bound that seldom ends a window."""
        waits = self.method == "sd" and self.draft_stop != FIXED
        return CAP if waits and self.gamma is None else self.gamma

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = self.method, self.rule, self.parameters, self.draft_stop, self.stop_parameters
        if problem := decoding_problem(*given) or self._guess_problem():
            raise ConfigError(problem)
        return self

    def _guess_problem(self) -> str | None:
        """Why these guesses do not fit the method."""
        method = METHODS[self.method]
        for name in ("look_ahead", "branches", "siblings"):
            if getattr(self, name) and not getattr(method, name):
                takes = ", ".join(each for each, other in METHODS.items() if getattr(other, name))
                return f"{name} is for methods {takes}, not {self.method}"
        if self.draft_lookup and not method.drafts:
            return f"draft_lookup is for methods with a draft, not {self.method}"
        if self.look_ahead == 0 and self.method == "ngram":
            return "method ngram with look_ahead 0 is method ar"
        return "method ssd with branches 0 is method sd" if self.branches == 0 and self.method == "ssd" else None


def wide_window(gamma: int | None) -> str:
    """Why an engine with several slots refuses a window of `gamma` tokens."""
    limit = methods.MAX_WINDOW
    return f"gamma {gamma} is more than {limit}: the other requests of an engine with several slots would wait"
