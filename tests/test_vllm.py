"""PEARL in vLLM's step: the proposer, on a stand-in for vLLM, and the service that drafts for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.errors import ConfigError
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.toy import ToyRunner
from pearl.protocol.messages import (
    PROTOCOL_VERSION,
    Begin,
    DraftTokens,
    Error,
    Finish,
    Heartbeat,
    Hello,
    Outcomes,
    Resync,
    Role,
    Verdict,
)
from pearl.protocol.outside import OPTIONS
from pearl.protocol.sequence import extend_digest
from pearl.protocol.speeds import ForwardTimes
from pearl.spec.methods import BRANCHES
from pearl.trace import chrome
from pearl.trace.reading import read
from pearl.trace.recorder import outside_recorder
from pearl.trace.report import report, side_by_side
from pearl.transport import connect, listen
from pearl.transport.base import MAX_BATCH, Endpoint
from pearl.transport.keys import write_keys
from pearl.transport.zeromq import new_keys
from pearl.vllm import PearlProposer
from pearl.vllm.link import ServiceLink
from pearl.vllm.rows import RowTable
from pearl.vllm.served import ServedTexts
from pearl.vllm.vocabulary import Vocabulary
from pearl.vllm.windows import StepSpeeds, window_lengths, worth_waiting
from tests.conftest import HAS_NAMESPACES, eventually, output
from tests.draft_services import (
    CONTEXT,
    TARGET,
    VOCAB,
    InstantLink,
    ThreadedService,
    serving,
    target_token,
)
from tests.peers import collect
from tests.virtual import NEVER, chi_square
from tests.vllm_steps import Sampling, Steps, vllm_config

ROOT = Path(__file__).parent.parent
NOWHERE = "ipc:///nowhere/draft"
PROMPTS = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [9], [7, 7, 7, 7], [1, 2, 3, 4, 5]]
LENGTH = 24


class UnmeasuredSpeeds(StepSpeeds):
    """A stand-in's steps take no time that means anything: what is unknown is not bounded by it."""

    def observe_target(self, fed: int, seconds: float) -> None:
        pass


def proposer_with(link: Any, **options: Any) -> PearlProposer:
    proposer = PearlProposer(vllm_config(NOWHERE, **options))
    served = texts_of(proposer)
    served.link = link
    served.speeds = UnmeasuredSpeeds(most=served.speeds.most)
    return proposer


def texts_of(proposer: PearlProposer) -> ServedTexts:
    assert proposer.served is not None
    return proposer.served


def met(address: str, **settings: Any) -> PearlProposer:
    """A proposer that has met the service there."""
    proposer = PearlProposer(vllm_config(address, **settings))
    served = texts_of(proposer)
    served.speeds = UnmeasuredSpeeds(most=served.speeds.most)
    proposer.load_model()
    assert texts_of(proposer).link.is_ready
    return proposer


def settle(proposer: PearlProposer) -> None:
    """Wait until a draft has something for each text: the stand-in's steps take no time in which it could draft."""

    def is_settled() -> bool:
        link = polled(proposer)
        served = texts_of(proposer)
        waiting = [text for text in served.texts.values() if text.is_served and text.lacks(1)]
        served.flush()
        return not link.is_ready or not waiting

    eventually(is_settled, "the draft has something for each text")


def polled(proposer: PearlProposer) -> ServiceLink:
    """Its link, after it has looked for messages."""
    served = texts_of(proposer)
    served.receive(0.02)
    return served.link


def answers(end: Endpoint, count: int) -> list[Any]:
    """The next `count` messages, without those that a service sends by the clock."""
    messages: list[Any] = []
    while len(messages) < count:
        for _, message in collect(end, 1):
            if not isinstance(message, Heartbeat) or message.work == "calibrated":
                messages.append(message)
    return messages


def greedy(prompt: list[int], length: int = LENGTH) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(target_token(tokens))
    return tokens


def submit_all(steps: Steps, prompts: list[list[int]] = PROMPTS) -> dict[int, list[int]]:
    """Submit the prompts; return the texts that should come of them."""
    wanted: dict[int, list[int]] = {}
    for name, prompt in enumerate(prompts):
        steps.submit(name, prompt, LENGTH)
        wanted[name] = greedy(prompt)
    return wanted


