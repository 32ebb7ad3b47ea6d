"""The client of a running target: one connection, and the streams that share it. Launches nothing.

Nothing here runs in the background: whoever waits for a token reads the socket, for all who wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack
from weakref import WeakValueDictionary

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine.recording import Recording, logged_not_raised
from pearl.engine.request import Prompt, as_prompts, check_length, encode, submission
from pearl.engine.stream import Result, Stream
from pearl.errors import (
    ConfigError,
    EngineClosed,
    PearlError,
    StartError,
    TargetLost,
    TraceError,
    TransportError,
    error_named,
)
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
from pearl.text.tokenizer import GenerationDefaults
from pearl.transport.keys import channel_keys
from pearl.transport.zeromq import ZmqConnection

log = logging.getLogger(__name__)

_AHEAD = 2  # times the slots: requests sent by `generate` before the first of them has ended
_READ_SECONDS = 0.1  # longest turn at the socket, so that a dead target is noticed


class Life(Protocol):
    """What a client has to know of its target's life, from whoever launched the target."""

    remedy: str  # what a user can do once the target is lost

    def alive(self, connected: bool) -> bool:
        """Whether the target runs. `connected`: whether the connection to it stands."""
        ...

    def fate(self, otherwise: str) -> str:
        """Why the target is gone, in its own words where it has left any, or `otherwise`."""
        ...

    def lose(self) -> None:
        """The target is of no more use: ends at once what was launched. From any thread, and more than once."""
        ...

    def close(self) -> None:
        """Ends what was launched and removes what it has left; after `lose` there may be something left to do."""
        ...


class Options(TypedDict, total=False):
    """How one text is generated.

    method: shorthand for decoding=DecodingConfig(method=...).
    preview: also yield the draft's pending tokens.
    raw: take a text prompt as it is (the default); False applies the chat template, where there is one.
    """

    method: str | None
    decoding: DecodingConfig | None
    preview: bool
    raw: bool


def check_options(options: Mapping[str, Any], params: object) -> None:
    """Raises `ConfigError` for a keyword that is none of `Options`, and for params of another type."""
    if params is not None and not isinstance(params, SamplingParams):
        shown = (
            f"SamplingParams(**{params!r:.60})" if isinstance(params, Mapping) else "SamplingParams(temperature=0.7)"
        )
        raise ConfigError(f"params is a {type(params).__name__}; give a SamplingParams, such as {shown}")
    for name in options:
        if name in SamplingParams.model_fields:
            raise ConfigError(f"{name} is a field of SamplingParams: give params=SamplingParams({name}=...)")
        if name not in Options.__annotations__:
            known = [*Options.__annotations__, *SamplingParams.model_fields]
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown keyword {name!r}{meant} (there are {', '.join(Options.__annotations__)})")


