"""Translates grammars to llguidance's notation. A child process tries each grammar first.

Some grammars cost far more than llguidance's limits allow. Twenty short patterns in one `allOf`
take half a minute, a `multipleOf` of millions takes gigabytes, and llguidance cannot be interrupted
while it works. The child process runs this module, so the module imports little of PEARL.
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
    """Return limits that are a half to a tenth of llguidance's own.

    A step of a hostile grammar must not delay the other texts.
    """
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
    """Translate a grammar to llguidance's notation.

    `grammar` has a kind, a line feed and a text, for example "regex\\n[a-z]+". Raises `ValueError`
    if no parser can be made for it, and `ImportError` if llguidance is not installed.
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
    """Return why no parser can be made for a grammar; empty if one can be made.

    A signal ends the process if this takes more than `SECONDS` of CPU time.
    """
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
