"""All stop policies, declared in stops.toml. A stop policy may end a draft's window early.

Configuration, flags, codec, draft worker and the README's table read the declarations from here.
To add a policy, write a class in `pearl/drafting/stops.py`, and add a table to stops.toml.  The
command line reads this file and must start without torch, so nothing here may import torch.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import toml

from pearl.spec.methods import METHODS, chosen, methods_that
from pearl.spec.rules import Parameter, Parameters, checked_values, find

FIXED = "fixed"  # no policy: a window ends only at its bound
THRESHOLD = "threshold"
CAP = 16  # tokens: default bound of a window of method sd that a policy may end early


@dataclass(frozen=True)
class StopSpec:
    """A stop policy: what it does and what it needs.

    Attributes:
        description: when the policy ends drafting, in one line.
        looks_at: what the policy decides by, in one line.
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
    """Return the policy with this name. Raises ValueError, listing all names, if none has it."""
    return chosen("stop policy", name, STOPS)


def decoding_problem(
    method: str, rule: str, parameters: Parameters, draft_stop: str, stop_parameters: Parameters
) -> str | None:
    """Return why a method, an acceptance rule and a stop policy do not fit; None if they fit.

    Options are checked here wherever they come from: a user, the engine or another process.
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
