"""`pearl check`: whether logits and texts are equal bit for bit. Arguments and a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pearl.cli import listed
from pearl.cli.numbers import STDOUT, json_option, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.cli.tables import Bars, print_table
from pearl.config import Settings
from pearl.lab.distill.prompts import read_prompts
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.engine.request import Prompt
    from pearl.lab.bench.exactness import Finding

_TOKENS = 16  # of a text; with two prompts the embedded pair takes minutes


@listed("See and check", "pearl check --target my-model --draft my-small-model")
@click.command("check", cls=SettingsCommand)
@click.option("--prompts", type=click.Path(path_type=Path), help="File of prompts to decode.  [default: three of ours]")
@click.option("--limit", type=click.IntRange(min=1), default=2, show_default=True, metavar="N", help="Prompts of it.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Also kill the draft in the middle of texts.")
@json_option
@settings_options
def check_bits(settings: Settings, prompts: Path | None, limit: int, kill: bool, to: Path | None) -> None:
    """Compare logits and texts of all methods bit for bit.

    Exit code 1 if any differ. Logits: one sequence, cut into forwards at random. Texts: every method and window, also
    with the draft killed, of prompts one after the other in one cache and of a second turn of the first; some methods
    with penalties, with a grammar (extra structured), and several texts at once in slots. They are compared with the
    target alone, decoded from an empty cache with the same seed; under the ratio rule with each other. This does not
    check that sampled texts have the target's distribution; the project's tests do.
    Texts have up to --max-tokens, 16 by default: a first look; --limit 4 --max-tokens 48 is thorough. With --datastore,
    method ngram is compared with and without it.
    """
    from pearl.lab.bench.exactness import PROMPTS, check_pair

    log_to_stderr("error" if kill else settings.engine.log_level, "front")
    params = settings.sampling.with_seed()
    length = {"max_tokens": params.max_tokens or _TOKENS, "stop": ()}  # the reference knows no stop strings
    params = params.model_copy(update=length | {"temperature": params.temperature or 1.0})
    asked: list[Prompt] = [*(read_prompts(prompts, limit) if prompts else PROMPTS[:limit])]
    config = settings.engine.model_copy(update={"log_level": "error", "draft_restarts": 10_000})
    findings: list[Finding] = []
    with Bars() as bars:
        bars.step("loading the models")
        for finding in check_pair(config, asked, params, kill=kill, tick=bars.step):
            findings.append(finding)
            bars.step(f"{finding.what}: {finding.equal} of {finding.count}")
    if to is not None:
        write_json(to, {"seed": params.seed, "findings": findings})
    if to != STDOUT:
        _print(findings)
    if not all(finding.passed for finding in findings):
        sys.exit(1)


def _print(findings: list[Finding]) -> None:
    rows = []
    for one in findings:
        guessed = ", ".join(f"{tokens} {source}" for source, tokens in sorted(one.guessed.items(), reverse=True))
        equal, longest = f"{one.equal} of {one.count}", str(one.longest or "")
        rows.append([one.what, one.reference, equal, guessed, longest, one.first])
    columns = ("compared", "with", "equal", "tokens guessed", "longest step", "first difference")
    wrong = sum(not finding.passed for finding in findings)
    result = f"{wrong} of {len(findings)} comparisons differ" if wrong else "all equal, bit for bit"
    print_table(columns, rows, result, words=2)
