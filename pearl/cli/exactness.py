"""`pearl check`: whether texts are equal bit for bit, on the user's own pair and machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from pearl.cli.console import SafeConsole
from pearl.cli.numbers import STDOUT, json_option, table_console, write_json
from pearl.cli.options import SettingsCommand, settings_options
from pearl.client.request import Prompt
from pearl.config import Settings
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.lab.distill.prompts import read_prompts
from pearl.printable import log_to_stderr

if TYPE_CHECKING:
    from pearl.lab.bench.exactness import Finding, References

_TOKENS = 48
_ROWS = 300


@click.command("check", cls=SettingsCommand)
@click.option("--prompts", type=click.Path(path_type=Path), help="File of prompts to decode.  [default: four of ours]")
@click.option("--limit", type=click.IntRange(min=1), default=4, show_default=True, metavar="N", help="Prompts of it.")
@click.option("--kill/--no-kill", default=True, show_default=True, help="Also kill the draft in the middle of texts.")
@click.option("--combinations", is_flag=True, help="Instead of methods each combination of what guesses in pearl.")
@json_option
@settings_options
def check_bits(
    settings: Settings, prompts: Path | None, limit: int, kill: bool, combinations: bool, to: Path | None
) -> None:
    """Compare logits and texts of all methods bit for bit.

    Exit code 1 if any differ. Logits: one sequence, cut into forwards at random. Texts: every method and window, also
    with the draft killed, compared with the target's own text of the same seed; under the ratio rule with each other.
    Texts have up to --max-tokens, 48 by default. With --datastore, method ngram is compared with and without it.
    With --combinations the texts are those of pearl with look-ahead, lookup and branches, each on or off, and with
    either window.
    """
    from pearl.lab.bench.calibrate import PROMPTS
    from pearl.lab.bench.exactness import check_combinations, check_guesses, check_rows, check_texts

    if combinations and not settings.engine.has_draft:
        raise ConfigError("--combinations are of what guesses beside a draft: leave --draft none out")
    log_to_stderr("error" if kill else settings.engine.log_level, "front")
    params = settings.sampling.with_seed()
    if not params.temperature:
        params = params.model_copy(update={"temperature": 1.0})
    params = params.model_copy(update={"max_tokens": params.max_tokens or _TOKENS})
    asked: list[Prompt] = [*(read_prompts(prompts, limit) if prompts else PROMPTS[:limit])]
    findings: list[Finding] = []
    console = SafeConsole(stderr=True)
    with console.status("loading the models") as status:

        def report(finding: Finding) -> None:
            findings.append(finding)
            status.update(f"{finding.what}: {finding.equal} of {finding.count}")

        for role in settings.engine.roles:
            report(check_rows(settings.engine, role, _ROWS))
        config = settings.engine.model_copy(update={"log_level": "error", "draft_restarts": 10_000})
        known: References = {}
        if config.datastore is not None:
            with Engine(config=config.model_copy(update={"datastore": None})) as engine:
                for finding in check_guesses(engine, asked, params, known):
                    report(finding)
        with Engine(config=config) as engine:
            found = (
                check_combinations(engine, asked, params, known)
                if combinations
                else check_texts(engine, asked, params, kill=kill, known=known)
            )
            for finding in found:
                report(finding)
    if to is not None:
        write_json(to, {"seed": params.seed, "findings": [asdict(finding) for finding in findings]})
    if to != STDOUT:
        _print(findings)
    if not all(finding.passed for finding in findings):
        sys.exit(1)


def _print(findings: list[Finding]) -> None:
    console = table_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("compared", "with", "equal", "tokens guessed", "first difference"):
        table.add_column(column, justify="right" if column == "equal" else "left")
    for finding in findings:
        guessed = ", ".join(f"{tokens} {source}" for source, tokens in sorted(finding.guessed.items(), reverse=True))
        table.add_row(finding.what, finding.reference, f"{finding.equal} of {finding.count}", guessed, finding.first)
    console.print(table)
    wrong = sum(not finding.passed for finding in findings)
    console.print("\nall equal, bit for bit" if not wrong else f"\n{wrong} of {len(findings)} comparisons differ")
