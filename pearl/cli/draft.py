"""`pearl draft serve`: a draft model for engines of other kinds. Arguments and output only."""

import signal
import threading
from pathlib import Path
from typing import Any

import click

from pearl.cli.commands import example
from pearl.cli.console import say
from pearl.cli.options import field_options, of_field
from pearl.config import EngineConfig, read_file
from pearl.device import has_gpu
from pearl.errors import ConfigError
from pearl.printable import log_to_stderr
from pearl.spec.control import ON_ONE_HOST, is_remote
from pearl.transport.address import free_stale, is_file

_FIELDS = (
    "draft",
    "target",
    "draft_device",
    "draft_dtype",
    "rows",
    "draft_pace",
    "forwards",
    "max_context",
    "slots",
    "datastore",
    "keys",
    "trust_remote_code",
    "trace",
    "log_level",
)
_DEFAULTS = {"target": "the draft itself", "slots": "4"}
_SLOTS = 4


@click.group(
    epilog=example(
        "pearl draft serve --draft my-small-model --listen ipc:///run/user/1000/pearl/draft"
    )
)
def draft() -> None:
    """Draft for engines of other kinds, such as vLLM.

    See launch/vllm.md.
    """


@draft.command(
    epilog=example(
        "pearl draft serve --draft my-small-model --listen tcp://10.0.0.2:7000 --keys pearl.keys"
    )
)
@click.option(
    "--listen",
    "address",
    required=True,
    metavar="ADDRESS",
    help="Where engines connect: ipc:///PATH, a file in a directory of mode 0700; or tcp://HOST:PORT, with --keys.",
)
@field_options(
    {name: of_field(EngineConfig.model_fields[name]) for name in _FIELDS},
    "YAML file of these settings.",
    _DEFAULTS,
)
def serve(address: str, config: Path | None, **flags: Any) -> None:
    """Draft for the engines that connect to ADDRESS, for any number of their requests.

    An engine verifies the drafts with a target of its own; PEARL's proposer in vLLM is
    pearl.vllm.PearlProposer. With --target NAME the draft translates its tokens for a target of
    another vocabulary; of that target only the tokenizer is read. The service runs until Ctrl-C or
    SIGTERM.
    """
    settings = _settings(address, config, flags)
    log_to_stderr(settings.log_level, "draft")
    free_stale(address)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    if not has_gpu():
        from pearl.models.cpu.meta_device import postpone_kernels

        postpone_kernels()
    from pearl.worker.build import run_draft_service

    run_draft_service(settings, address, _announce, stopping.is_set, say)


def _settings(address: str, config: Path | None, flags: dict[str, Any]) -> EngineConfig:
    values = {"slots": _SLOTS}
    if config is not None:
        values |= read_file(config)
    values |= {name: value for name, value in flags.items() if value is not None}
    values.setdefault("draft", EngineConfig.model_fields["draft"].default)
    values.setdefault("target", values["draft"])
    unknown = values.keys() - set(_FIELDS)
    if unknown:
        raise ConfigError(f"pearl draft serve has no {', '.join(sorted(unknown))}: see its --help")
    if not is_file(address) and not is_remote(address):
        raise ConfigError(f"--listen takes ipc:///PATH or tcp://HOST:PORT, not {address}")
    control = ON_ONE_HOST if is_file(address) else address
    return EngineConfig(**values, control=control)


def _announce(address: str, device: str) -> None:
    say(f"drafting on {device} for engines that connect to {address}")
