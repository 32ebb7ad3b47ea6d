"""The engine, as the user's process sees it: a launcher, which starts the workers, and a client of theirs.

It holds no model.  Nothing here runs in the background but the threads that watch the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from pearl.cache import Progress, silent
from pearl.config import EngineConfig, SamplingParams
from pearl.engine.client import Client, Options, check_options
from pearl.engine.launcher import Launcher, LocalLauncher
from pearl.engine.request import Prompt
from pearl.engine.stream import Piece, Result, Stream
from pearl.errors import PearlError
from pearl.models.tokenizers import load_tokenizer
from pearl.protocol.messages import Welcome
from pearl.text.tokenizer import GenerationDefaults
from pearl.worker.startup import Startup

__all__ = ["Engine", "Piece", "Progress", "Result", "Stream"]

log = logging.getLogger(__name__)


class Engine:
    """A pair of models in two processes, ready to generate. It belongs to the process that made it, not to its forks.

        with Engine() as engine:                         # the embedded pair
            print(engine.generate(["Hello!"])[0].text)

    Args:
        target, draft: models as in `EngineConfig`; draft "none" for method ar only.
        config: all settings at once; the other arguments override it.
        progress: called with a line of text while models load.
        settings: any field of `EngineConfig`.

    Attributes:
        directory: where its sockets are, and the card by which another front of the same user finds it.
        defaults: how the checkpoint asks to be sampled.

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
        given = {"target": target, "draft": draft, **settings}
        known = config.model_dump() if config else {}
        config = EngineConfig(**{**known, **{k: v for k, v in given.items() if v is not None}})
        self._start(LocalLauncher(config), progress)

    @classmethod
    def launched_by(cls, launcher: Launcher, progress: Progress = silent) -> Engine:
        """One whose workers are started otherwise, or run already. Raises as the constructor does."""
        engine = cls.__new__(cls)
        engine._start(launcher, progress)
        return engine

    def _start(self, launcher: Launcher, progress: Progress) -> None:
        client, startup = None, Startup()
        startup.passed("until here")
        try:
            address = launcher.launch(progress)
            startup.passed("checks and launch")
            tokenizer, defaults = _tokenizer(launcher.config, progress)
            startup.passed("tokenizer")
            deadline = launcher.wait_until_ready()
            startup.passed("waiting for the workers")
            client = Client(launcher.config, address, launcher.directory, tokenizer, defaults, launcher)
            client.meet(deadline)
            launcher.keep()
            startup.passed("meeting")
            log.debug("%s", startup)
        except BaseException:
            (client or launcher).close()
            raise
        self._launcher, self._client = launcher, client
        self.config, self.directory = launcher.config, launcher.directory
        self.tokenizer, self.defaults = tokenizer, defaults

    def close(self) -> None:
        """Ends the workers and removes what they left; a second time does nothing, nor does it in a forked process.

        An engine that is dropped closes itself, once its streams are dropped too.
        """
        self._client.close()

    def __repr__(self) -> str:
        pair = self.config.target + (f" with {self.config.draft}" if self.config.has_draft else "")
        return f"<Engine: {pair}, {'closed' if self._client.closed else 'running'} in {self.directory}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def context(self) -> int:
        """Tokens that prompt and text may have together."""
        return self._client.context

    @property
    def welcome(self) -> Welcome:
        """What the target said of itself and of the speeds measured at start."""
        return self._client.welcome

    @property
    def requests_ahead(self) -> int:
        """How many requests of other clients are served before the one that waits; told every two seconds."""
        return self._client.ahead

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft worker on this host; None where there is none now."""
        return self._launcher.draft_pid

    @property
    def draft_restarts(self) -> int:
        """How often a draft that was lost was started again, where this process launched it."""
        return self._launcher.draft_restarts

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[Options]) -> Stream:
        """Generates one text, piece by piece.

        Args:
            prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
            params: how to sample; what is not set is the checkpoint's default.
            options: method, decoding, preview and raw; see `Options`.

        Raises:
            ConfigError: an option that there is not, or with which this engine cannot generate.
            RequestError: the prompt does not fit, say. Nothing was computed.
            TargetLost: (while iterating) the target is gone; the engine is of no more use.
        """
        check_options(options, params)
        return self._client.stream(prompt, params, **options)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> list[Result]:
        """Generates a text for each prompt, `slots` of them side by side; arguments as for `stream`."""
        check_options(options, params)
        return self._client.generate(prompts, params, **options)

    def encode(self, prompt: Prompt, *, raw: bool = True) -> list[int]:
        """The tokens of a prompt; see `stream`."""
        return self._client.encode(prompt, raw=raw)

    def start_trace(self, path: str | Path) -> None:
        """Records what both workers do from now on, until `stop_trace`; between two requests only.

        The KV cache starts empty, so that the recording can be replayed. Raises `TraceError`.
        """
        self._client.start_trace(path)

    def stop_trace(self) -> Path:
        """Ends the recording and writes its file, whose path it returns. After a `TraceError` it can be tried again."""
        return self._client.stop_trace()

    @property
    def trace_errors(self) -> list[PearlError]:
        """Of a closed engine: why a trace that it was to write is not there."""
        return [*self._client.untraced, *self._launcher.untraced]

    def begin_live_trace(self, wanted: Callable[[], bool]) -> Path:
        """As `start_trace`, for who reads what the workers write as they write it (`pearl.trace.recorder.GrowingPart`).

        It begins once no text is being written, and new ones wait for that; it is given up where not `wanted` any more.
        Returns what the workers' files are named after; `end_live_trace` removes them. Raises `TraceError`.
        """
        return self._client.begin_live_trace(wanted)

    def end_live_trace(self) -> None:
        self._client.end_live_trace()

    def wait_to_be_heard(self) -> None:
        """Returns once a request can be sent; `stream` waits for that too."""
        self._client.wait_to_be_heard()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Reads what comes for all streams until `done`: for one thread that reads for several.

        `done` is asked after each message, after `wake`, and ten times a second. Raises `TargetLost`, `EngineClosed`.
        """
        self._client.wait_for(done)

    def wake(self) -> None:
        """Makes who is in `read_until` look again. From any thread."""
        self._client.wake()

    def wait_until_lost(self) -> None:
        """Returns never. Raises `TargetLost` once the target is gone; for a process that only keeps an engine alive."""
        self._client.wait_until_lost()


def _tokenizer(config: EngineConfig, progress: Progress) -> tuple[Any, GenerationDefaults]:
    trust = config.trust_remote_code
    tokenizer, defaults = load_tokenizer(config.target, trust_remote_code=trust, progress=progress)
    with suppress(Exception):  # imports what a template needs, while the workers load
        tokenizer.chat_text([{"role": "user", "content": "Hello"}])
    if defaults.ignored:
        log.warning("the checkpoint asks for %s, which is not supported: ignored", ", ".join(defaults.ignored))
    return tokenizer, defaults
