"""Every stop policy, declared once, in stops.toml.

Configuration, flags, codec, draft worker and the README's table read it from here. To add a policy, write a class in
`pearl/drafting/stops.py` and a table in stops.toml.  The command line reads this file, and starts without torch: so
nothing here may import torch.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import toml

from pearl.spec.methods import METHODS, chosen, methods_that
from pearl.spec.rules import Parameter, Parameters, checked_values, find

FIXED = "fixed"  # no policy: a window ends at its bound
THRESHOLD = "threshold"
CAP = 16  # tokens: default bound of a window of sd that a policy may end earlier


@dataclass(frozen=True)
class StopSpec:
    """A stop policy: what it does and what it needs.

    Attributes:
        description: when the policy ends drafting, in one line.
        looks_at: the values by which the policy decides.
        is_trained: whether the policy needs a file made by `pearl disco train`.
    """

    name: str
    description: str
    looks_at: str
    parameters: tuple[Parameter, ...] = ()
    is_trained: bool = False

    def values(self, parameters: Parameters) -> dict[str, float]:
        """Return the value of each parameter by name, as `checked_values` does."""
        owner = f"draft_stop {self.name}"
        return checked_values(owner, self.parameters, parameters, STOPS.values())


_TABLES = toml.decode(Path(__file__).with_name("stops.toml").read_bytes())
STOPS: dict[str, StopSpec] = {}  # by name, the default first
for _name, _table in _TABLES.items():
    STOPS[_name] = msgspec.convert({"name": _name, **_table}, StopSpec)


def check_stop(name: str) -> StopSpec:
    """Return the policy of this name. Raises ValueError if there is none; the message lists all."""
    return chosen("stop policy", name, STOPS)


def decoding_problem(
    method: str, rule: str, parameters: Parameters, draft_stop: str, stop_parameters: Parameters
) -> str | None:
    """Return why a method, an acceptance rule and a stop policy do not fit together; None if they do.

    Configuration, wire and engine all use this check.
    """
    try:
        method_spec = chosen("method", method, METHODS)
        rule_spec = find(rule)
        rule_spec.values(parameters)
        check_stop(draft_stop).values(stop_parameters)
    except ValueError as error:
        return str(error)
    if draft_stop != FIXED and not method_spec.takes_stops:
        takers = methods_that("takes_stops")
        return f"draft_stop {draft_stop} is for methods {takers}, not {method}, which takes {FIXED}"
    return rule_spec.problem(method, draft_stop)
