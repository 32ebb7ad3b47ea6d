"""Requests under random faults: every text must be the target's, or fail with the expected error.

Pairs in real processes: toys, with `--pair embedded` the embedded one, or with `--models` any two.  Each round starts
an engine, decodes texts, and meanwhile injects faults into its workers, until the target is lost or six faults are in:
SIGKILL, SIGSTOP with or without SIGCONT and, for toys, a hang, an exception, NaN, slowness.  Stops after a number of
faults that hit a worker.  Prints counts; exits with 1 if a text was wrong, an error was unexpected, or a process or
directory was left behind.

    scripts/soak                             # 20 faults
    scripts/soak --faults 1000 --seed 7
    scripts/soak --faults 10 --pair embedded
    scripts/soak --faults 10 --models TARGET DRAFT
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import click
import faulty
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pearl import Engine, RequestOptions
from pearl.engine.processes import DraftKeeper, Worker
from pearl.errors import NumericalError, PearlError, TargetLost
from pearl.models.toy import alpha_pair

ALPHA = 0.7
VOCAB = 32
SPEC = f"toy:vocab={VOCAB},alpha={ALPHA}"
METHODS = ("pearl", "pearl", "pearl", "sd", "pearl-no-pre-verify", "pearl-no-post-verify", "ar")
ROLES = ("target", "draft", "draft", "draft")  # a lost target ends the round
INFLICTED = ("hang", "raise", "nan", "kill", "stop", "slow")  # by a worker on itself
PHASES = ("prefill", "drafting", "verifying")
FATAL = ("hang", "raise", "kill", "stop", "SIGKILL", "SIGSTOP")  # to a target
SIGNALLED = ("SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT", "SIGSTOP, SIGCONT")
MOST_OF_AN_ENGINE = 6  # faults: later, its draft is restarted only after half a minute
TIMEOUT = {"toy": 2.0, "embedded": 6.0}  # of both workers: seconds of silence
PATIENCE = 60.0  # seconds for a draft to come back


class Fault(NamedTuple):
    kind: str
    role: str


def workers(engine: Engine) -> tuple[Worker, DraftKeeper]:
    assert engine.target_worker is not None
    assert engine.draft is not None
    return engine.target_worker, engine.draft


class Toys:
    """Toys, whose texts are computed here without the runtime."""

    timeout = TIMEOUT["toy"]

    specs = {"target": SPEC, "draft": SPEC}  # noqa: RUF012
    settings = {"target_pace": 0.004, "draft_pace": 0.001}  # noqa: RUF012

    def request(self, noise: random.Random) -> tuple[list[int], int]:
        prompt = [noise.randrange(VOCAB) for _ in range(noise.randint(40, 60))]
        return prompt, noise.randint(1, 120)

    def text(self, prompt: list[int], length: int) -> list[int]:
        """Return the text of the target alone."""
        target, _ = alpha_pair(VOCAB, ALPHA)
        tokens = list(prompt)
        for _ in range(length):
            tokens.append(int(target(tokens).argmax()))
        return tokens[len(prompt) :]


class Real:
    """A pair of checkpoints; its texts are decoded beforehand by an engine without faults."""

    timeout = TIMEOUT["embedded"]
    settings = {"target_pace": 0.02, "draft_pace": 0.005}  # noqa: RUF012  # tiny ones too: faults strike amid a text
    _LENGTH = 60

    def __init__(self, target: str, draft: str) -> None:
        self.specs = {"target": target, "draft": draft}
        noise = random.Random(0)
        params = RequestOptions(temperature=0, max_tokens=self._LENGTH, ignore_eos=True)
        self._texts = {}
        with Engine(target, "none", log_level="error") as engine:
            size = engine.tokenizer.vocab_size
            ids = range(size // 50, size // 2)  # no special tokens
            prompts = [[noise.choice(ids) for _ in range(noise.randint(10, 60))] for _ in range(4)]
            results = engine.generate(prompts, params, method="ar")
        for prompt, result in zip(prompts, results, strict=True):
            self._texts[tuple(prompt)] = result.tokens

    def request(self, noise: random.Random) -> tuple[list[int], int]:
        return list(noise.choice(sorted(self._texts))), noise.randint(1, self._LENGTH)

    def text(self, prompt: list[int], length: int) -> list[int]:
        return self._texts[tuple(prompt)][:length]


class Soak:
    """`counts`: events by name; `faults`: faults that hit a worker; `wrong`: violations, in words."""

    def __init__(self, seed: int, directory: Path, pair: Toys | Real) -> None:
        self.noise = random.Random(seed)
        self.directory = directory
        self.pair = pair
        self.counts: Counter[str] = Counter()
        self.faults = 0
        self.wrong: list[str] = []
        self._others = {child.pid for child in psutil.Process().children()}

    def round(self, number: int) -> None:
        """Run one engine, from start to end."""
        noise = self.noise
        once = self.directory / str(number)
        inflicted: Fault | None = None
        failing: AbstractContextManager[None] = nullcontext()
        role = noise.choice(ROLES)
        if isinstance(self.pair, Toys) and noise.random() < 0.5:
            inflicted = Fault(noise.choice(INFLICTED), role)
            failing = faulty.inflicted(role, f"{inflicted.kind}@{noise.choice(PHASES)}", once)
        faults: list[Fault] = []  # of this engine
        try:
            with (
                failing,
                Engine(
                    **self.pair.specs,  # type: ignore[arg-type]
                    **self.pair.settings,  # type: ignore[arg-type]
                    draft_timeout=self.pair.timeout,
                    target_timeout=2 * self.pair.timeout,
                    draft_restarts=MOST_OF_AN_ENGINE,
                    log_level="error",
                ) as engine,
            ):
                if inflicted is not None:
                    faults.append(inflicted)
                    self.ask(engine, faults)
                while len(faults) < MOST_OF_AN_ENGINE and noise.random() < 0.9:
                    self.wait_for_draft(engine)
                    with self.struck(engine, faults):
                        for _ in range(noise.randint(1, 3)):
                            self.ask(engine, faults)
        except TargetLost:
            fatal = any(fault.role == "target" and fault.kind in FATAL for fault in faults)
            self.check(fatal, f"round {number}: TargetLost after {faults}")
            self.counts["TargetLost"] += 1
        except NumericalError:
            is_expected = Fault("nan", "target") in faults
            self.check(is_expected, f"round {number}: NumericalError after {faults}")
            self.counts["NumericalError"] += 1
        except PearlError as error:
            self.wrong.append(f"round {number}: {type(error).__name__}: {error}, after {faults}")
        if inflicted is not None and once.exists():
            self.note(inflicted)
        self.check_nothing_left(number)

    @contextmanager
    def struck(self, engine: Engine, faults: list[Fault]) -> Iterator[None]:
        """Send signals to a worker after a random delay."""
        fault = Fault(self.noise.choice(SIGNALLED), self.noise.choice(ROLES))
        delay = self.noise.uniform(0.0, 0.6)
        pause = self.noise.uniform(0.05, 0.5)

        def strike() -> None:
            target, draft = workers(engine)
            worker = target if fault.role == "target" else draft.worker
            if not worker.alive:
                return
            faults.append(fault)  # before the signal: its consequences may come at once
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL if fault.kind == "SIGKILL" else signal.SIGSTOP)
                self.note(fault)
                if fault.kind == "SIGSTOP, SIGCONT":
                    time.sleep(pause)
                    os.kill(worker.pid, signal.SIGCONT)

        timer = threading.Timer(delay, strike)
        timer.start()
        try:
            yield
        finally:
            timer.join()  # if the texts end sooner, it hits an idle worker

    def wait_for_draft(self, engine: Engine) -> None:
        """Wait for the restarted draft: faults need a live worker."""
        _, draft = workers(engine)
        deadline = time.monotonic() + PATIENCE
        while not (draft.worker.alive and draft.worker.ready_since):
            if time.monotonic() > deadline:
                self.wrong.append("a draft has not come back")
                return
            time.sleep(0.05)

    def ask(self, engine: Engine, faults: list[Fault]) -> None:
        prompt, length = self.pair.request(self.noise)
        method = self.noise.choice(METHODS)
        params = RequestOptions(temperature=0, max_tokens=length, ignore_eos=True)
        (result,) = engine.generate([prompt], params, method=method)
        statistics = result.statistics
        self.counts["texts"] += 1
        self.counts["texts that lost their draft"] += statistics.draft_lost
        has_accepted = bool(statistics.num_accepted_draft_tokens)
        self.counts["texts with accepted draft tokens"] += has_accepted
        self.counts["tokens"] += len(result.tokens)
        is_right = result.tokens == self.pair.text(prompt, length)
        self.check(is_right, f"wrong text: {method}, after {faults}")

    def note(self, fault: Fault) -> None:
        """Count a fault that hit a worker."""
        self.faults += 1
        self.counts[f"fault: {fault.kind} of the {fault.role}"] += 1

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def check_nothing_left(self, number: int) -> None:
        deadline = time.monotonic() + 30
        while children := [c for c in psutil.Process().children() if self._ours(c)]:
            if time.monotonic() > deadline:
                self.wrong.append(f"round {number}: left behind: {children}")
                return
            time.sleep(0.05)
        directories = list(self.directory.glob("pearl-*"))
        self.check(not directories, f"round {number}: left behind: {directories}")

    def _ours(self, child: psutil.Process) -> bool:
        return child.pid not in self._others and child.status() != psutil.STATUS_ZOMBIE


@click.command()
@click.option(
    "--faults", default=20, type=click.IntRange(min=1), help="No new round starts after so many."
)
@click.option(
    "--seconds", default=None, type=float, help="Nor after so long; fewer faults are then an error."
)
@click.option(
    "--pair",
    type=click.Choice(list(TIMEOUT)),
    default="toy",
    help="The embedded one takes signals only.",
)
@click.option(
    "--models",
    nargs=2,
    metavar="TARGET DRAFT",
    help="Two checkpoints in place of --pair; signals only.",
)
@click.option("--seed", default=0, help="Of the faults and the requests.")
def main(
    faults: int, seconds: float | None, pair: str, models: tuple[str, str] | None, seed: int
) -> None:
    """Print the counts of all events."""
    console = Console(soft_wrap=True, highlight=False)
    began = time.monotonic()
    rounds = 0
    if models is None and pair == "embedded":
        models = ("embedded", "embedded-draft")
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        os.environ.pop("XDG_RUNTIME_DIR", None)
        soak = Soak(seed, Path(name), Real(*models) if models else Toys())
        with Progress(console=console) as progress:
            task = progress.add_task("faults", total=faults)
            while soak.faults < faults and (seconds is None or time.monotonic() - began < seconds):
                soak.round(rounds)
                rounds += 1
                progress.update(task, completed=soak.faults)
        tempfile.tempdir = None
    soak.check(
        soak.faults >= faults, f"only {soak.faults} of {faults} faults have struck in {seconds} s"
    )
    table = Table("what", "count", box=None, padding=(0, 2, 0, 0))
    for what, count in sorted(soak.counts.items()):
        table.add_row(what, str(count))
    console.print(table)
    for wrong in soak.wrong:
        console.print(wrong, style="red")
    took = time.monotonic() - began
    console.print(
        f"{soak.faults} faults in {rounds} engines, {took:.0f} s, seed {seed}: {len(soak.wrong)} wrong"
    )
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()
