"""Round trip of the control channel between two processes: a verdict there, a token back.

    python scripts/bench_control.py               # private socket file; --control tcp for the loopback with keys

Each message wakes a sleeping process, as in the workers: the latency between a rejection and the draft's reaction.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles

import click

from pearl.protocol.messages import DraftTokens, Verdict
from pearl.transport import connect, listen
from pearl.transport.address import bind_address
from pearl.transport.base import Connection, Listener, Received
from pearl.transport.keys import channel_keys, write_keys
from pearl.transport.mailbox import Mailbox
from pearl.transport.zeromq import new_keys

_BOUND = 30.0  # seconds for an answer
_VERDICT = Verdict(
    request=1, epoch=1, start=100, tokens=(5, 6, 7, 8), draft_until=120, digest=123456789
)
_TOKEN = DraftTokens(request=1, epoch=1, start=104, tokens=(9,), seconds=0.01)


def heard(mail: Mailbox) -> Received:
    got = mail.receive(_BOUND)
    if not got or isinstance(got[0][1], Exception):
        raise click.ClickException(f"no answer: {got}")
    return got[0]


def answer(endpoint: Connection, rounds: int) -> None:
    """The other process: a token for each verdict."""
    with Mailbox(endpoint) as mail:
        mail.send(_TOKEN)
        for _ in range(rounds):
            heard(mail)
            mail.send(_TOKEN)
    endpoint.close(flush=1.0)


def times(endpoint: Listener, rounds: int, pause: float) -> list[float]:
    seconds = []
    with Mailbox(endpoint) as mail:
        peer, _ = heard(mail)
        for _ in range(rounds):
            time.sleep(pause)
            began = time.perf_counter()
            mail.send(_VERDICT, peer)
            heard(mail)
            seconds.append(time.perf_counter() - began)
    return seconds


@click.command()
@click.option("--control", type=click.Choice(["ipc", "tcp"]), default="ipc", show_default=True)
@click.option("--rounds", default=3000, show_default=True)
@click.option(
    "--pause",
    default=0.0,
    show_default=True,
    help="Seconds of sleep before each, as between two steps.",
)
@click.option("--json", "as_json", is_flag=True)
@click.option("--child", hidden=True)
def main(control: str, rounds: int, pause: float, as_json: bool, child: str | None) -> None:
    if child is not None:
        address, home = child.split()
        answer(
            connect(address, None if address.startswith("ipc") else channel_keys(f"{home}/keys")),
            rounds,
        )
        return
    with tempfile.TemporaryDirectory(prefix="pearl-") as name:
        directory = Path(name)
        keys = new_keys()
        write_keys(directory / "keys", keys)
        listener = listen(
            bind_address("ipc", directory) if control == "ipc" else "tcp://127.0.0.1:*", keys
        )
        command = [
            sys.executable,
            __file__,
            "--rounds",
            str(rounds),
            "--child",
            f"{listener.address} {directory}",
        ]
        process = subprocess.Popen(command)
        try:
            cuts = quantiles(times(listener, rounds, pause), n=100)
            process.wait(_BOUND)
        finally:
            process.kill()
            listener.close()
    result = {
        "control": control,
        "rounds": rounds,
        "pause": pause,
        "p50": cuts[49],
        "p99": cuts[98],
    }
    if as_json:
        click.echo(json.dumps(result | {"cores": os.cpu_count()}))
    else:
        click.echo(
            f"{control}: round trip p50 {cuts[49] * 1e6:.0f} us, p99 {cuts[98] * 1e6:.0f} us"
        )


if __name__ == "__main__":
    main()