class Client:
    """Sends requests to a target and hands out text. It belongs to the process that made it, not to its forks.

    `Engine` is one with what it launched, and has the same methods for its users.

    Args:
        address: where the target listens.
        directory: the engine's; its keys are there, and the parts of traces.
        life: of the target. `close` closes it too, and so does dropping the client and its streams.
    """

    def __init__(
        self,
        config: EngineConfig,
        address: str,
        directory: Path,
        tokenizer: Any,
        defaults: GenerationDefaults,
        life: Life,
    ) -> None:
        self.config, self.tokenizer, self.defaults = config, tokenizer, defaults
        self._life = life
        self._owner = os.getpid()
        self._turns = threading.Condition(threading.RLock())  # of those who wait, to read the socket
        self._reading = self._closed = False
        self._requests = count(1)
        # Weak, so that a stream which its user has dropped is collected, and so cancelled.
        self._streams: WeakValueDictionary[int, Stream] = WeakValueDictionary()
        self._fate = ""  # why the target is lost
        self.ahead = 0  # requests of others that come before ours, as told last
        self._silence = Silence(10 * _READ_SECONDS)  # the target's
        self._welcome: Welcome | None = None
        self.untraced: list[PearlError] = []  # why no trace was written at its end
        self._recording = Recording(directory, taken=config.trace is not None)
        self._endpoint = ZmqConnection(address, channel_keys(config.keys, directory))

    def meet(self, deadline: float) -> None:
        """Returns once the target has answered. `deadline`: of time.monotonic(). Raises `StartError`."""
        self._silence.heard()
        self._endpoint.send(Hello(PROTOCOL_VERSION, Role.FRONT, 0, 0))
        try:
            self.read_until(lambda: self._welcome is not None or time.monotonic() > deadline)
        except TargetLost as error:
            raise StartError(str(error)) from None
        if self._welcome is None:
            raise StartError("the target does not answer; see --log-level debug")

    def __del__(self) -> None:
        """A last resort, for a client dropped unclosed.

        Not where the interpreter is ending: its threads are frozen, locks in hand, and cannot be waited for. There the
        workers end by themselves, for their stdin closes.
        """
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()

    def close(self) -> None:
        """Ends the connection and then `life`; a second time does nothing.

        Nor does it in a forked process: nothing of an engine is its own there, and locks may be held by threads that
        only the parent has.
        """
        if self._closed:
            return
        if not self._is_ours:
            self._closed = True
            return
        if self._recording.active:
            with logged_not_raised() as self.untraced:
                self.stop_trace()
        self._closed = True
        with self._turns:  # a reader would be left with a closed socket in its hands
            self._turns.wait_for(lambda: not self._reading, 2 * _READ_SECONDS)
        self._endpoint.close()
        self._life.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _is_ours(self) -> bool:
        return os.getpid() == self._owner

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise EngineClosed(
                f"this engine belongs to process {self._owner}, of which this one is a fork: make an engine here, or "
                "attach to that one"
            )

    # ---- what users ask for ----

    @property
    def welcome(self) -> Welcome:
        """What the target said of itself and of the speeds measured at start."""
        assert self._welcome is not None
        return self._welcome

    @property
    def context(self) -> int:
        """Tokens that prompt and text may have together."""
        return self.welcome.context

    def encode(self, prompt: Prompt, *, raw: bool = True) -> list[int]:
        """The tokens of a prompt; see `stream`. Raises `RequestError` for far more than the context has."""
        check_length(self.tokenizer, prompt, self.context)
        return encode(self.tokenizer, prompt, raw)

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
        """See `Engine.stream`."""
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
        self.wait_to_be_heard()
        stream = Stream(self, submit)
        if not self._streams:
            self._silence.heard()
        self._streams[submit.request] = stream
        self.post(submit)
        return stream

    def wait_to_be_heard(self) -> None:
        """Returns once a request can be sent: a target drops for seconds what comes from who has said too much."""
        while (seconds := self._endpoint.account.seconds) and not self._closed:
            time.sleep(min(seconds, _READ_SECONDS))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> list[Result]:
        """See `Engine.generate`."""
        waiting, results = deque(as_prompts(prompts)), []
        streams: deque[Stream] = deque()
        slots = self.config.slots
        try:
            while waiting or streams:
                while waiting and len(streams) < (1 if slots == 1 else _AHEAD * slots):
                    streams.append(self.stream(waiting.popleft(), params, **options))
                for _ in streams[0]:
                    pass
                results.append(streams.popleft().result)
        finally:
            for stream in streams:
                stream.close()
        return results

    def _decoding(self, method: str | None, decoding: DecodingConfig | None) -> DecodingConfig:
        values = decoding.model_dump(exclude_unset=True) if decoding else {}
        chosen = DecodingConfig(**(values | ({"method": method} if method else {})))
        self.config.check_decoding(chosen)
        return chosen

    def start_trace(self, path: str | Path) -> None:
        """See `Engine.start_trace`."""
        self._recording.start(Path(path).absolute(), self)

    def stop_trace(self) -> Path:
        """See `Engine.stop_trace`."""
        return self._recording.stop(self)

    def begin_live_trace(self, wanted: Callable[[], bool]) -> Path:
        """See `Engine.begin_live_trace`."""
        return self._recording.begin_live(self, wanted)

    def end_live_trace(self) -> None:
        """See `Engine.end_live_trace`."""
        self._recording.end_live(self)

    def wait_until_lost(self) -> None:
        """See `Engine.wait_until_lost`."""

        self.wait_for(lambda: False)

    def wait_for(self, done: Callable[[], bool]) -> None:
        """See `Engine.wait_for`."""

        def is_done() -> bool:
            if not self._streams:
                self._silence.heard()  # nobody asks for anything, so silence means nothing
            return done()

        self.read_until(is_done)

    # ---- what a stream asks for ----

    def await_message(self, stream: Stream) -> object | None:
        """The next message of `stream`, None once it is closed; meanwhile it may read the socket, for all streams."""
        self.read_until(lambda: bool(stream.inbox) or not stream.open)
        return stream.inbox.popleft() if stream.open else None

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._streams.pop(request, None)

    def cancel(self, request: int) -> None:
        """Nobody wants the request any longer. From any thread."""
        self.forget(request)
        if self._closed:
            return
        try:
            self.post(Cancel(request))
        except TargetLost:
            log.debug("could not cancel request %d: the target is gone", request)

    # ---- the socket, shared by all streams ----

    def post(self, message: Message) -> None:
        """Sends, from any thread."""
        if self._closed or not self._is_ours:
            return
        try:
            self._endpoint.send(message)
            self._endpoint.wake()  # who waits for a piece of a text that this ends must look
        except TransportError as error:
            raise self._lost(self._life.fate(str(error))) from None

    def wake(self) -> None:
        """Makes who reads look whether it is done. From any thread."""
        if not self._closed and self._is_ours:
            self._endpoint.wake()

    def read_until(self, done: Callable[[], bool]) -> None:
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
        if self._closed:
            raise EngineClosed("this engine has been closed; make another")
        if self._fate:
            raise TargetLost(self._fate)
        received = self._endpoint.receive(_READ_SECONDS)
        if received:
            self._silence.heard(max(m.seconds * SLACK if isinstance(m, Heartbeat) else 0.0 for _, m in received))
        elif not self._life.alive(self._endpoint.connected):
            raise self._lost(self._life.fate("the target is gone"))
        elif self._silence.seconds > self.config.target_timeout:
            raise self._lost(f"the target has been silent for {self.config.target_timeout:.0f} s")
        for _, message in received:
            self._sort(message)

    def _lost(self, why: str) -> TargetLost:
        """The target is of no more use. Nothing of this engine is left running, even if nobody closes it.

        Whoever comes later is told the same: by then the target is dead in any case, for we have ended it.
        """
        with self._turns:
            self._fate = self._fate or f"{why}; the text ends here. {self._life.remedy}"
        self._life.lose()
        return TargetLost(self._fate)

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
                self.ahead = message.tokens if message.work == "queued" else 0
            case Trace():
                self._recording.answer = message
            case Committed(request) | Preview(request) | Finished(request) | Error(request) if request >= 0:
                stream = self._streams.get(request)
                if stream is not None and not stream.take(message):
                    raise self._lost("the target's messages have a gap, or come twice")
            case Error(_, "TraceError", text):  # for who asked, not for who happens to read
                self._recording.answer = TraceError(text)
            case Error(_, kind, text):
                if kind == "RemoteProtocolError":  # what came with that, and behind it, the target has dropped unread
                    for stream in [each for each in self._streams.values() if not each.heard]:
                        stream.take(Error(stream.request, kind, text))
                raise error_named(kind)(text)
            case Exception():
                raise self._lost(f"the target sent what is no message ({message})")
            case _:
                log.warning("the target sent an unexpected %s", type(message).__name__)
