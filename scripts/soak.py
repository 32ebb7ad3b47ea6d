"""Requests under random faults, for as long as you like: every text must be whole, or fail by its name.

Toy pairs in real processes. Each round makes an engine, asks for texts, and meanwhile does something to a worker:
SIGKILL, SIGSTOP with or without SIGCONT, a hang, an exception, NaN, slowness.  Prints counts; exits with 1 where a text
was wrong, an error was none of those that may come, or something was left behind.

    scripts/soak                             # a minute
    scripts/soak --seconds 3600 --seed 7
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
from contextlib import contextmanager, suppress
from pathlib import Path

import click
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pearl import Engine, SamplingParams
from pearl.errors import NumericalError, PearlError, TargetLost
from pearl.models.toy import alpha_pair

ALPHA, VOCAB = 0.7, 32
SPEC = f"toy:vocab={VOCAB},alpha={ALPHA}"
METHODS = ("pearl", "pearl", "pearl", "sd", "pearl-no-pre-verify", "pearl-no-post-verify", "ar")
INFLICTED = ("hang", "raise", "nan", "kill", "stop", "slow")  # by a worker on itself
FATAL = ("hang", "raise", "kill", "stop", "SIGKILL", "SIGSTOP")  # to a target
SIGNALLED = ("SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT", "nothing")
TIMEOUT = 2.0  # of both workers: seconds of silence


def greedy(prompt: list[int], length: int) -> list[int]:
    """What the target says by itself."""
    target, _ = alpha_pair(VOCAB, ALPHA)
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(target(tokens).argmax()))
    return tokens[len(prompt) :]


@contextmanager
def struck(noise: random.Random, pid: int, fault: str) -> Iterator[None]:
    """Sends signals to a worker, a while from now."""

    def strike() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault == "SIGKILL" else signal.SIGSTOP)
            if fault == "SIGSTOP, SIGCONT":
                time.sleep(noise.uniform(0.05, 0.5))
                os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(noise.uniform(0.0, 0.6), strike)
    if fault != "nothing":
        timer.start()
    yield
    timer.cancel()
    if timer.ident is not None:
        timer.join()


class Soak:
    """`counts`: what happened; `wrong`: what must not have."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.noise, self.directory = random.Random(seed), directory
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def round(self, number: int) -> None:
        """One engine, from its start to its end."""
        noise = self.noise
        role = noise.choice(("target", "draft", "draft"))
        fault = noise.choice(INFLICTED if noise.random() < 0.5 else SIGNALLED)
        specs = {"target": SPEC, "draft": SPEC}
        if fault in INFLICTED:
            phase = noise.choice(("prefill", "drafting", "verifying"))
            specs[role] += f",fault={fault}@{phase},once={self.directory / str(number)}"
        self.counts[f"fault: {fault} of the {role}"] += 1
        try:
            with Engine(
                specs["target"],
                specs["draft"],
                target_pace=0.004,
                draft_pace=0.001,
                draft_timeout=TIMEOUT,
                target_timeout=2 * TIMEOUT,
                log_level="error",
            ) as engine:
                assert engine._target is not None
                assert engine._draft is not None
                workers = {"target": engine._target.pid, "draft": engine._draft.worker.pid}
                with struck(noise, workers[role], fault if fault in SIGNALLED else "nothing"):
                    for _ in range(noise.randint(1, 6)):
                        self.ask(engine, role, fault)
        except TargetLost:
            fatal = role == "target" and fault in FATAL
            self.check(fatal, f"round {number}: TargetLost after {fault} of the {role}")
            self.counts["TargetLost"] += 1
        except NumericalError:
            self.check(
                (role, fault) == ("target", "nan"), f"round {number}: NumericalError after {fault} of the {role}"
            )
            self.counts["NumericalError"] += 1
        except PearlError as error:
            self.wrong.append(f"round {number}: {type(error).__name__}: {error}")
        self.check_nothing_left(number)

    def ask(self, engine: Engine, role: str, fault: str) -> None:
        noise = self.noise
        prompt = [noise.randrange(VOCAB) for _ in range(noise.randint(40, 60))]
        length, method = noise.randint(1, 120), noise.choice(METHODS)
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        (result,) = engine.generate([prompt], params, method=method)
        self.counts["texts"] += 1
        self.counts["texts that lost their draft"] += result.statistics.draft_lost
        self.counts["texts with accepted draft tokens"] += bool(result.statistics.num_accepted_draft_tokens)
        self.counts["tokens"] += len(result.tokens)
        self.check(result.tokens == greedy(prompt, length), f"wrong text: {method}, {fault} of the {role}")

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def check_nothing_left(self, number: int) -> None:
        deadline = time.monotonic() + 30
        while children := [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > deadline:
                self.wrong.append(f"round {number}: left behind: {children}")
                return
            time.sleep(0.05)
        left = list(self.directory.glob("pearl-*"))
        self.check(not left, f"round {number}: left behind: {left}")


@click.command()
@click.option("--seconds", default=60.0, help="After which no new round begins.")
@click.option("--seed", default=0, help="Of the faults and the requests.")
def main(seconds: float, seed: int) -> None:
    """Prints what happened, by count."""
    console = Console(soft_wrap=True, highlight=False)
    began, rounds = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        os.environ.pop("XDG_RUNTIME_DIR", None)
        soak = Soak(seed, Path(name))
        with Progress(console=console) as progress:
            task = progress.add_task("soak", total=seconds)
            while time.monotonic() - began < seconds:
                soak.round(rounds)
                rounds += 1
                progress.update(task, completed=time.monotonic() - began)
        tempfile.tempdir = None
    table = Table("what", "count", box=None, padding=(0, 2, 0, 0))
    for what, count in sorted(soak.counts.items()):
        table.add_row(what, str(count))
    console.print(table)
    for wrong in soak.wrong:
        console.print(wrong, style="red")
    console.print(f"{rounds} engines in {time.monotonic() - began:.0f} s, seed {seed}: {len(soak.wrong)} wrong")
    raise SystemExit(bool(soak.wrong))


if __name__ == "__main__":
    main()