# ---- texts ----


def test_the_package_is_thin() -> None:
    """vLLM has its own versions of torch and transformers: ours imports neither."""
    names = "{'torch', 'transformers', 'scipy'}"
    program = f"import sys, pearl, pearl.vllm; print({names} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("most", [1, 4, 9])
@pytest.mark.parametrize("chunk", [256, 2])
def test_texts_are_the_targets_own(most: int, chunk: int) -> None:
    """Rows move, prompts share prefixes and are read in parts; a draft can only save steps."""
    link = InstantLink()
    steps = Steps(proposer_with(link, most=most), target_token, rows=3, chunk=chunk)
    wanted = submit_all(steps)
    assert steps.run() == wanted
    assert steps.num_drafted
    num_alone = 2 * LENGTH * len(PROMPTS) // 3  # without drafts, all rows busy
    assert steps.num_steps < num_alone


def test_a_draft_that_knows_the_target_fills_every_window() -> None:
    """Its own next token is the target's own, too: each step but the first commits a window and one more."""

    def same_model(slots: int) -> ToyRunner:
        return ToyRunner(VOCAB, TARGET, CONTEXT, slots + BRANCHES)

    proposer = proposer_with(InstantLink(same_model, slots=1), most=4, ngrams=False)
    steps = Steps(proposer, target_token)
    steps.submit(0, [1, 2, 3], 51)
    assert steps.run() == {0: greedy([1, 2, 3], 51)}
    assert steps.num_steps <= 1 + 10 + 2


def test_a_rejection_finds_what_was_prepared_for_it() -> None:
    """Branches: without them a step after a rejection has nothing to verify."""
    link = InstantLink(slots=1)
    proposer = proposer_with(link, most=4)
    steps = Steps(proposer, target_token, rows=1)
    steps.submit(0, [1, 2, 3], 200)
    num_foreseen = 0
    num_rejected = 0

    def count() -> None:
        nonlocal num_foreseen, num_rejected
        for text in texts_of(proposer).texts.values():
            num_rejected += text.was_rejected
            num_foreseen += text.was_foreseen

    steps.run(count)
    assert num_rejected > 10
    assert num_foreseen > 0


def test_two_requests_with_one_text_are_one_for_the_draft() -> None:
    link = InstantLink()
    steps = Steps(proposer_with(link), target_token, rows=4)
    wanted = submit_all(steps, [[1, 2, 3]] * 4)
    assert steps.run() == wanted


def test_preempted_and_aborted_requests() -> None:
    link = InstantLink()
    steps = Steps(proposer_with(link), target_token, rows=3, chunk=4)
    wanted = submit_all(steps)
    aborted: list[int] = []

    def disturb() -> None:
        if steps.num_steps % 5 == 4 and len(steps.running) > 1:
            steps.preempt(0)
        if steps.num_steps == 12:
            aborted.append(steps.abort(1).name)

    texts = steps.run(disturb)
    del wanted[aborted[0]]
    assert texts == wanted
    begun = {event.request for event in link.sent if isinstance(event, Begin)}
    finished = {event.request for event in link.sent if isinstance(event, Finish)}
    assert len(begun) > len(PROMPTS)
    assert len(begun - finished) <= 3  # those of the last step have no step after them


def test_missed_steps_are_caught_up() -> None:
    """Near the end of the context vLLM does not call its proposer: rows have then grown by more than one step."""
    link = InstantLink()
    proposer = proposer_with(link)
    steps = Steps(proposer, target_token)
    wanted = submit_all(steps)
    propose = proposer.propose

    def sometimes(sampled: Any, *rest: Any, **more: Any) -> list[list[int]]:
        if steps.num_steps % 3 == 0:
            return [[] for _ in sampled]
        return propose(sampled, *rest, **more)

    proposer.propose = sometimes  # type: ignore[method-assign]
    assert steps.run() == wanted


def test_no_window_passes_the_end_of_the_context() -> None:
    link = InstantLink()
    steps = Steps(proposer_with(link, limit=32, most=9), target_token, limit=32)
    steps.submit(0, [1, 2, 3], 29)
    assert len(steps.run()[0]) == 32


