"""The engine, as the user's process sees it: it starts the workers, sends them requests and hands out text.

It holds no model.  Nothing here runs in the background but the threads that watch the workers: whoever waits for a
token reads the socket, for all who wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary

from pearl import errors
from pearl.client.request import Prompt, as_prompts, encode, submission
from pearl.client.stream import Piece, Result, Stream
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine.processes import END_SECONDS, DraftKeeper, Ranks, Worker
from pearl.errors import (
    ConfigError,
    EngineClosed,
    PearlError,
    StartError,
    TargetLost,
    TraceError,
    TransportError,
)
from pearl.models.tokenizer import GenerationDefaults, load_tokenizer
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Committed,
    Error,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Preview,
    Role,
    Trace,
    Welcome,
)
from pearl.silence import SLACK, Silence
from pearl.trace.chrome import merge
from pearl.trace.recorder import asked_for, being_written
from pearl.transport.address import bind_address, check_bind, private_directory
from pearl.transport.keys import channel_keys
from pearl.transport.zeromq import ZmqConnection, ensured_keys

__all__ = ["Engine", "Piece", "Result", "Stream"]

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

CARD = "engine.json"  # in the engine's directory: how another front of the same user reaches it
_DRAFT_END_SECONDS = 1.0  # for the draft to end by itself where the target is lost, and callers wait to be told
_LAST_WORDS_SECONDS = 5.0  # for the status line of a worker that is going down
_RECORD_SECONDS = 10.0  # for both workers to begin or end a recording
_READ_SECONDS = 0.1  # longest turn at the socket, so that a dead worker is noticed


class Engine:
    """A pair of models in two processes, ready to generate. It belongs to the process that made it, not to its forks.

        with Engine() as engine:                         # the embedded pair
            print(engine.generate(["Hello!"])[0].text)

    Args:
        target, draft: models as in `EngineConfig`; draft "none" for method ar only.
        config: all settings at once; the other arguments override it.
        progress: called with a line of text while models load.
        settings: any field of `EngineConfig`.

    Raises:
        ConfigError, ModelError, StartError: nothing is left running.
    """

    _remedy = "Make a new engine"  # what to do once the target is lost

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress = lambda _: None,
        **settings: Any,
    ) -> None:
        self._owner = os.getpid()
        given = {"target": target, "draft": draft, **settings}
        known = config.model_dump() if config else {}
        self.config = EngineConfig(**{**known, **{k: v for k, v in given.items() if v is not None}})
        self._turns = threading.Condition(threading.RLock())  # of those who wait, to read the socket
        self._reading = False
        self._requests = count(1)
        # Weak, so that a stream which its user has dropped is collected, and so cancelled.
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._closed = self._ended = False
        self._ending = threading.RLock()
        self._fate = ""  # why the target is lost
        self._silence = Silence(10 * _READ_SECONDS)  # the target's
        self._welcome: Welcome | None = None
        self._recording: tuple[Path, int] | None = None
        self._recorded: Trace | TraceError | None = None  # the workers' last word on it
        self._draft: DraftKeeper | None = None
        self._target: Ranks | None = None
        self._endpoint: ZmqConnection | None = None
        self._directory = self._own_directory()
        try:
            self._start(progress)
        except BaseException:
            self.close()
            raise

    # ---- starting and stopping ----

    def _start(self, progress: Progress) -> None:
        deadline = time.monotonic() + self.config.startup_timeout
        address = bind_address(self.config.control, self._directory)
        keys = ensured_keys(self.config.control, self.config.keys, self._directory)
        check_bind(address, keys=keys is not None)
        self._target = Ranks("target", self.config, address, self._directory, self._followers(), progress=progress)
        self._target.wait_for("bound", deadline)
        self._start_draft(self._target.address, progress)
        self.tokenizer, self.defaults = self._load_tokenizer(progress)
        self._wait_until_ready(deadline)
        self._meet_target(self._target.address, deadline)
        if self._draft:
            self._draft.keep()
        config = self.config.model_dump(mode="json")
        for role in ("target", "draft"):  # whoever attaches may do so from another directory
            config[role] = os.path.abspath(config[role]) if os.path.exists(config[role]) else config[role]
        card = {"pid": os.getpid(), "address": self._target.address, "config": config}
        (self._directory / CARD).write_text(json.dumps(card))

    def _followers(self) -> Iterable[int]:
        """The target's ranks beside the first that are launched here."""
        return range(1, self.config.target_tp)

    def _own_directory(self) -> Path:
        """Where the sockets are; nobody else can reach it."""
        return private_directory()

    def _meet_target(self, address: str, deadline: float) -> None:
        self._endpoint = ZmqConnection(address, channel_keys(self.config.keys, self._directory))
        self._silence.heard()
        self._endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
        try:
            self._read_until(lambda: self._welcome is not None or time.monotonic() > deadline)
        except TargetLost as error:
            raise StartError(str(error)) from None
        if self._welcome is None:
            raise StartError("the target does not answer; see --log-level debug")

    def _start_draft(self, address: str, progress: Progress) -> None:
        """Launches the draft here; under torchrun another rank does."""
        if self.config.has_draft:
            self._draft = DraftKeeper(self.config, address, self._directory, progress)

    def _load_tokenizer(self, progress: Progress) -> tuple[Any, GenerationDefaults]:
        trust = self.config.trust_remote_code
        tokenizer, defaults = load_tokenizer(self.config.target, trust_remote_code=trust, progress=progress)
        if defaults.ignored:
            log.warning("the checkpoint asks for %s, which is not supported: ignored", ", ".join(defaults.ignored))
        return tokenizer, defaults

    def _wait_until_ready(self, deadline: float) -> None:
        assert self._target is not None
        while not self._target.reached("ready"):
            self._check_draft()
            try:
                self._target.wait_for("ready", min(deadline, time.monotonic() + 0.2))
            except StartError:
                if not self._target.alive:  # it has just died: its own words, not that it is late
                    self._target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
                    raise self._target.fate() from None
                if time.monotonic() > deadline:
                    raise

    def _check_draft(self) -> None:
        """Raises why the draft that is waited for will not come."""
        if self._draft and not self._draft.worker.alive:
            raise self._start_failure(self._draft.worker)

    def _start_failure(self, draft: Worker) -> PearlError:
        """Whose failure it was: a draft also ends because the target it talks to has failed."""
        assert self._target is not None
        draft.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
        fate = draft.fate()
        if isinstance(fate, TransportError):
            with contextlib.suppress(StartError):
                self._target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
                return self._target.fate()
        return fate

    def __del__(self) -> None:
        """A last resort, for an engine dropped unclosed.

        Not where the interpreter is ending: its threads are frozen, locks in hand, and cannot be waited for. There the
        workers end by themselves, for their stdin closes.
        """
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()

    def close(self) -> None:
        """Ends the workers and removes what they left; a second time does nothing.

        Nor does it in a forked process: nothing of an engine is its own there, and locks may be held by threads that
        only the parent has.
        """
        if self._closed:
            return
        if not self._is_ours:
            self._closed = True
            return
        if self._recording is not None:
            with self._said_not_raised():
                self.stop_trace()
        self._closed = True
        if self._endpoint is not None:
            with self._turns:  # a reader would be left with a closed socket in its hands
                self._turns.wait_for(lambda: not self._reading, 2 * _READ_SECONDS)
            self._endpoint.close()
        self._end_workers()
        if self.config.trace:
            self._write_trace(Path(self.config.trace))

    def _remove_directory(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _write_trace(self, path: Path) -> None:
        """Once the workers are gone. Whatever is wrong with it, the texts are not: it is said, not raised."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        with self._said_not_raised():
            while being_written(path) and time.monotonic() < deadline:  # under torchrun the draft is another rank's
                time.sleep(_READ_SECONDS)
            merge(path)

    @contextlib.contextmanager
    def _said_not_raised(self) -> Iterator[None]:
        try:
            yield
        except (TraceError, TargetLost) as error:
            log.error("no trace: %s", error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._owner

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise EngineClosed(
                f"this engine belongs to process {self._owner}, of which this one is a fork: make an engine here, or "
                "attach to that one"
            )

    # ---- generating ----

    @property
    def context(self) -> int:
        """Tokens that prompt and text may have together."""
        assert self._welcome is not None
        return self._welcome.context

    @property
    def directory(self) -> Path:
        """Where its sockets are, and the card by which another front of the same user finds it."""
        return self._directory

    @property
    def draft_pid(self) -> int | None:
        """Process id of the draft worker on this host; None where there is none now."""
        worker = self._draft.worker if self._draft else None
        return worker.pid if worker is not None and worker.alive else None

    @property
    def welcome(self) -> Welcome:
        """What the target said of itself and of the speeds measured at start."""
        assert self._welcome is not None
        return self._welcome

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        decoding: DecodingConfig | None = None,
        preview: bool = False,
        raw: bool = True,
    ) -> Stream:
        """Generates one text, piece by piece.

        Args:
            prompt: text, token ids, or chat messages ({"role": ..., "content": ...}).
            params: how to sample; what is not set is the checkpoint's default.
            method: shorthand for decoding=DecodingConfig(method=...).
            preview: also yield the draft's pending tokens.
            raw: take a text prompt as it is; False applies the chat template, where there is one.

        Raises:
            RequestError: the prompt does not fit, say. Nothing was computed.
            TargetLost: (while iterating) the target is gone; the engine is of no more use.
        """
        self._check_ours()
        if self._closed:
            raise EngineClosed("this engine has been closed; make another")
        submit = submission(
            next(self._requests),
            self.encode(prompt, raw=raw),
            self.context,
            (params or SamplingParams()).with_seed(),
            self.defaults,
            self._decoding(method, decoding),
            preview,
        )
        stream = Stream(self, submit)
        if not self._streams:
            self._silence.heard()
        self._streams[submit.request] = stream
        self._post(submit)
        return stream

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Result]:
        """Generates a text for each prompt, one after the other; arguments as for `stream`."""
        results = []
        for prompt in as_prompts(prompts):
            with self.stream(prompt, params, **options) as stream:
                for _ in stream:
                    pass
                results.append(stream.result)
        return results

    # ---- recording ----

    def start_trace(self, path: str | Path) -> None:
        """Records what both workers do from now on, until `stop_trace`; between two requests only.

        The KV cache starts empty, so that the recording can be replayed. Raises `TraceError`.
        """
        path = Path(path).absolute()
        if self.config.trace or self._recording:
            raise TraceError("this engine is recording a trace already")
        try:
            writable = not path.is_dir() and os.access(path.parent, os.W_OK)
        except (OSError, ValueError):
            writable = False
        if not writable:
            raise TraceError(f"cannot write the trace {path}: name a file in a directory that exists")
        number = secrets.randbits(62) + 1
        try:
            self._ask_to_record(Trace(number, True))
        except BaseException:
            self._post(Trace(number, False))  # should it have begun, or be about to
            raise
        self._recording = (path, number)

    def stop_trace(self) -> Path:
        """Ends the recording and writes its file, whose path it returns. After a `TraceError` it can be tried again."""
        if self._recording is None:
            raise TraceError("no trace is being recorded")
        path, number = self._recording
        self._ask_to_record(Trace(number, False))
        merge(path, asked_for(self._directory, number))
        self._recording = None
        return path

    def _ask_to_record(self, trace: Trace) -> None:
        """Returns once both workers do."""
        self._recorded = None
        self._post(trace)
        deadline = time.monotonic() + _RECORD_SECONDS

        def answered() -> bool:  # not by the echo of a wish that was given up, which may come only now
            return self._recorded == trace or isinstance(self._recorded, TraceError) or time.monotonic() > deadline

        self._read_until(answered)
        if isinstance(self._recorded, TraceError):
            raise self._recorded
        if self._recorded != trace:
            raise TraceError("the workers do not answer: is another front's text being made?")

    def wait_until_lost(self) -> None:
        """Returns never. Raises `TargetLost` once the target is gone; for a process that only keeps an engine alive."""

        def lost() -> bool:
            self._silence.heard()  # nobody asks for anything, so silence means nothing
            return False

        self._read_until(lost)

    def _decoding(self, method: str | None, decoding: DecodingConfig | None) -> DecodingConfig:
        values = decoding.model_dump() if decoding else {}
        chosen = DecodingConfig(**(values | ({"method": method} if method else {})))
        if chosen.method != "ar" and not self.config.has_draft:
            raise ConfigError(f"method {chosen.method} needs a draft model and this engine has none; use method ar")
        return chosen

    def encode(self, prompt: Prompt, *, raw: bool = True) -> list[int]:
        """The tokens of a prompt; see `stream`."""
        return encode(self.tokenizer, prompt, raw)

    # ---- the socket, shared by all streams ----

    def await_message(self, stream: Stream) -> object | None:
        """The next message of `stream`, None once it is closed; meanwhile it may read the socket, for all streams."""
        self._read_until(lambda: bool(stream.inbox) or not stream.open)
        return stream.inbox.popleft() if stream.open else None

    def _read_until(self, done: Callable[[], bool]) -> None:
        """Returns once `done`. Of several threads that wait one reads, and the others look whenever it has."""
        self._check_ours()
        while not done():
            with self._turns:
                if self._reading:
                    self._turns.wait(_READ_SECONDS)
                    continue
                self._reading = True
            try:
                self._read()
            finally:
                with self._turns:
                    self._reading = False
                    self._turns.notify_all()

    def _read(self) -> None:
        if self._closed or self._endpoint is None:
            raise EngineClosed("this engine has been closed; make another")
        if self._fate:
            raise TargetLost(self._fate)
        received = self._endpoint.receive(_READ_SECONDS)
        if received:
            self._silence.heard(max(m.seconds * SLACK if isinstance(m, Heartbeat) else 0.0 for _, m in received))
        elif not self._target_alive():
            raise self._lost(self._target_fate())
        elif self._silence.seconds > self.config.target_timeout:
            raise self._lost(f"the target has been silent for {self.config.target_timeout:.0f} s")
        for _, message in received:
            self._sort(message)

    def _lost(self, why: str) -> TargetLost:
        """The target is of no more use. Nothing of this engine is left running, even if nobody closes it.

        Whoever comes later is told the same: by then the target is dead in any case, for we have ended it.
        """
        with self._ending:
            self._fate = self._fate or f"{why}; the text ends here. {self._remedy}"
            if self._target is not None:
                self._target.kill()
        self._end_workers(_DRAFT_END_SECONDS)
        return TargetLost(self._fate)

    def _end_workers(self, seconds: float = END_SECONDS) -> None:
        """Once. A second thread waits until it is done. `seconds`: how long each has to end by itself."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            # The target first: it must not see its draft go before it knows that it is to end itself.
            workers = [w for w in (self._target, self._draft) if w is not None]
            for worker in workers:
                worker.close()
            for worker in workers:
                worker.end(seconds)
            self._remove_directory()

    def _sort(self, message: object) -> None:
        match message:
            case Welcome(version) if version != PROTOCOL_VERSION:
                raise StartError(
                    f"the target speaks version {version} of the wire, this side {PROTOCOL_VERSION}: "
                    "run the same release of PEARL on both sides"
                )
            case Welcome():
                self._welcome = message
            case Heartbeat():
                pass
            case Trace():
                self._recorded = message
            case Committed(request) | Preview(request) | Finished(request) | Error(request) if request >= 0:
                stream = self._streams.get(request)
                if stream is not None and not stream.take(message):
                    raise self._lost("the target's messages have a gap, or come twice")
            case Error(_, "TraceError", text):  # for who asked, not for who happens to read
                self._recorded = TraceError(text)
            case Error(_, kind, text):
                raise getattr(errors, kind, StartError)(text)
            case Exception():
                raise self._lost(f"the target sent what is no message ({message})")
            case _:
                log.warning("the target sent an unexpected %s", type(message).__name__)

    def _target_alive(self) -> bool:
        if self._target is None:  # another process's
            assert self._endpoint is not None
            return self._endpoint.connected
        return self._target.alive

    def _target_fate(self, otherwise: str = "the target is gone") -> str:
        """Why it is gone, in its own words where it has left any."""
        if self._target is None:
            return otherwise
        with contextlib.suppress(StartError):
            self._target.wait_for("gone", time.monotonic() + _LAST_WORDS_SECONDS)
            return str(self._target.fate())
        return otherwise

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._streams.pop(request, None)

    def cancel(self, request: int) -> None:
        """Nobody wants the request any longer. From any thread."""
        self.forget(request)
        if self._closed:
            return
        try:
            self._post(Cancel(request))
        except TargetLost:
            log.debug("could not cancel request %d: the target is gone", request)

    def _post(self, message: Message) -> None:
        """Sends, from any thread."""
        if self._endpoint is None or self._closed or not self._is_ours:
            return
        try:
            self._endpoint.send(message)
            self._endpoint.wake()  # who waits for a piece of a text that this ends must look
        except TransportError as error:
            raise self._lost(self._target_fate(str(error))) from None
