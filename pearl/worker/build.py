"""Puts a worker together from its settings: device, model, tokenizer, channels and loop."""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pearl.cache import Progress, silent
from pearl.config import EngineConfig, ModelConfig
from pearl.device import Device
from pearl.drafting.datastore import Datastore, check_tokenizer
from pearl.drafting.disco import classifier_of
from pearl.drafting.output_ngrams import Habits
from pearl.drafting.proposer import ModelProposer
from pearl.drafting.stops import make_policy
from pearl.errors import ConfigError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.models.checkpoints.checkpoint import is_head, is_toy
from pearl.models.checkpoints.loading import Features, load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer, translation_of
from pearl.models.heads.loading import load_draft_head, load_head, states_for
from pearl.models.paced import pace
from pearl.models.runner import ModelRunner
from pearl.models.toy import load_toy
from pearl.models.translated import TranslatedRunner
from pearl.protocol.messages import PROTOCOL_VERSION, Hello, Role, Welcome
from pearl.protocol.speeds import Cores
from pearl.spec.methods import BRANCHES
from pearl.steps import Steps
from pearl.text.grammar import Guides
from pearl.text.stream import TextStream, Tokenizer
from pearl.text.tokenizer import have_same_vocabulary, vocabulary_digest
from pearl.text.translation import Translation
from pearl.trace.recorder import (
    Recorder,
    asked_for,
    outside_recorder,
    part_path,
    where_and_what,
)
from pearl.trace.tracer import Tracer
from pearl.transport import connect, listen
from pearl.transport.base import TensorChannel
from pearl.transport.keys import Keys, channel_keys
from pearl.worker.draft import DraftWorker
from pearl.worker.draft_rows import RowPacker
from pearl.worker.draft_service import DraftService
from pearl.worker.lifeline import Lifeline
from pearl.worker.placement import core_choices, occupy, pin, place, settled, shared_gpus
from pearl.worker.settings import TargetSettings, WorkerSettings
from pearl.worker.speed_profile import keeper
from pearl.worker.speed_profile import load as load_profile
from pearl.worker.target import TargetWorker

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5  # for sending the messages that are still queued when a worker ends
_BRANCHES_EACH = 4  # further slots for each text of a draft service, for its branches
_NAME_LENGTH = 64  # characters; a longer name of a draft is cut before other engines are told it


def run_target(settings: WorkerSettings, lifeline: Lifeline, steps: Steps) -> None:
    """Load the target worker and run it to its end. Raises a `PearlError` if that fails."""
    config = settings.config
    model = settings.model
    tracer = _tracer(settings)
    endpoint = listen(settings.address, _keys(settings))
    lifeline.tell("bound", address=endpoint.address)
    try:
        device = place(config, model.role)
        make_channel = tensor_channel(settings, 0, device)
        choices = core_choices(config)
        profile = load_profile(config)
        keep = keeper(config)
        device_choice = settled(config, model.role)  # before this process is pinned
        warning = shared_gpus(config)
        if warning:
            lifeline.note(warning)
        pin(config, model.role)  # from here on this process may not use the draft's cores
        steps.done("listening, and choosing devices")
        progress = lifeline.progress()
        tokenizer = _tokenizer(model, progress)
        is_drafting = is_head(config.draft)
        digest = b""
        if config.has_draft:  # the draft must have the target's vocabulary, or translate to it
            spoken = tokenizer
            if not is_drafting:
                draft = _tokenizer(config.model("draft"), progress)
                if have_same_vocabulary(tokenizer, draft):
                    spoken = draft
            digest = vocabulary_digest(spoken, spoken.vocab_size)
        steps.done("reading the tokenizers")
        heads = []
        if is_drafting:
            heads.append(config.draft)
        if config.head is not None:
            heads.append(config.head)
        features = states_for(heads, config.target, progress)
        start = tracer.clock()
        runner = make_runner(model, device, progress, features)
        tracer.note("busy", "load", start)
        steps.done("loading the model")
        _occupy(device_choice, runner)

        def spread(cores: Cores) -> None:
            occupy(choices[cores], runner.use_threads)

        worker = TargetWorker(
            endpoint,
            TargetExecutor(
                runner,
                partial(TextStream, tokenizer),
                _datastore(config, tokenizer, runner.vocab_size),
                spread if choices else None,
                guides=_guides(model, runner.vocab_size),
                habits=Habits() if config.habits else None,
                head=None if config.head is None else load_head(config.head, runner, progress),
                gives_states=is_drafting,
            ),
            TargetSettings(config, runner.vocab_size, runner.context, digest),
            ready=partial(lifeline.tell, "ready", device=device_choice.name, dtype=runner.weights),
            stopping=lifeline.closed.is_set,
            tracer=tracer,
            channel=partial(make_channel, runner.vocab_size) if make_channel else None,
            profile=profile,
            measured=keep,
        )
        with torch.inference_mode():
            worker.run()
    finally:
        endpoint.close(flush=_FLUSH_SECONDS)
        tracer.stop()