# ---- sampling ----


def test_sampled_texts_keep_the_law() -> None:
    """The second and the third token of many texts, which are drafted, against the target's distribution."""
    prompt = [5, 6]
    link = InstantLink()
    counts = np.zeros((VOCAB, VOCAB))
    for seed in range(15):
        steps = Sampling(proposer_with(link, most=2), TARGET, seed)
        for name in range(20):
            steps.submit(name, prompt, 4)
        for tokens in steps.run().values():
            counts[tokens[3], tokens[4]] += 1
    expected = np.zeros((VOCAB, VOCAB))
    for first in np.flatnonzero(TARGET(prompt).numpy()):
        share = _after(prompt, int(first))
        expected += share
    for axis in (0, 1):
        seen = counts.sum(axis)
        hoped = expected.sum(axis) * seen.sum()
        is_likely = hoped >= 5
        cells = [*seen[is_likely], seen[~is_likely].sum()]
        means = [*hoped[is_likely], hoped[~is_likely].sum()]
        scale = sum(cells) / sum(means)
        assert len(cells) > 5
        assert chi_square(cells, np.multiply(means, scale)) > NEVER


def _after(prompt: list[int], first: int) -> Any:
    """The joint distribution of the two tokens after `first`, times its probability."""
    probs = np.zeros((VOCAB, VOCAB))
    begun = [*prompt, first]
    weight = float(TARGET(prompt)[first])
    second_probs = TARGET(begun).double().numpy()
    for second in np.flatnonzero(second_probs):
        third = TARGET([*begun, int(second)]).double().numpy()
        probs[second] += weight * second_probs[second] * third
    return probs


# ---- a service that fails ----


def test_a_service_that_dies_and_comes_back() -> None:
    link = InstantLink()
    steps = Steps(proposer_with(link), target_token)
    wanted = submit_all(steps)

    def disturb() -> None:
        if steps.num_steps % 7 == 3:
            link.die()

    assert steps.run(disturb) == wanted


def test_a_service_that_hangs() -> None:
    """What it sends once it is back is old, and the text has gone on."""
    link = InstantLink()
    steps = Steps(proposer_with(link), target_token)
    wanted = submit_all(steps)

    def disturb() -> None:
        link.is_silent = steps.num_steps % 8 > 3

    assert steps.run(disturb) == wanted


def test_a_service_that_loses_the_text() -> None:
    """Resync: the whole text is sent again."""
    link = InstantLink()
    steps = Steps(proposer_with(link), target_token, rows=1)
    wanted = submit_all(steps)

    def disturb() -> None:
        if steps.num_steps % 9 == 5:
            for machine in link.drafter.machines:
                if machine.begun is not None:
                    link.arrivals.append(Resync(machine.begun.request, machine.epoch))

    assert steps.run(disturb) == wanted
    assert sum(isinstance(event, Begin) for event in link.sent) > len(PROMPTS)


@pytest.mark.parametrize(
    "lie",
    [
        lambda message: message.changed(tokens=(VOCAB,) * len(message.tokens)),
        lambda message: message.changed(epoch=message.epoch + 5),
        lambda message: message.changed(tokens=message.tokens * 99, runners_up=()),
    ],
)
def test_a_service_that_lies(lie: Callable[[DraftTokens], DraftTokens]) -> None:
    """A token that the target does not have would end vLLM; the request goes on without a draft."""
    link = InstantLink()
    proposer = proposer_with(link)
    steps = Steps(proposer, target_token)
    wanted = submit_all(steps)

    def disturb() -> None:
        if steps.num_steps == 6:
            for index, message in enumerate(link.arrivals):
                if isinstance(message, DraftTokens):
                    link.arrivals[index] = lie(message)

    assert steps.run(disturb) == wanted


def test_no_service_at_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for ngrams in (False, True):
        proposer = PearlProposer(vllm_config(f"ipc://{tmp_path}/draft", ngrams=ngrams))
        steps = Steps(proposer, lambda tokens: tokens[-3])
        steps.submit(0, [1, 2, 3], 60)
        assert steps.run() == {0: [1, 2, 3] * 21}
        assert bool(steps.num_drafted) is ngrams
        assert (steps.num_steps < 40) is ngrams
        proposer.close()


