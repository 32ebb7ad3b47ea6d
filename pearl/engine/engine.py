"""`Engine`, the user's handle on a pair of models that run in other processes.

This process has background threads, which only watch the workers and read the target's messages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from pearl.cache import Progress, silent
from pearl.config import EngineConfig, RequestOptions
from pearl.engine.client import Client
from pearl.engine.launcher import Attached, LocalLauncher
from pearl.engine.processes import DraftKeeper, Worker
from pearl.engine.request import Chat, Options, Prompt, as_prompts, encode, submission
from pearl.engine.stream import Result, Stream
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.protocol.messages import Welcome
from pearl.steps import Steps
from pearl.text.tokenizer import GenerationDefaults

log = logging.getLogger(__name__)

_AHEAD = 2  # `generate` submits up to _AHEAD * slots requests before the oldest has ended


class Engine:
    """A pair of models in two processes, ready to generate text.

    An engine can be used only in the process that made it, not in a fork of that process.

        with Engine() as engine:                         # the embedded pair
            print(engine.generate(["Hello!"])[0].text)

    Args:
        target, draft: models, as in `EngineConfig`; draft "none" is enough for methods ar and
            ngram.
        config: all settings at once; the other arguments override them.
        progress: called with a line of text while models load.
        settings: any fields of `EngineConfig`.

    Attributes:
        directory: the engine's directory, which has the sockets, and a file by which the user's
            other processes find the engine (see `registry`).
        tokenizer: the target's tokenizer.
        defaults: the checkpoint's own sampling settings.
        client: the connection to the target, shared by all streams.

    Raises:
        ConfigError, ModelError, StartError: the engine did not start; no process is left running.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress = silent,
        **settings: Any,
    ) -> None:
        values = config.model_dump() if config else {}
        settings |= {"target": target, "draft": draft}
        values |= {name: value for name, value in settings.items() if value is not None}
        self._launch(LocalLauncher(EngineConfig(**values)), progress)

    @classmethod
    def launched_by(cls, launcher: LocalLauncher | Attached, progress: Progress = silent) -> Engine:
        """Return an engine whose workers `launcher` starts. Raises the same errors as the constructor."""
        engine = cls.__new__(cls)
        engine._launch(launcher, progress)
        return engine

    @classmethod
    def attach(cls, directory: Path, progress: Progress = silent) -> Engine:
        """Connect to a running engine, which another process of the same user has launched.

        Closing the returned engine does not end the running one. Raises `ConfigError` if
        `directory` has no running engine, and `StartError` if that engine does not answer.
        """
        return cls.launched_by(Attached(directory), progress)

    def _launch(self, launcher: LocalLauncher | Attached, progress: Progress) -> None:
        self._launcher = launcher
        self.config = launcher.config
        self.directory = launcher.directory
        steps = Steps(log)
        try:
            address = launcher.launch(progress)
            steps.done("checking the settings, and starting the workers")
            self.tokenizer, self.defaults = _load_tokenizer(self.config, progress)
            steps.done("reading the tokenizer")
            deadline = launcher.wait_until_ready()
            steps.done("waiting for the workers")
            self.client = Client(address, launcher).meet(deadline)
            steps.done("meeting the target")
            launcher.keep()
        except BaseException:
            launcher.close()
            raise

    def close(self) -> None:
        """End the workers and remove their files.

        A second call does nothing, and neither does a call in a forked process. An engine closes
        itself once neither the engine nor one of its streams is referenced any more.
        """
        self.client.close()

    @property
    def notes(self) -> list[str]:
        """Notes for the user about these models on these devices, each of one or two sentences."""
        return self._launcher.notes

    def __repr__(self) -> str:
        models = self.config.target
        if self.config.has_draft:
            models += f" with {self.config.draft}"
        state = "closed" if self.client.is_closed else "running"
        return f"<Engine: {models}, {state} in {self.directory}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def context(self) -> int:
        """The most tokens that a prompt and the text generated for it may have together."""
        return self.welcome.context

    @property
    def welcome(self) -> Welcome:
        """What the target has reported about itself, with the speeds measured at start."""
        assert self.client.welcome is not None
        return self.client.welcome

    @property
    def target_worker(self) -> Worker | None:
        """The target's process; None if another process launched it."""
        return self._launcher.target

    @property
    def draft(self) -> DraftKeeper | None:
        """The object that watches and restarts the draft worker.

        None if the engine has no draft, or if another process launched the draft.
        """
        return self._launcher.draft

    def stream(
        self,
        prompt: Prompt,
        params: RequestOptions | None = None,
        *,
        method: str | None = None,
        rule: str | None = None,
        prefix: str = "",
        preview: bool = False,
        raw: bool = True,
        show: Collection[str] = (),
    ) -> Stream:
        """Generate one text, piece by piece.

        Args:
            prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
            params: how to decode and sample; unset fields get the checkpoint's defaults.
            method, rule, prefix, preview, raw, show: see `Options`.

        Raises:
            ConfigError: an option is unknown, or this engine cannot serve it.
            RequestError: the request cannot be served, for example because the prompt is too long.
                Nothing was computed.
            TargetLost: the target is gone, and the engine can no longer be used. This may also be
                raised while iterating.
        """
        self.client.check_open()
        if isinstance(prompt, Chat):
            prefix = prompt.prefix
        submit = submission(
            next(self.client.numbers),
            self.encode(prompt, raw=raw),
            self.context,
            _options(self.config, params, method, rule).with_seed(),
            self.defaults,
            preview,
            self.tokenizer,
            prefix,
        )
        return self.client.submit(Stream(self.client, self.tokenizer, submit, show), submit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestOptions | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generate a text for each prompt. Further arguments are those of `stream`.

        The engine generates as many texts at a time as its setting `slots` says.
        """
        streams: deque[Stream] = deque()
        results = []
        slots = self.config.slots
        most_streams = 1 if slots == 1 else _AHEAD * slots
        try:
            for prompt in as_prompts(prompts):
                if len(streams) == most_streams:
                    results.append(streams.popleft().read())
                streams.append(self.stream(prompt, params, **options))
            while streams:
                results.append(streams.popleft().read())
        finally:
            for stream in streams:
                stream.close()
        return results

    def encode(self, prompt: Prompt, *, raw: bool = True) -> list[int]:
        """Return the tokens of a prompt; for the arguments see `stream`.

        Raises `RequestError` if the prompt is invalid, or much longer than the context.
        """
        return encode(self.tokenizer, prompt, raw, self.context)


def _load_tokenizer(config: EngineConfig, progress: Progress) -> tuple[Any, GenerationDefaults]:
    trust = config.trust_remote_code
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=trust, progress=progress)
    with suppress(Exception):  # import the template engine while the workers load
        tokenizer.chat_text([{"role": "user", "content": "Hello"}])
    log.info("defaults of the checkpoint: %s", defaults)
    if defaults.ignored:
        log.warning(
            "the checkpoint asks for %s, which is not supported: ignored",
            ", ".join(defaults.ignored),
        )
    return tokenizer, defaults


def _options(
    config: EngineConfig, params: RequestOptions | None, method: str | None, rule: str | None
) -> RequestOptions:
    """Return a request's options: `params`, overridden by `method` and `rule`.

    Raises `ConfigError` for options that this engine cannot serve.
    """
    options = params or RequestOptions()
    if method:
        options = options.changed(method=method)
    if rule:
        options = options.changed(rule=rule)
    config.check_options(options)
    return options
