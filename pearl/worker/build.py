"""Putting a worker together from its settings: device, model, tokenizer, channels, loop."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pearl.config import Device, EngineConfig
from pearl.errors import ModelError
from pearl.models.loading import load_runner
from pearl.models.paced import PacedRunner
from pearl.models.runner import ModelRunner
from pearl.models.tokenizer import check_same_vocabulary, load_tokenizer, vocabulary_digest
from pearl.models.toy import load_toy
from pearl.protocol.messages import PROTOCOL_VERSION, Hello, Role, Welcome
from pearl.text import TextStream, Tokenizer
from pearl.trace.recorder import Recorder, asked_for, part_path, where_and_what
from pearl.trace.tracer import Tracer
from pearl.transport.base import TensorChannel
from pearl.transport.keys import Keys, channel_keys
from pearl.transport.zeromq import ZmqConnection, ZmqListener
from pearl.worker.draft import DraftWorker
from pearl.worker.execute import DraftExecutor, TargetExecutor
from pearl.worker.lifeline import Lifeline
from pearl.worker.rows import RowPacker
from pearl.worker.target import TargetSettings, TargetWorker

_FLUSH_SECONDS = 0.5  # for what is still queued when a worker ends


def run_target(config: EngineConfig, settings: dict[str, Any], lifeline: Lifeline) -> None:
    """The target worker, from loading to its end. Raises `PearlError`s for what went wrong."""
    tracer = _tracer(config, settings)
    endpoint = ZmqListener(settings["address"], _keys(config, settings))
    lifeline.tell("bound", address=endpoint.address)
    try:
        device = _place(config.target_device, "target")
        make_channel = _channel(config, settings, 0, device, tracer)
        _pin(config, "target")  # from here on the draft's cores are none that we may use
        progress = lifeline.progress()
        tokenizer, _ = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code, progress=progress)
        digest = _checked_digest(config, tokenizer, progress) if config.has_draft else b""
        runner = _loaded(tracer, config, "target", device, progress)
        worker = TargetWorker(
            endpoint,
            TargetExecutor(runner, partial(_text_stream, tokenizer)),
            TargetSettings(runner.vocab_size, runner.context, digest, config.draft_timeout, config.has_draft),
            ready=partial(lifeline.tell, "ready"),
            stopping=lifeline.closed.is_set,
            tracer=tracer,
            channel=partial(make_channel, runner.vocab_size) if make_channel else None,
        )
        with torch.inference_mode():
            worker.run()
    finally:
        endpoint.close(flush=_FLUSH_SECONDS)
        tracer.stop()


def run_draft(config: EngineConfig, settings: dict[str, Any], lifeline: Lifeline) -> None:
    """The draft worker, from loading to its end. Raises `PearlError`s for what went wrong."""
    tracer = _tracer(config, settings)
    endpoint = ZmqConnection(settings["address"], _keys(config, settings))
    try:
        device = _place(config.draft_device, "draft")
        make_channel = _channel(config, settings, 1, device, tracer)
        _pin(config, "draft")
        progress = lifeline.progress()
        tokenizer, _ = load_tokenizer(config.draft, trust_remote_code=config.trust_remote_code, progress=progress)
        digest = vocabulary_digest(tokenizer, tokenizer.vocab_size)
        runner = _loaded(tracer, config, "draft", device, progress)

        def welcomed(welcome: Welcome) -> tuple[DraftExecutor, RowPacker]:
            packer = RowPacker(make_channel(welcome.vocab_size) if make_channel else None)
            return DraftExecutor(runner, welcome.vocab_size, packer.pack), packer

        worker = DraftWorker(
            endpoint,
            Hello(PROTOCOL_VERSION, Role.DRAFT, runner.vocab_size, runner.context, digest),
            welcomed,
            ready=partial(lifeline.tell, "ready"),
            stopping=lifeline.closed.is_set,
            heartbeat_seconds=min(1.0, config.draft_timeout / 4),
            tracer=tracer,
            beat=lifeline.beat,
        )
        with torch.inference_mode():
            worker.run()
    finally:
        endpoint.close(flush=_FLUSH_SECONDS)
        tracer.stop()


def _keys(config: EngineConfig, settings: dict[str, Any]) -> Keys | None:
    return channel_keys(config.keys, Path(settings["directory"]))


def _tracer(config: EngineConfig, settings: dict[str, Any]) -> Tracer:
    """This worker's. A part stands beside the file that it will become, or with the sockets where a front asked for it:
    no front can name a file for us to write.
    """

    def recorder(trace: Path) -> Recorder:
        header = {"role": settings["role"], "run": settings["directory"], "config": config.model_dump(mode="json")}
        return Recorder(part_path(trace, settings["role"], os.getpid()), header | where_and_what())

    def open_part(number: int) -> Recorder:
        return recorder(asked_for(Path(settings["directory"]), number))

    return Tracer(recorder(Path(config.trace)) if config.trace else None, open_part)


def _loaded(
    tracer: Tracer, config: EngineConfig, role: str, device: torch.device, progress: Callable[[str], None]
) -> ModelRunner:
    start = tracer.clock()
    runner = _runner(config, role, device, progress)
    tracer.note("busy", "load", start)
    return tracer.runner(runner)


def _text_stream(tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> TextStream:
    return TextStream(tokenizer, prompt, stops)


def _checked_digest(config: EngineConfig, target: Tokenizer, progress: Callable[[str], None]) -> bytes:
    """What the draft's Hello must show: that it is the draft whose token ids were compared with ours."""
    draft, _ = load_tokenizer(config.draft, trust_remote_code=config.trust_remote_code, progress=progress)
    check_same_vocabulary(target, draft, config.target, config.draft)
    return vocabulary_digest(draft, draft.vocab_size)


