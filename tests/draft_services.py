"""Draft services on toy models.

`ThreadedService` runs in a thread of the test. `InstantLink` computes in the test's own thread,
without a connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.drafter import Drafter
from pearl.protocol.events import Draft, DraftGone, DraftJoined, Send, Wait
from pearl.protocol.messages import PROTOCOL_VERSION, DraftTokens, Hello, Message, Outcomes, Role
from pearl.spec.methods import BRANCHES
from pearl.text.tokenizer import vocabulary_digest
from pearl.trace.tracer import Tracer
from pearl.transport import listen
from pearl.transport.keys import Keys
from pearl.worker.draft_service import DraftService

VOCAB = 32
CONTEXT = 512
TARGET, DRAFT = alpha_pair(VOCAB, 0.5)


def toy_draft(slots: int) -> ModelRunner:
    return ToyRunner(VOCAB, DRAFT, CONTEXT, slots + BRANCHES)


def target_token(tokens: Any) -> int:
    """Return the toy target's greedy token after `tokens`."""
    return int(TARGET(tokens).argmax())


class InstantLink:
    """Replaces `pearl.vllm.link.ServiceLink` by a service without a process.

    Whatever is sent is handled at the next `receive`, which drafts as far as the draft may.

    Attributes:
        is_silent: whether the service hangs: it sends nothing, and messages to it wait.
    """

    context = CONTEXT
    slots = 8
    refusal = ""
    take_tokens = None

    def __init__(
        self, make_runner: Callable[[int], ModelRunner] = toy_draft, slots: int = 8
    ) -> None:
        self._make_runner = make_runner
        self.slots = slots
        self._start()
        self.is_ready = False
        self.is_silent = False
        self.arrivals: list[object] = []
        self.sent: list[Message] = []
        self._unread: list[Message] = []

    def receive(self, timeout: float = 0.0) -> list[object]:
        if not self.is_ready:
            self.is_ready = True
            self.arrivals.append(DraftJoined(CONTEXT))
        if not self.is_silent:
            self._read()
        arrivals = self.arrivals
        self.arrivals = []
        return arrivals

    def send(self, message: Message) -> None:
        assert isinstance(message, Outcomes)
        events = [*message.finishes, *message.begins, *message.verdicts]
        self.sent += events
        self._unread += events

    def die(self) -> None:
        """Lose the service, all that it knew, and all that it had sent.

        It comes back with the next `receive`.
        """
        self.is_ready = False
        self._unread = []
        self.arrivals = [DraftGone("it died")]
        self._start()

    def _start(self) -> None:
        runner = self._make_runner(self.slots)
        self._executor = DraftExecutor(ModelProposer(runner, VOCAB, texts=self.slots))
        self.drafter = Drafter(CONTEXT, self.slots)

    def close(self) -> None:
        pass

    def _read(self) -> None:
        for event in self._unread:
            self._run(self.drafter.handle(event))
        self._unread = []

    def _run(self, commands: list[object]) -> None:
        pending = deque(commands)
        while pending:
            command = pending.popleft()
            match command:
                case Send(DraftTokens() as message):
                    self.arrivals.append(message.changed(seconds=0.0))
                case Send(message):
                    self.arrivals.append(message)
                case Wait():
                    pass
                case _:
                    event = self._executor.execute(command)
                    if isinstance(command, Draft):
                        pending.extend(self.drafter.handle(event))


class ThreadedService:
    """A `DraftService` on a socket, in a thread of the test.

    Attributes:
        hold: an event. While it is cleared, the service hangs between two forwards.
    """

    def __init__(
        self, address: str, slots: int = 8, keys: Keys | None = None, tokenizer: Any = None
    ) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._endpoint = listen(address, keys, is_target=False)
        self.address = self._endpoint.address
        tokenizer = tokenizer or ToyTokenizer(VOCAB)
        size = tokenizer.vocab_size
        digest = vocabulary_digest(tokenizer, size)
        self.service = DraftService(
            self._endpoint,
            Hello(PROTOCOL_VERSION, Role.DRAFT, size, CONTEXT, digest, "toy", slots),
            partial(vocabulary_digest, tokenizer),
            DraftExecutor(ModelProposer(toy_draft(slots), VOCAB, texts=slots)),
            ready=self._ready.set,
            stopping=self._is_stopping,
            tracer=Tracer(),
            slots=slots,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _is_stopping(self) -> bool:
        self.hold.wait(60)
        return self._stopping.is_set()

    def _run(self) -> None:
        with torch.inference_mode():
            self.service.run()

    def stop(self) -> None:
        """End the service as if its process were killed: it sends no farewell."""
        self._stopping.set()
        self.hold.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._endpoint.close()


@contextmanager
def serving(directory: Path, **options: Any) -> Iterator[ThreadedService]:
    """Run a service on a socket file in `directory`, which is made private to this user."""
    directory.chmod(0o700)
    service = ThreadedService(f"ipc://{directory}/draft", **options)
    try:
        yield service
    finally:
        service.stop()
