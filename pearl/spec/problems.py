"""Whether a method, an acceptance rule and a stop policy fit together: one check for configuration, wire and engine."""

from __future__ import annotations

from pearl.spec.methods import METHODS, check_method
from pearl.spec.rules import Parameters, find
from pearl.spec.stops import FIXED, check_stop


def decoding_problem(
    method: str, rule: str, parameters: Parameters, draft_stop: str, stop_parameters: Parameters
) -> str | None:
    """Why a method, an acceptance rule and a stop policy do not fit together."""
    try:
        way, spec = check_method(method), find(rule)
        spec.values(parameters)
        check_stop(draft_stop).values(stop_parameters)
    except ValueError as error:
        return str(error)
    if draft_stop != FIXED and not way.takes_stops:
        takes = ", ".join(name for name, each in METHODS.items() if each.takes_stops)
        return f"draft_stop {draft_stop} is for methods {takes}, not {method}, which takes {FIXED}"
    return spec.problem(method, draft_stop)