def _runner(config: EngineConfig, role: str, device: torch.device, progress: Callable[[str], None]) -> ModelRunner:
    is_target = role == "target"
    spec = config.target if is_target else config.draft
    runner: ModelRunner
    if spec.partition(":")[0] == "toy":
        runner = load_toy(spec, role, config.max_context)
    else:
        runner = load_runner(
            spec,
            device=device,
            dtype=config.target_dtype if is_target else config.draft_dtype,
            max_context=config.max_context,
            device_map=config.target_device_map
            if is_target and len(Device.parse(config.target_device).gpus) > 1
            else None,
            forwards=config.forwards,
            trust_remote_code=config.trust_remote_code,
            progress=progress,
        )
    gc.collect()
    gc.freeze()  # a full collection would walk all that torch and the model made: tens of milliseconds, mid-step
    pace = config.target_pace if is_target else config.draft_pace
    return PacedRunner(runner, pace) if pace else runner


def _place(name: str, role: str) -> torch.device:
    """The (first) device of this worker. Raises `ModelError` where it is not there."""
    device, gpus = Device.parse(name), torch.cuda.device_count()
    if device.kind == "cpu" or (device.kind == "auto" and not gpus):
        return torch.device("cpu")
    if device.kind == "auto":
        return _cuda(min(int(role == "draft"), gpus - 1))
    index = 0 if len(device.gpus) > 1 else device.gpus[0]  # of several, the launcher made them the only visible ones
    if index >= gpus or len(device.gpus) > gpus:
        raise ModelError(f"device {name} is not there: torch sees {gpus} GPUs")
    return _cuda(index)


def _cuda(index: int) -> torch.device:
    """Made the current device too: pinned memory would otherwise open a context on the first GPU, the other's."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _on_two_gpus(config: EngineConfig) -> bool:
    """Whether NCCL can join the workers. Both come to the same answer: it is how they agree on a tensor channel."""
    target, draft = Device.parse(config.target_device), Device.parse(config.draft_device)
    if "cpu" in (target.kind, draft.kind):
        return False
    if "auto" in (target.kind, draft.kind):
        return torch.cuda.device_count() > 1 and target.kind == draft.kind
    return not set(target.gpus) & set(draft.gpus)


def _pin(config: EngineConfig, role: str) -> None:
    """Pins this process to the cores of its device; `auto` gives each role its half of them, on two hosts all.

    Threads that run already (the sockets' I/O thread) stay unpinned.
    """
    device = Device.parse(config.target_device if role == "target" else config.draft_device)
    if device.kind == "cuda" or (device.kind == "auto" and torch.cuda.is_available()):
        return
    usable = sorted(os.sched_getaffinity(0))
    half = (len(usable) + 1) // 2 if config.has_draft and config.one_host else len(usable)
    cores = device.cores
    if device.kind == "auto":
        cores = tuple(usable[:half] if role == "target" else usable[half:] or usable)
    if cores is not None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


def _channel(
    config: EngineConfig, settings: dict[str, Any], rank: int, device: torch.device, tracer: Tracer
) -> Callable[[int], TensorChannel] | None:
    """How to open the tensor channel over a vocabulary of the given size; None: dense rows go as frames."""
    kind = settings.get("tensors") or config.tensors
    if kind == "auto":
        kind = "nccl" if config.one_host and _on_two_gpus(config) else "frames"
    if kind == "frames" or not config.has_draft:
        return None
    from pearl.transport.torch_dist import ProcessGroupChannel

    def make(vocab_size: int) -> TensorChannel:
        store = Path(settings["directory"]) / "group"
        return tracer.channel(ProcessGroupChannel(kind, store, "rows", rank, vocab_size, device, config.draft_timeout))

    return make
