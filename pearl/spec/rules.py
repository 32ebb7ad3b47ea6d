"""All acceptance rules, declared in rules.toml.

Configuration, flags, codec, workers and the README's table read the declarations from here.  To add
a rule, write a file in `pearl/decoding/rules/` with the rule's target half and draft half, and add
a table to rules.toml.  The table only names the halves, and they are imported when they are used,
because the command line reads the table and must start without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from msgspec import toml

from pearl.spec.methods import chosen

MAX_PARAMETERS = 8  # of one rule
BLOCK_LENGTH = "depth"  # name of the parameter that sets the block length, in tokens
# This rule replaces most rules at temperature 0. It then accepts only the target's likeliest token.
GREEDY = "coupled"
Parameters = tuple[tuple[str, float], ...]  # (name, value); omitted parameters take their defaults


class Needs(Enum):
    """What the draft must send with each token, so that the target can judge the token."""

    NOTHING = "nothing"
    SCALARS = "a number"  # sent as a distribution that is 0 except at the token
    DISTRIBUTIONS = "its distribution"  # sent sparse or dense, whichever is smaller


@dataclass(frozen=True)
class Parameter:
    """A parameter of a rule or stop policy, which is a number from `low` to `high`.

    It is a whole number if `default` is an int. Property `kind` is the type of `default`: int or
    float.
    """

    name: str
    low: float
    high: float
    default: int | float
    description: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or not self.name.islower():
            raise ValueError(f"parameter {self.name!r}: the name must be a lower-case identifier")
        self.check(self.default)

    @property
    def kind(self) -> type[int] | type[float]:
        return type(self.default)

    def __str__(self) -> str:
        interval = f"[{self.low:g}, {self.high:g}]"
        return f"{self.name} ({self.kind.__name__} in {interval}, default {self.default:g})"

    def check(self, value: float) -> float:
        """Return `value`, converted to the parameter's `kind`.

        Raises ValueError if `value` is not finite, is out of range, or is not whole although `kind`
        is int.
        """
        if not isfinite(value) or not self.low <= value <= self.high or value != self.kind(value):
            raise ValueError(f"{self.name} {value:g} is not allowed; it takes {self}")
        return self.kind(value)


def checked_values(
    owner: str, declared: Sequence[Parameter], pairs: Parameters, registry: Iterable[Any]
) -> dict[str, float]:
    """Return the value of each declared parameter by name: that in `pairs`, or else the default.

    Args:
        owner: the rule or policy that has the parameters, as messages name it, such as "rule opt".
        declared: the parameters of `owner`.
        pairs: (name, value) of each parameter that has been set.
        registry: all rules or all policies. If `owner` lacks a parameter that others have, the
            message names these others.

    Raises ValueError for a parameter that is unknown, repeated or out of range. The message is one
    line, and says what is allowed.
    """
    by_name = {parameter.name: parameter for parameter in declared}
    kind, _, owner_name = owner.rpartition(" ")
    takes = f"{owner_name} takes {', '.join(map(str, declared)) or 'no parameters'}"
    values = {parameter.name: parameter.default for parameter in declared}
    names = set()
    for name, value in pairs:
        if name in names:
            raise ValueError(f"{name!r} is given twice; {takes}")
        if name not in by_name:
            problem = f"{owner} has no parameter {name!r}; {takes}"
            takers = named_parameters(registry).get(name)
            if takers:
                problem += f". It is one of {kind} {', '.join(takers)}"
            raise ValueError(problem)
        values[name] = by_name[name].check(value)
        names.add(name)
    return values


@dataclass(frozen=True)
class RuleSpec:
    """An acceptance rule: what it does and what it needs.

    Attributes:
        description: what the rule does under sampling, in one line.
        target, draft: the two halves, each as the `module:name` of a factory. A factory is called
            with the request's options, and with those parameters of the rule that the factory's
            signature names. See `TargetHalf` and `DraftHalf` in `pearl.decoding.rules`, and
            `JointDraft`.
        needs: what the draft must send with each token.
        is_exact: whether committed tokens have the target's distribution.
        is_proposal_invariant: whether the text is the same whatever was drafted.
        parameters: the rule's parameters. A rule that has the parameter `BLOCK_LENGTH` judges
            blocks of tokens; any other rule judges single tokens.
        greedy: the rule that replaces this one at temperature 0; None for the rule `GREEDY`, which
            is exact.
        withholds: whether the draft keeps back the last token of each window if its stop policy is
            `threshold`. The target's own token then takes that token's place.
    """

    name: str
    description: str
    target: str
    draft: str = "pearl.decoding.rules.ratio:SampledDraft"
    needs: Needs = Needs.DISTRIBUTIONS
    is_exact: bool = False
    is_proposal_invariant: bool = False
    parameters: tuple[Parameter, ...] = ()
    greedy: RuleSpec | None = None
    withholds: bool = False

    def at(self, temperature: float) -> RuleSpec:
        """Return the rule that decides at this temperature."""
        if temperature:
            return self
        return self.greedy or RULES[GREEDY]

    def label(self, temperature: float = 1.0) -> str:
        """Return the name for display.

        "(not exact)" is appended if the rule is not exact at this temperature.
        """
        if self.at(temperature).is_exact:
            return self.name
        return f"{self.name} (not exact)"

    def values(self, parameters: Parameters) -> dict[str, float]:
        """Return the value of each parameter by name, as `checked_values` does."""
        return checked_values(f"rule {self.name}", self.parameters, parameters, RULES.values())

    @property
    def judges_blocks(self) -> bool:
        return BLOCK_LENGTH in [parameter.name for parameter in self.parameters]

    def block(self, parameters: Parameters) -> int:
        """Return how many tokens are judged as a whole: the block length, or 1 without blocks."""
        return int(self.values(parameters)[BLOCK_LENGTH]) if self.judges_blocks else 1

    def problem(self, method: str, draft_stop: str) -> str | None:
        """Return why the rule cannot be combined with this method and stop policy; None if it can."""
        if not self.judges_blocks:
            return None
        if method == "ssd":
            cause = f"method {method}"
        elif draft_stop != "fixed":
            cause = f"draft_stop {draft_stop}"
        else:
            return None
        return f"{cause} drafts token by token, and rule {self.name} whole blocks; it takes draft_stop fixed, not ssd"


def find(name: str) -> RuleSpec:
    """Return the rule with this name. Raises ValueError, which lists all names, if none has it."""
    return chosen("acceptance rule", name, RULES)


def named_parameters(specs: Iterable[Any]) -> dict[str, dict[str, Parameter]]:
    """Return all parameters of rules or policies, by name and then by owner.

    Example: {"epsilon": {"opt": Parameter(...), "uno": Parameter(...)}}. Owners that have a
    parameter of the same name must declare it with the same `kind`.
    """
    owners: dict[str, dict[str, Parameter]] = {}
    for spec in specs:
        for parameter in spec.parameters:
            owners.setdefault(parameter.name, {})[spec.name] = parameter
    return owners


_TABLES = toml.decode(Path(__file__).with_name("rules.toml").read_bytes())


def _completed(rule: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule's table, completed by its name and by the tables of its parameters.

    In rules.toml a rule only names its parameters; here their tables replace the names.
    """
    parameters = []
    for name in table.get("parameters", ()):
        parameters.append({"name": name, **_TABLES["parameters"][name]})
    completed = {**table, "name": rule, "parameters": parameters}
    if "greedy" in table:
        completed["greedy"] = _completed(rule, table["greedy"])
    return completed


RULES: dict[str, RuleSpec] = {}  # by name, the default first
for _name, _table in _TABLES["rules"].items():
    RULES[_name] = msgspec.convert(_completed(_name, _table), RuleSpec)
