"""PEARL beside llama.cpp and OpenVINO GenAI on one GGUF file: tokens a second, memory, texts and forwards, in turns.

    scripts/setup_peers PEERS                         # an environment with both, once
    python scripts/bench_peers.py PEERS/bin/python    # the embedded pair, on one core and on two: some minutes
    python scripts/bench_peers.py PEERS/bin/python --target large.gguf --draft small.gguf --only "PEARL|llama"

In each round every contender (a system and how it decodes) is a process of its own, on this machine's first cores.
All decode the same prompt tokens greedily, one text after the other, after a few tokens to warm up.  PyPI has llama.cpp
built for AVX2: on larger processors PEARL runs once more without its libraries for these.  Prints tables in Markdown; a
rate counts the tokens after the first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import msgspec
from embedded_gguf import embedded_file, write_draft
from peer_process import FORWARDS, ROWS, SYSTEMS, TIMED, Plan, Report

from pearl.cli.prompt_sets import json_option, read_sets, write_json
from pearl.lab.bench.machine import Conditions
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.cpu.native import BUILDS, flags
from pearl.text.conversation import Conversation

ROOT = Path(__file__).parent.parent
PROCESS = Path(__file__).with_name("peer_process.py")
AVX2 = {"avx2", "fma", "f16c"}  # as in /proc/cpuinfo
MOST_SECONDS = 600.0  # for one process
KINDS = {  # system -> how it decodes; first: it guesses nothing
    "PEARL": ("ar", "ngram", "auto", "pearl"),
    "llama.cpp": (
        "",
        "draft-simple",
        "ngram-cache",
        "ngram-simple",
        "ngram-map-k",
        "ngram-map-k4v",
        "ngram-mod",
    ),
    "OpenVINO": ("", "prompt-lookup"),
}


class Contender(NamedTuple):
    """A system and how it decodes, or that its forwards are timed.

    Attributes:
        kind: see `Plan`.
        is_avx2: whether PEARL is held to AVX2.
    """

    system: str
    kind: str
    is_avx2: bool = False

    @property
    def name(self) -> str:
        words = [self.system, self.kind]
        if self.is_avx2:
            words.append("with AVX2")
        return " ".join(filter(None, words))

    @property
    def alone(self) -> Contender:
        """The contender of the same system that guesses nothing."""
        return self._replace(kind=KINDS[self.system][0])


class Turn(NamedTuple):
    """A contender on a number of cores."""

    contender: Contender
    cores: int


Reports = dict[Turn, list[Report]]  # one report for each round


class Models(NamedTuple):
    """A pair of models; `draft` is "" if there is none."""

    target: str
    draft: str


@dataclass
class Machine:
    """Starts a process for each turn.

    Attributes:
        peers: Python of the environment that `scripts/setup_peers` made.
        avx2: folder with PEARL's sources and no libraries for processors beyond AVX2.
        pearl_models: the pair as PEARL names it.
        files: the pair as GGUF files.
    """

    peers: str
    avx2: Path
    pearl_models: Models
    files: Models
    prompts: list[list[int]]
    max_tokens: int

    def run(self, turn: Turn) -> Report:
        contender = turn.contender
        if contender.system == "PEARL":
            python = sys.executable
            models = self.pearl_models
        else:
            python = self.peers
            models = self.files
        plan = Plan(
            system=contender.system,
            kind=contender.kind,
            cores=turn.cores,
            target=models.target,
            draft=models.draft,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
        )
        sources = self.avx2 if contender.is_avx2 else ROOT
        done = subprocess.run(
            [python, "-P", str(PROCESS)],
            input=msgspec.json.encode(plan),
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(sources)},
            timeout=MOST_SECONDS,
            check=True,
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Report)


# ---- what is measured ----


def turns_of(cores: Sequence[int], only: str, has_draft: bool, avx2: bool) -> list[Turn]:
    """Return the turns of a round. `only` is a regular expression that is found in a contender's name."""
    turns = []
    for contender in contenders(avx2):
        if not re.search(only, contender.name):
            continue
        for count in cores:
            if not has_draft and contender.kind in ("pearl", "draft-simple"):
                continue
            if count == 1 and contender.kind == "pearl":
                continue  # two processes on one core
            if count > 1 and contender.kind == FORWARDS:
                continue
            turns.append(Turn(contender, count))
    return turns


def contenders(avx2: bool) -> Iterator[Contender]:
    """Yield all contenders; with `avx2` those of PEARL twice."""
    for system in SYSTEMS:
        kinds = list(KINDS[system])
        if system in TIMED:
            kinds.append(FORWARDS)
        for kind in kinds:
            yield Contender(system, kind)
            if avx2 and system == "PEARL":
                yield Contender(system, kind, is_avx2=True)


def exceeds_avx2() -> bool:
    """Return whether this processor has a library of ours that needs more than AVX2."""
    available = flags()
    return any(needed <= available and not needed <= AVX2 for _, needed in BUILDS)


@contextmanager
def held_to_avx2() -> Iterator[Path]:
    """Make a copy of PEARL's package without the libraries that need more than AVX2; yield the folder it is in."""
    larger = [f"{name}.*" for name, needed in BUILDS if not needed <= AVX2]
    with tempfile.TemporaryDirectory() as folder:
        ignored = shutil.ignore_patterns(*larger, "__pycache__")
        shutil.copytree(ROOT / "pearl", Path(folder) / "pearl", ignore=ignored)
        yield Path(folder)


def token_prompts(target: str, sets: Sequence[str], limit: int) -> list[list[int]]:
    """Return the first `limit` prompts of each set, as the target's chat template writes them."""
    tokenizer, _ = load_tokenizer(target)
    prompts = []
    for task in read_sets(sets, limit):
        conversation = Conversation(tokenizer, raw=not tokenizer.chat_template)
        prompts.append(conversation.prompt(task.turns[0]))
    return prompts


