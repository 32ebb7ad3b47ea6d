"""Translates grammars to llguidance's notation, after a child process has tried to make a parser of each grammar.

Some grammars cost far more than llguidance's limits allow: twenty short patterns in one `allOf` take half a minute, a
`multipleOf` of millions takes gigabytes, and a running call cannot be interrupted. The child process runs this module,
so the module imports little of PEARL.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

from pearl.text.schema import simplified

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SECONDS = 0.3  # of CPU time, to make a parser and its first step; usual schemas take a hundredth
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"  # between the parts of JSON: small models may write nothing else for ever


def limits() -> LLParserLimits:
    """Return a half to a tenth of llguidance's limits: a step of a hostile grammar must not delay the other texts."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


@lru_cache(maxsize=64)
def checked(grammar: str) -> str:
    """Translate a grammar (its kind, a line feed, its text) to llguidance's notation.

    Raises `ImportError`, and `ValueError` if no parser of it can be made. For example "regex\\n[a-z]+".
    """
    import llguidance  # noqa: F401

    command = [sys.executable, "-m", __name__]
    trial = subprocess.run(command, input=grammar.encode(), capture_output=True)
    if trial.returncode:
        raise ValueError(f"its parser would take more than {SECONDS} s to make, or too much memory")
    if trial.stdout:
        raise ValueError(trial.stdout.decode())
    return _translated(grammar)


def _translated(grammar: str) -> str:
    from llguidance import LLMatcher

    kind, _, text = grammar.partition("\n")
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind != "json_schema":
        raise ValueError(f"unknown kind {kind[:20]!r}")
    schema = simplified(text)
    return str(
        LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
    )


def _try(grammar: str) -> str:
    """Return why no parser can be made; empty if one can. A signal ends the process if it takes too long."""
    from llguidance import LLMatcher, LLTokenizer

    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        matcher = LLMatcher(LLTokenizer("byte"), _translated(grammar), log_level=0, limits=limits())
    except ValueError as error:
        return str(error)
    matcher.compute_logit_bias()
    problem = str(matcher.get_error())
    return "no text fits it" if problem.startswith("NoExtensionBias") else problem


if __name__ == "__main__":
    sys.stdout.buffer.write(_try(sys.stdin.buffer.read().decode()).encode())