# ---- over sockets ----


def test_a_service_on_a_socket(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        proposer = met(service.address)
        steps = Steps(proposer, target_token)
        for _ in range(2):
            wanted = submit_all(steps)
            assert steps.run(lambda: settle(proposer)) == wanted
        proposer.close()
    assert steps.num_drafted


def test_a_service_that_is_killed_and_started_again(tmp_path: Path) -> None:
    """In its absence vLLM goes on; the next service takes up what is running."""
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/draft"
    services = [ThreadedService(address)]
    proposer = met(address)
    steps = Steps(proposer, target_token)
    for name in range(4):
        steps.submit(name, [name], 60)
    drafted_before = 0

    def disturb() -> None:
        nonlocal drafted_before
        if steps.num_steps == 8:
            services.pop().stop()
            drafted_before = steps.num_drafted
        if steps.num_steps == 14:
            services.append(ThreadedService(address))
            eventually(lambda: polled(proposer).is_ready, "the proposer meets the new service")
        if services:
            settle(proposer)

    texts = steps.run(disturb)
    assert texts == {name: greedy([name], 60) for name in range(4)}
    assert steps.num_drafted > drafted_before > 0
    proposer.close()
    services.pop().stop()


def test_a_service_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    with serving(tmp_path) as service:
        proposer = met(service.address, timeout=0.5)
        steps = Steps(proposer, target_token)
        wanted = submit_all(steps)

        def disturb() -> None:
            if steps.num_steps == 6:
                service.hold.clear()

        assert steps.run(disturb) == wanted
        eventually(lambda: not polled(proposer).is_ready, "the silence is noticed")
        service.hold.set()
        eventually(lambda: polled(proposer).is_ready, "it is taken up again")
        drafted_before = steps.num_drafted
        submit_all(steps)
        steps.run(lambda: settle(proposer))
        assert steps.num_drafted > drafted_before
        proposer.close()


def test_heartbeats_of_a_long_idle_time_do_not_pile_up(tmp_path: Path) -> None:
    """While vLLM is idle nobody calls `receive`: after eight minutes the connection read nothing any more."""
    tmp_path.chmod(0o700)
    service = listen(f"ipc://{tmp_path}/draft", is_target=False)
    hello = Hello(PROTOCOL_VERSION, Role.TARGET, VOCAB, CONTEXT)
    link = ServiceLink(service.address, None, hello, lambda hello: "", timeout=60)
    link.receive()
    ((peer, _),) = collect(service, 1)
    service.send(Hello(PROTOCOL_VERSION, Role.DRAFT, VOCAB, CONTEXT, slots=1), peer)
    service.send(Heartbeat(0, "calibrated", 1, 0.001), peer)
    eventually(lambda: link.receive(0.02) and link.is_ready, "the link is ready")
    taken: list[DraftTokens] = []
    link.take_tokens = lambda tokens: bool(taken.append(tokens))  # type: ignore[func-returns-value]
    for step in range(2 * MAX_BATCH):
        service.send(Heartbeat(step, "idle", 0), peer)
    service.send(DraftTokens(1, 0, 3, (5,)), peer)
    eventually(lambda: taken, "drafted tokens behind the heartbeats are read")
    link.close()
    service.close()


def test_more_requests_than_slots(tmp_path: Path) -> None:
    with serving(tmp_path, slots=2) as service:
        proposers = [met(service.address) for _ in range(2)]
        engines = [Steps(proposer, target_token) for proposer in proposers]
        wanted = [submit_all(steps) for steps in engines]
        while any(steps.running or steps.waiting for steps in engines):
            for steps in engines:
                if steps.running or steps.waiting:
                    settle(steps.proposer)
                    steps.step()
        assert [steps.done for steps in engines] == wanted
        assert sum(steps.num_drafted for steps in engines)
        for proposer in proposers:
            proposer.close()
        eventually(lambda: not service.service.served, "the slots are free again")


def test_other_vocabularies_are_refused_by_name(tmp_path: Path) -> None:
    """By whichever side has more tokens, as only that one can tell."""
    with serving(tmp_path) as service:
        for ids in ({"x": 0, "1": 1}, {str(id): id for id in range(2 * VOCAB)}):
            proposer = PearlProposer(vllm_config(service.address))
            vocabulary = Vocabulary(ids)
            hello = Hello(
                *(PROTOCOL_VERSION, Role.TARGET, vocabulary.size, 9),
                vocabulary.digest(vocabulary.size),
            )
            link = ServiceLink(service.address, None, hello, vocabulary.misfit, 5.0)
            texts_of(proposer).link = link
            with pytest.raises(ConfigError, match=r"others than the .*--target NAME"):
                proposer.load_model()
            proposer.close()


def test_the_same_vocabulary_with_padding_fits(tmp_path: Path) -> None:
    tokens = ToyTokenizer(VOCAB).tokens()
    shorter = {str(token): id for id, token in enumerate(tokens[:-3])}
    longer = {str(token): id for id, token in enumerate([*tokens, "<pad>"])}
    with serving(tmp_path) as service:
        for ids in (shorter, longer):
            vocabulary = Vocabulary(ids)
            digest = vocabulary.digest(vocabulary.size)
            hello = Hello(PROTOCOL_VERSION, Role.TARGET, vocabulary.size, 9, digest)
            link = ServiceLink(service.address, None, hello, vocabulary.misfit, 5.0)
            eventually(lambda link=link: link.receive(0.05) and link.is_ready)
            link.close()


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    keys = new_keys()
    service = ThreadedService("tcp://127.0.0.1:*", keys=keys)
    hello = Hello(PROTOCOL_VERSION, Role.TARGET, 0, 256)
    link = ServiceLink(service.address, keys, hello, Vocabulary({}).misfit, 5.0)
    proposer = proposer_with(link)
    proposer.load_model()
    steps = Steps(proposer, target_token)
    wanted = submit_all(steps)
    assert steps.run(lambda: settle(proposer)) == wanted
    assert steps.num_drafted
    proposer.close()
    service.stop()


def test_bad_engines_harm_nobody_else(tmp_path: Path) -> None:
    """What an engine has no right to send costs it the connection; the others' texts go on."""
    begin = Begin(1, 0, (1, 2), 8, extend_digest(0, (1, 2)), OPTIONS)
    with serving(tmp_path) as service:
        proposer = met(service.address)
        for bad in (
            Outcomes(begins=(begin.changed(digest=7),)),
            Outcomes(begins=(begin.changed(tokens=(), digest=0),)),
            Resync(1, 0),
        ):
            stranger = connect(service.address)
            stranger.send(Hello(PROTOCOL_VERSION, Role.TARGET, 0, 9))
            answers(stranger, 2)
            stranger.send(bad)
            assert isinstance(answers(stranger, 1)[0], Error)
            stranger.close()
        steps = Steps(proposer, target_token)
        wanted = submit_all(steps)
        assert steps.run() == wanted
        proposer.close()


def test_requests_of_others_cannot_be_touched(tmp_path: Path) -> None:
    begin = Begin(1, 0, (1, 2), 8, extend_digest(0, (1, 2)), OPTIONS)
    verdict = Verdict(1, 0, 2, (3,), 9, extend_digest(0, (1, 2, 3)))
    with serving(tmp_path) as service:
        ends = [connect(service.address) for _ in range(2)]
        for end in ends:
            end.send(Hello(PROTOCOL_VERSION, Role.TARGET, 0, 9))
            answers(end, 2)
        owner, other = ends
        owner.send(Outcomes(begins=(begin,)))
        assert isinstance(answers(owner, 1)[0], DraftTokens)
        other.send(Outcomes((Finish(1),), verdicts=(verdict,)))
        assert answers(other, 1)[0] == Resync(1, 0)
        assert list(service.service.served) == [1]
        for end in ends:
            end.close()


def test_what_a_service_cannot_draft_is_refused(tmp_path: Path) -> None:
    sampled = OPTIONS.changed(temperature=1.0)
    long = tuple([1] * CONTEXT)
    begin = Begin(1, 0, (1, 2), 8, extend_digest(0, (1, 2)), OPTIONS)
    with serving(tmp_path) as service:
        end = connect(service.address)
        end.send(Hello(PROTOCOL_VERSION, Role.TARGET, 0, 9))
        answers(end, 2)
        end.send(Outcomes(begins=(begin.changed(options=sampled),)))
        end.send(Outcomes(begins=(begin.changed(tokens=long, digest=extend_digest(0, long)),)))
        refusals = answers(end, 2)
        assert [refusal.kind for refusal in refusals] == ["RequestError"] * 2
        end.close()


# ---- the command ----

SERVE = [sys.executable, "-m", "pearl", "draft", "serve", "--draft-device", "cpu", "--draft"]
SPEC = f"toy:vocab={VOCAB},alpha=0.5,context={CONTEXT}"


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A service's process, once engines may connect."""
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "drafting on" in line:
                    break
            assert process.poll() is None, said
            yield process
        finally:
            process.kill()


def decodes_with_drafts(proposer: PearlProposer) -> None:
    """Its texts are the target's, with drafts."""
    eventually(lambda: polled(proposer).is_ready, "the proposer meets the service")
    steps = Steps(proposer, target_token)
    wanted = submit_all(steps)
    assert steps.run(lambda: settle(proposer)) == wanted
    assert steps.num_drafted


@pytest.mark.slow
def test_the_command_can_be_killed_and_started_again(tmp_path: Path) -> None:
    """The dead one's socket file is in nobody's way; at SIGTERM a service removes its own."""
    tmp_path.chmod(0o700)
    socket = tmp_path / "draft"
    command = [*SERVE, SPEC, "--listen", f"ipc://{socket}"]
    with running(command):
        proposer = met(f"ipc://{socket}")
        decodes_with_drafts(proposer)
    assert socket.exists()
    eventually(lambda: not polled(proposer).is_ready, "its death is noticed")
    with running(command) as process:
        decodes_with_drafts(proposer)
        process.terminate()
        assert process.wait(60) == 0
    assert not socket.exists()
    proposer.close()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and `ip` of iproute2")
def test_a_service_on_another_host(tmp_path: Path) -> None:
    """A network namespace with one link to this one."""
    name = f"pearl-{os.getpid()}-draft"
    wire = f"pw{os.getpid()}"
    keys = tmp_path / "keys"
    write_keys(keys, new_keys())
    output("ip", "netns", "add", name)
    try:
        output("ip", "link", "add", wire, "type", "veth", "peer", "wire", "netns", name)
        output("ip", "addr", "add", "10.78.0.1/24", "dev", wire)
        output("ip", "link", "set", wire, "up")
        output("ip", "-n", name, "addr", "add", "10.78.0.2/24", "dev", "wire")
        output("ip", "-n", name, "link", "set", "wire", "up")
        address = "tcp://10.78.0.2:7000"
        command = ["ip", "netns", "exec", name, *SERVE, SPEC, "--listen", address]
        with running([*command, "--keys", str(keys)]):
            proposer = met(address, keys=str(keys))
            decodes_with_drafts(proposer)
            proposer.close()
    finally:
        output("ip", "netns", "del", name)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "tcp://127.0.0.1:0"], "--keys FILE"),
        (["--listen", "ipc:///tmp/draft"], "mode 0700"),
        (["--listen", "shm://x"], "--listen takes ipc:///PATH"),
    ],
)
def test_where_a_service_may_not_listen(
    pearl_here: Callable[..., subprocess.CompletedProcess[str]], options: list[str], problem: str
) -> None:
    done = pearl_here("draft", "serve", "--draft", SPEC, *options)
    assert done.returncode == 2
    assert problem in done.stderr


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (None, "must name the draft service's address"),
        ({"address": 5}, "must name the draft service's address"),
        ({"address": NOWHERE, "adress": "x"}, "has adress; it takes address, keys"),
        ({"address": NOWHERE, "timeout": "5"}, "timeout is a number"),
        ({"address": NOWHERE, "ngrams": 1}, "ngrams is true or false"),
        ({"address": NOWHERE, "trace": "/nowhere/at/all"}, "is in no directory"),
    ],
)
def test_wrong_settings(settings: Any, problem: str) -> None:
    config = vllm_config(NOWHERE)
    config.additional_config = {"pearl": settings} if settings else {}
    with pytest.raises(ConfigError, match=problem):
        PearlProposer(config)


