"""`Engine`, the user's handle on a pair of models that other processes hold.

In this process's background run only the threads that watch the workers and read what the target sends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from pearl.cache import Progress, silent
from pearl.config import EngineConfig, RequestOptions
from pearl.engine.client import Client
from pearl.engine.launcher import LocalLauncher
from pearl.engine.processes import DraftKeeper, Worker
from pearl.engine.registry import read_card
from pearl.engine.request import Options, Prompt, as_prompts, encode, submission
from pearl.engine.stream import Result, Stream
from pearl.errors import ConfigError
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.protocol.messages import Welcome
from pearl.steps import Steps
from pearl.text.tokenizer import GenerationDefaults

log = logging.getLogger(__name__)

_AHEAD = 2  # times the slots: requests that `generate` submits before the first of them has ended


class Engine:
    """A pair of models in two processes, ready to generate. It belongs to the process that made it, not to its forks.

        with Engine() as engine:                         # the embedded pair
            print(engine.generate(["Hello!"])[0].text)

    Args:
        target, draft: models as in `EngineConfig`; draft "none" for the methods ar and ngram.
        config: all settings at once; the other arguments override it.
        progress: called with a line of text while models load.
        settings: any field of `EngineConfig`.

    Attributes:
        directory: of its sockets, and of the card by which the user's other processes find it.
        defaults: the checkpoint's own sampling settings.
        client: the connection to the target, for those who read for several streams.

    Raises:
        ConfigError, ModelError, StartError: nothing is left running.
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
    def launched_by(cls, launcher: LocalLauncher, progress: Progress = silent) -> Engine:
        """An engine whose workers another launcher starts. Raises as the constructor does."""
        engine = cls.__new__(cls)
        engine._launch(launcher, progress)
        return engine

    @classmethod
    def attach(cls, directory: Path, progress: Progress = silent) -> Engine:
        """Another front, in another process of the same user, of the engine in `directory`.

        Closing it does not end that engine. Raises `ConfigError`, `StartError`.
        """
        card = read_card(directory)
        if card is None:
            raise ConfigError(f"{directory} holds no running engine")
        config = EngineConfig(**card.config | {"trace": None})
        engine = cls.__new__(cls)
        engine._launcher = None
        engine.config = config
        engine.directory = directory
        engine.tokenizer, engine.defaults = _load_tokenizer(config, progress)
        deadline = time.monotonic() + config.target_timeout
        engine.client = Client(card.address, config, directory).meet(deadline)
        return engine

    def _launch(self, launcher: LocalLauncher, progress: Progress) -> None:
        self._launcher: LocalLauncher | None = launcher
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
            self.client = Client(address, self.config, self.directory, launcher).meet(deadline)
            steps.done("meeting the target")
            launcher.keep()
        except BaseException:
            launcher.close()
            raise

    def close(self) -> None:
        """Ends the workers and removes their files; a second time it does nothing, nor in a forked process.

        An engine closes itself once it and its streams are no longer referenced.
        """
        self.client.close()

    @property
    def notes(self) -> list[str]:
        """What the user should know of these models on these devices, such as a draft of another vocabulary."""
        return self._launcher.notes if self._launcher is not None else []

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
        """Tokens that a prompt and its text may have together."""
        return self.welcome.context

    @property
    def welcome(self) -> Welcome:
        """What the target reported of itself, and the speeds measured at start."""
        assert self.client.welcome is not None
        return self.client.welcome

    @property
    def target_worker(self) -> Worker | None:
        """The target's process; None if another process launched it."""
        return None if self._launcher is None else self._launcher.target

    @property
    def draft(self) -> DraftKeeper | None:
        """The keeper of the draft worker; None if another process launched it."""
        return None if self._launcher is None else self._launcher.draft

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft worker on this host; None if there is none now."""
        if self.draft is None or not self.draft.worker.alive:
            return None
        return self.draft.worker.pid

    def stream(
        self,
        prompt: Prompt,
        params: RequestOptions | None = None,
        *,
        method: str | None = None,
        rule: str | None = None,
        preview: bool = False,
        raw: bool = True,
        show: Collection[str] = (),
    ) -> Stream:
        """Generates one text, piece by piece.

        Args:
            prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
            params: how to decode and sample; fields that are not set have the checkpoint's defaults.
            method, rule, preview, raw, show: see `Options`.

        Raises:
            ConfigError: an unknown option, or one that this engine cannot serve.
            RequestError: the prompt does not fit, for example. Nothing was computed.
            TargetLost: (while iterating) the target is gone; the engine can no longer be used.
        """
        self.client.check_open()
        submit = submission(
            next(self.client.numbers),
            self.encode(prompt, raw=raw),
            self.context,
            _options(self.config, params, method, rule).with_seed(),
            self.defaults,
            preview,
            self.tokenizer,
        )
        return self.client.submit(Stream(self.client, self.tokenizer, submit, show), submit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: RequestOptions | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generates a text for each prompt, `slots` of them side by side; arguments as for `stream`."""
        waiting = deque(as_prompts(prompts))
        streams: deque[Stream] = deque()
        results = []
        slots = self.config.slots
        most_streams = 1 if slots == 1 else _AHEAD * slots
        try:
            while waiting or streams:
                while waiting and len(streams) < most_streams:
                    streams.append(self.stream(waiting.popleft(), params, **options))
                for _ in streams[0]:
                    pass
                results.append(streams.popleft().result)
        finally:
            for stream in streams:
                stream.close()
        return results

    def encode(self, prompt: Prompt, *, raw: bool = True) -> list[int]:
        """The tokens of a prompt; see `stream`. Raises `RequestError`."""
        return encode(self.tokenizer, prompt, raw, self.context)


def _load_tokenizer(config: EngineConfig, progress: Progress) -> tuple[Any, GenerationDefaults]:
    trust = config.trust_remote_code
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=trust, progress=progress)
    with suppress(Exception):  # imports what a template needs, while the workers load
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
    """The options of a request; `method` and `rule` override `params`. Raises `ConfigError` for what is not served."""
    options = params or RequestOptions()
    if method:
        options = options.changed(method=method)
    if rule:
        options = options.changed(rule=rule)
    config.check_options(options)
    return options