def files_of(models: Models, folder: Path) -> Models:
    """Return the pair as GGUF files; that of the embedded draft is written into `folder`."""
    target = models.target
    draft = models.draft
    if target == "embedded":
        target = str(embedded_file())
    if draft == "embedded-draft":
        draft = str(folder / "draft.gguf")
        write_draft(Path(draft))
    return Models(target, draft)


def take_turns(machine: Machine, turns: Sequence[Turn], rounds: int, reports: Reports) -> None:
    """Let all turns run once a round; add their reports to `reports`."""
    for number in range(rounds):
        for turn in turns:
            click.echo(f"round {number + 1}: {turn.contender.name} on {turn.cores}", err=True)
            report = machine.run(turn)
            reports.setdefault(turn, []).append(report)


# ---- tables ----


def table_of_texts(reports: Reports, cores: Sequence[int]) -> list[str]:
    """Return lines of Markdown: a row for each contender that decodes."""
    header = ["", *(f"on {count}" for count in cores), "MB", "as PEARL ar", "as itself alone"]
    lines = [row_of(header), "|---" * len(header) + "|"]
    for contender in dict.fromkeys(turn.contender for turn in reports):
        if contender.kind == FORWARDS:
            continue
        cells = [contender.name]
        cells += [speed(reports.get(Turn(contender, count), [])) for count in cores]
        last = Turn(contender, max(turn.cores for turn in reports if turn.contender == contender))
        cells.append(f"{median(report.megabytes for report in reports[last]):.0f}")
        for reference in (Contender("PEARL", "ar"), contender.alone):
            cells.append(equal_texts(reports, last, Turn(reference, last.cores)))
        lines.append(row_of(cells))
    return lines


def speed(rounds: Sequence[Report]) -> str:
    """Return tokens a second after the first token: their median over rounds, and their range."""
    if not rounds:
        return ""
    rates = []
    for report in rounds:
        tokens = sum(text.tokens for text in report.texts)
        rates.append(tokens / sum(text.seconds for text in report.texts))
    firsts = [text.first_seconds for report in rounds for text in report.texts]
    return (
        f"{median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f}), {1e3 * median(firsts):.0f} ms"
    )


def equal_texts(reports: Reports, turn: Turn, reference: Turn) -> str:
    """Return how many texts of the last round are those of the reference; empty where that did not run."""
    if reference not in reports:
        return ""
    texts = reports[turn][-1].texts
    expected = reports[reference][-1].texts
    equal = 0
    for text, expected_text in zip(texts, expected, strict=True):
        equal += text.text == expected_text.text
    return f"{equal} of {len(texts)}"


def table_of_forwards(reports: Reports) -> list[str]:
    """Return lines of Markdown: milliseconds of a forward by its tokens; none if no forward was timed."""
    lines = []
    for turn, rounds in reports.items():
        if turn.contender.kind == FORWARDS:
            cells = [turn.contender.name]
            cells += [f"{median(report.forwards[rows] for report in rounds):.1f}" for rows in ROWS]
            lines.append(row_of(cells))
    if not lines:
        return []
    return [row_of(["tokens", *map(str, ROWS)]), "|---" * (len(ROWS) + 1) + "|", *lines]


def systems(reports: Reports) -> str:
    """Return the systems' versions, with what they were built for."""
    versions: list[str] = []
    for rounds in reports.values():
        version = rounds[0].version
        if version not in versions:
            versions.append(version)
    return ", ".join(versions)


def row_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@click.command()
@click.argument("peers", type=click.Path(exists=True, dir_okay=False))
@click.option("--target", default="embedded", show_default=True, help="embedded, or a GGUF file.")
@click.option(
    "--draft",
    default="embedded-draft",
    show_default=True,
    help='embedded-draft, a GGUF file or "".',
)
@click.option(
    "--prompts", multiple=True, help="As for `pearl bench`; default: questions, summaries, edits."
)
@click.option("--limit", default=1, show_default=True, help="Prompts of each set.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--cores", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option(
    "--only", default="", help='Contenders by a regular expression: "llama.cpp$|PEARL ar".'
)
@json_option
def main(
    peers: str,
    target: str,
    draft: str,
    prompts: tuple[str, ...],
    limit: int,
    max_tokens: int,
    rounds: int,
    cores: tuple[int, ...],
    only: str,
    to: Path | None,
) -> None:
    """Measure with PEERS, the Python that `scripts/setup_peers` made. Ctrl-C prints what was measured so far."""
    conditions = Conditions()
    models = Models(target, draft)
    reports: Reports = {}
    with tempfile.TemporaryDirectory() as folder, held_to_avx2() as sources:
        files = files_of(models, Path(folder))
        token_ids = token_prompts(target, prompts, limit)
        machine = Machine(peers, sources, models, files, token_ids, max_tokens)
        with suppress(KeyboardInterrupt):
            take_turns(machine, turns_of(cores, only, bool(draft), exceeds_avx2()), rounds, reports)
    conditions.stop()
    lines = [*table_of_texts(reports, cores), "", *table_of_forwards(reports), ""]
    lines.append(f"Greedy, {max_tokens} tokens, {rounds} rounds. {systems(reports)}. {conditions}")
    click.echo("\n".join(lines))
    if to is not None:
        measured = [{"turn": turn, "rounds": reports[turn]} for turn in reports]
        write_json(to, {"kind": "peers", **conditions.as_dict(), "measured": measured})


if __name__ == "__main__":
    main()