def test_only_the_first_of_the_ranks_that_share_a_request_asks() -> None:
    config = vllm_config(NOWHERE)
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.rank = 3
    proposer = PearlProposer(config)
    proposer.load_model()
    assert proposer.served is None
    assert proposer.propose([[1], [2]], np.array([3, 3]), np.zeros((2, 9), int)) == [[], []]
    config.parallel_config.rank = 2
    assert PearlProposer(config).served is not None


def test_ranks_that_schedule_by_themselves_are_refused() -> None:
    config = vllm_config(NOWHERE)
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ConfigError, match="external_launcher"):
        PearlProposer(config)


# ---- rows ----


def test_rows_keep_their_requests_as_they_move() -> None:
    table = RowTable(first=10)
    texts = [np.array(tokens) for tokens in ([1, 2], [1, 2, 3], [1, 2])]
    numbers = [match.number for match in table.follow(texts)]
    assert numbers == [10, 11, 12]
    moved = [np.append(texts[2], 9), np.append(texts[1], 8)]
    assert [tuple(match) for match in table.follow(moved)] == [(10, 2), (11, 3)]


def test_a_longer_text_in_the_same_row_is_no_other_request() -> None:
    """A request ends, and the next one in its row begins with another text."""
    table = RowTable(first=0)
    table.follow([np.array([1, 2, 3])])
    assert table.follow([np.array([1, 2, 4, 5])])[0].number == 1