def run_draft(settings: WorkerSettings, lifeline: Lifeline, steps: Steps) -> None:
    """Load the draft worker and run it to its end. Raises a `PearlError` if that fails."""
    config = settings.config
    model = settings.model
    tracer = _tracer(settings)
    endpoint = connect(settings.address, _keys(settings))
    try:
        device = place(config, model.role)
        make_channel = tensor_channel(settings, 1, device)
        device_choice = settled(config, model.role)  # before this process is pinned
        pin(config, model.role)
        steps.done("connecting, and choosing devices")
        progress = lifeline.progress()
        # This comes before the model is loaded, because it may refuse the pair.
        translation, tokenizer, spoken = _draft_vocabulary(config, progress)
        if translation is not None:
            lifeline.note(
                f"the draft {config.draft} has another vocabulary than its target: {translation} and proposes no "
                "other. Texts stay the same, but more of its guesses are rejected."
            )
        steps.done("reading the tokenizers")
        start = tracer.clock()
        runner = make_runner(
            model, device, progress, target=config.target, shares=bool(shared_gpus(config))
        )
        tracer.note("busy", "load", start)
        steps.done("loading the model")
        if translation is not None:
            runner = TranslatedRunner(runner, translation, tokenizer.vocab_size)
        digest = vocabulary_digest(tokenizer, tokenizer.vocab_size)
        store = _datastore(config, tokenizer, runner.vocab_size)
        policies = partial(make_policy, classifier=classifier_of(config))

        def welcomed(welcome: Welcome) -> tuple[DraftExecutor, RowPacker]:
            packer = RowPacker()
            if make_channel:
                packer = RowPacker(make_channel(welcome.vocab_size))
            proposer = ModelProposer(
                runner,
                welcome.vocab_size,
                policies,
                texts=config.slots,
                datastore=store,
                guides=_guides(spoken, runner.vocab_size),
            )
            return DraftExecutor(proposer), packer

        worker = DraftWorker(
            endpoint,
            Hello(PROTOCOL_VERSION, Role.DRAFT, runner.vocab_size, runner.context, digest),
            welcomed,
            ready=partial(lifeline.tell, "ready", device=device_choice.name, dtype=runner.weights),
            stopping=lifeline.closed.is_set,
            heartbeat_seconds=min(1.0, config.draft_timeout / 4),
            tracer=tracer,
            beat=lifeline.beat,
            slots=config.slots,
            piece=runner.capabilities.prompt_piece,
            computes=partial(_occupy, device_choice, runner),
        )
        with torch.inference_mode():
            worker.run()
    finally:
        endpoint.close(flush=_FLUSH_SECONDS)
        tracer.stop()


def run_draft_service(
    config: EngineConfig,
    address: str,
    ready: Callable[[str, str], None],
    stopping: Callable[[], bool],
    progress: Progress,
) -> None:
    """Load a draft service and run it at `address` until `stopping()` is true.

    Raises a `PearlError` if that fails.

    Args:
        config: the settings of an engine. The service is this engine's draft; of the engine's
            target it reads only the tokenizer.
        ready: called with the address and the device once engines may connect.
    """
    if is_head(config.draft):
        raise ConfigError(
            f"draft {config.draft}: a head reads hidden states of its target, which other engines do not send; name a "
            "draft model"
        )
    tracer = Tracer(_service_recorder(config))
    endpoint = listen(address, channel_keys(config.keys), is_target=False)
    try:
        device = place(config, "draft")
        device_choice = settled(config, "draft")
        pin(config, "draft")
        translation, tokenizer, _ = _draft_vocabulary(config, progress)
        model = config.model("draft")
        if config.slots > 1:  # a single text can use all slots for branches that `make_runner` adds
            model = replace(model, slots=config.slots * (1 + _BRANCHES_EACH))
        runner = make_runner(model, device, progress)
        if translation is not None:
            log.warning(
                "the draft %s translates for %s: %s", config.draft, config.target, translation
            )
            runner = TranslatedRunner(runner, translation, tokenizer.vocab_size)
        proposer = ModelProposer(
            runner,
            runner.vocab_size,
            texts=config.slots,
            datastore=_datastore(config, tokenizer, runner.vocab_size),
        )
        size = tokenizer.vocab_size
        digest = vocabulary_digest(tokenizer, size)
        service = DraftService(
            endpoint,
            Hello(
                PROTOCOL_VERSION,
                Role.DRAFT,
                size,
                runner.context,
                digest,
                config.draft[-_NAME_LENGTH:],
                config.slots,
            ),
            partial(vocabulary_digest, tokenizer),
            DraftExecutor(proposer),
            ready=partial(ready, endpoint.address, device_choice.name),
            stopping=stopping,
            tracer=tracer,
            slots=config.slots,
            piece=runner.capabilities.prompt_piece,
            computes=partial(_occupy, device_choice, runner),
        )
        with torch.inference_mode():
            service.run()
    finally:
        endpoint.close(flush=_FLUSH_SECONDS)
        tracer.stop()


def _service_recorder(config: EngineConfig) -> Recorder | None:
    if config.trace is None:
        return None
    return outside_recorder(Path(config.trace), "draft", config.model_dump(mode="json"))


def _occupy(device: Device, runner: ModelRunner) -> None:
    """If the device names cores, pin this thread to the first of them and the runner's threads to the others."""
    if device.cores is not None:
        occupy(device.cores, runner.use_threads)


def _draft_vocabulary(
    config: EngineConfig, progress: Progress
) -> tuple[Translation | None, Tokenizer, ModelConfig]:
    """Return (translation, tokenizer, model) for the token ids that the draft sends to the target.

    `model` is the model whose ids are sent, the draft or the target; `tokenizer` is its tokenizer.
    `translation` converts between the ids that are sent and the ids that the draft computes with.
    It is None if no ids need to be converted.
    """
    trust = config.trust_remote_code
    if is_head(config.draft):
        return None, _tokenizer(config.model("target"), progress), config.model("target")
    loaded = load_tokenizer(config.draft, trust_remote_code=trust, progress=progress, encodes=False)
    translation = translation_of(config.target, config.draft, trust, loaded)
    if translation is None:
        return None, loaded[0], config.model("draft")
    return translation, translation.target, config.model("target")


def _keys(settings: WorkerSettings) -> Keys | None:
    return channel_keys(settings.config.keys)


def _tracer(settings: WorkerSettings) -> Tracer:
    """Return this worker's tracer. Each worker writes a part of a trace, in a file of its own.

    If the setting `trace` names a file, the part is written beside this file. If a front (a user's
    process) asks for a recording, the part is written to the engine's directory, so that a front
    cannot choose the file that this process writes.
    """

    def recorder(trace: Path) -> Recorder:
        run = settings.run or str(settings.directory)
        header = settings.model_dump(mode="json", include={"role", "config"}) | {"run": run}
        return Recorder(part_path(trace, settings.role, os.getpid()), header | where_and_what())

    def open_part(number: int) -> Recorder:
        return recorder(asked_for(settings.directory, number))

    if settings.config.trace:
        return Tracer(recorder(Path(settings.config.trace)), open_part)
    return Tracer(None, open_part)


def _tokenizer(model: ModelConfig, progress: Progress) -> Tokenizer:
    """Return a tokenizer that only decodes, because the user's process has encoded the prompts."""
    trust = model.trust_remote_code
    return load_tokenizer(model.spec, trust_remote_code=trust, progress=progress, encodes=False)[0]


def _guides(model: ModelConfig, vocab_size: int) -> Guides:
    """Return the guides, which hold texts to a grammar.

    They need a tokenizer that encodes. It is loaded with the first grammar, because few requests have a grammar.
    """

    return Guides(
        lambda: load_tokenizer(model.spec, trust_remote_code=model.trust_remote_code)[0], vocab_size
    )


def _datastore(config: EngineConfig, tokenizer: Tokenizer, vocab_size: int) -> Datastore | None:
    """Return the datastore that guesses come from, for a model of `vocab_size` ids; None if `config` names none.

    Raises `ConfigError` if its files cannot be read, or were built with another tokenizer.
    """
    if config.datastore is None:
        return None
    store = Datastore(Path(config.datastore), vocab_size)
    # A draft may have fewer ids; its vocabulary is compared with the target's instead.
    if tokenizer.vocab_size >= store.header.vocab_size:
        check_tokenizer(store.header, tokenizer, store.directory)
    return store


def make_runner(
    model: ModelConfig,
    device: torch.device,
    progress: Progress = silent,
    features: Features = "",
    target: str = "",
    shares: bool = False,
) -> ModelRunner:
    """Load the model on `device`, and return its runner. Raises `ModelError`.

    Args:
        features: see `load_runner`.
        target: the name of the target if the model is a draft. A draft that is a head of the target
            reads the target's files.
        shares: whether the target runs on the same GPU.
    """
    runner: ModelRunner
    spare = 0
    if model.role == "draft" and not shares:  # if the GPU is shared, leave the memory to the target
        spare = BRANCHES
    if is_toy(model.spec):
        runner = load_toy(model.spec, model.role, model.max_context, model.slots)
    elif target and is_head(model.spec):
        slots = model.slots
        if device.type == "cpu":
            slots += spare
        runner = load_draft_head(
            model.spec, target, device, model.max_context, slots, progress, model.rounding
        )
    else:
        runner = load_runner(model, device, progress, features, spare)
    gc.collect()
    # Otherwise a full collection during a step would walk all objects of torch and the model: tens
    # of ms.
    gc.freeze()
    if model.pace:
        pace(runner, model.pace)
    return runner


def tensor_channel(
    settings: WorkerSettings, rank: int, device: torch.device
) -> Callable[[int], TensorChannel] | None:
    """Return a function that opens the tensor channel for a vocabulary size.

    Without a tensor channel, return None: dense distributions are then sent as frames.
    """
    config = settings.config
    kind = settings.tensors or config.tensors
    if kind != "nccl" or not config.has_draft:
        return None
    from pearl.transport.torch_dist import ProcessGroupChannel

    def make(vocab_size: int) -> TensorChannel:
        store = settings.directory / "group"
        timeout = config.draft_timeout
        return ProcessGroupChannel(store, "rows", rank, vocab_size, device, timeout)

    return make