# ---- windows ----


def _speeds(t_draft: float, t_target: float, most: int, acceptance: float) -> StepSpeeds:
    speeds = StepSpeeds(t_draft=t_draft, acceptance=acceptance, most=most)
    speeds.target = ForwardTimes([(1, t_target), (64, t_target)])
    return speeds


def test_windows_end_where_another_token_costs_more_than_it_gains() -> None:
    speeds = StepSpeeds(most=8)
    speeds.target = ForwardTimes([(fed, 1.0 + 0.5 * fed) for fed in range(1, 20)])
    chances = [[0.9, 0.8, 0.1], [0.05]]
    assert window_lengths(chances, speeds) == [2, 0]
    speeds.target = ForwardTimes([(1, 1.0), (64, 1.0)])
    assert window_lengths(chances, speeds) == [3, 1]


def test_nobody_waits_for_a_draft_that_is_slower_than_it_gains() -> None:
    assert worth_waiting(_speeds(0.9, 1.0, 4, 0.8), 0.5, 4, 1, 1) == 0
    assert worth_waiting(_speeds(0.001, 1.0, 8, 0.8), 0.2, 8, 1, 1) == 8
    many = worth_waiting(_speeds(0.02, 1.0, 8, 0.8), 0.2, 8, 16, 1)
    alone = worth_waiting(_speeds(0.02, 1.0, 8, 0.8), 0.2, 8, 1, 1)
    assert many < alone  # fifteen others would wait with it
    assert worth_waiting(StepSpeeds(most=4), 0.5, 4, 1, 1) == 0  # nothing measured yet


# ---- the trace ----


def test_both_halves_make_one_trace(tmp_path: Path) -> None:
    """Steps, waits and what was ready, in the report of any trace."""
    trace = tmp_path / "vllm.json"
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    about = {"target": "target", "draft": "toy", "control": "ipc", "tensors": "frames"}
    with serving(sockets) as service:
        tracer = service.service.tracer
        tracer.recorder = outside_recorder(trace, "draft", about)
        proposer = met(service.address, trace=str(trace))
        steps = Steps(proposer, target_token)
        submit_all(steps)
        steps.run(lambda: settle(proposer))
        proposer.close()
    tracer.stop()
    chrome.merge(trace)
    figures = report(read(trace))
    assert 0 < figures.tokens <= LENGTH * len(PROMPTS)
    assert figures.requests == len(PROMPTS)
    assert figures.judged
    assert dict(side_by_side([figures]))["windows"][0]
