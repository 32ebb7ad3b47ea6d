"""A target that several ranks share: what each computes, how they keep in step, and that all of them end with one."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.config import SamplingParams
from pearl.decoding.rules import make_draft_half, make_target_half
from pearl.decoding.sampling import read_draw
from pearl.engine import Engine
from pearl.engine.processes import Worker
from pearl.errors import DraftLost, ModelError, RequestError, StartError, TargetLost, TransportError
from pearl.models.checkpoints.direct import read_decoder
from pearl.models.checkpoints.loading import load_runner
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.shard import cut
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.options import Sampling
from pearl.transport.torch_dist import RankGroup
from pearl.worker.ranks import LeadingRunner, dismiss, follow
from tests.conftest import AS_PUBLISHED, eventually
from tests.test_forward_runner import CPU, KINDS, into_one_buffer, logits
from tests.test_processes import ENDLESS, check_nothing_left, children, gone, start_front, temporary
from tests.tiny import tiny_model

__all__ = ["temporary"]  # a fixture

WAIT = 120.0  # seconds: a bound for a slow machine, never reached where all is well
# Sums over the ranks add in another order. Of the tiny models' logits, up to 2.6, the largest difference seen: 1.6e-6.
BOUND = 1e-5


def biased(kind: str, directory: Path) -> Path:
    """A tiny model whose biases are not the zeros that they are made with."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(directory / kind)
    return directory / kind


# ---- the share of a rank ----


def shared(path: Path, size: int, store: Path, dtype: str = "float32", is_recorded: bool = False) -> list[torch.Tensor]:
    """The logits of each rank, all in this process. Models are loaded one after the other: transformers wants that."""

    def load(group: RankGroup) -> Callable[[], ForwardRunner]:
        """What makes the runner, on all ranks at once: they record their exchanges then."""
        if is_recorded and (model := read_decoder(path, None, CPU)) is not None:
            cut(model, group, CPU)
            return lambda: ForwardRunner(model, 64, group, record=into_one_buffer)
        runner = load_runner(str(path), device=CPU, dtype=dtype, max_context=64, group=group)
        assert isinstance(runner, ForwardRunner)
        return lambda: runner

    with ThreadPoolExecutor(size) as pool:
        groups = list(pool.map(lambda rank: RankGroup(store, rank, size, CPU, WAIT), range(size)))
        found = list(pool.map(lambda make: logits(make()), [load(group) for group in groups]))
        for group in groups:
            group.close()
    return found


def alone_of(rank: int, size: int) -> Any:
    """A rank that exchanges nothing."""
    return SimpleNamespace(rank=rank, size=size)


def whole(path: Path, dtype: str = "float32") -> torch.Tensor:
    runner = load_runner(str(path), device=CPU, dtype=dtype, max_context=64)
    assert isinstance(runner, ForwardRunner)
    return logits(runner)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith(("olmo", "qwen3-moe", "mixtral", "gpt-oss"))]
)
def test_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    """Four have more ranks than the two key-value heads; no number of them divides the vocabulary."""
    path = biased(kind, tmp_path)
    expected = whole(path)
    for size, is_recorded in ((2, True), (4, False)):
        found = shared(path, size, tmp_path / str(size), is_recorded=is_recorded)
        assert all(torch.equal(found[0], other) for other in found)
        assert (found[0] - expected).abs().max() <= BOUND
        assert torch.equal(found[0].argmax(-1), expected.argmax(-1))


def test_rounding_of_sums_is_no_worse_than_that_of_one(tmp_path: Path) -> None:
    """bfloat16. The bound: twice what the logits of one rank are off from those of the same weights in float32."""
    path = tiny_model("llama", dtype="bfloat16")
    exact = whole(path, "float32")
    ours, one = shared(path, 2, tmp_path / "store", "bfloat16")[0], whole(path, "bfloat16")
    assert 0 < (ours - exact).abs().max() <= 2 * (one - exact).abs().max()


def test_a_rank_keeps_its_share_and_nothing_else() -> None:
    """Of 4 heads, 2 key-value heads, 64 inner columns and 267 tokens, at width 8 and hidden size 32."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    cut(model, alone_of(1, 2), CPU)
    shapes = {name.split(".")[-2]: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert {name: shapes[name] for name in shapes if "norm" not in name} == {
        "q_proj": (16, 32),
        "k_proj": (8, 32),
        "v_proj": (8, 32),
        "o_proj": (32, 16),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (32, 32)),
        "lm_head": (134, 32),
        "embed_tokens": (267, 32),
    }
    for name, weight in model.named_parameters():
        assert weight.untyped_storage().nbytes() <= weight.nbytes + 64 or "proj" not in name, "a view keeps the whole"


@pytest.mark.parametrize(
    ("kind", "forwards", "size", "said"),
    [
        *(("llama", "auto", n, f"{n} ranks cannot share 4 attention heads.*Choose 1 or 2 or 4 ") for n in (3, 8)),
        *((kind, how, 2, "target_tp and draft_tp at 1") for kind, how in (("gpt2", "auto"), ("llama", "transformers"))),
        ("olmo2", "auto", 2, "its norms run over all heads"),
        ("mixtral", "auto", 2, "a model with experts"),
    ],
)
def test_what_cannot_be_shared_is_refused(kind: str, forwards: str, size: int, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_runner(str(tiny_model(kind)), device=CPU, forwards=forwards, group=alone_of(0, size))


# ---- in step ----


class Wire:
    """What the leader tells, to one follower."""

    def __init__(self) -> None:
        self._words: SimpleQueue[list[int]] = SimpleQueue()

    def tell(self, words: Any) -> None:
        self._words.put(list(words))

    def told(self) -> list[int]:
        return self._words.get(timeout=WAIT)


def toy() -> ToyRunner:
    return ToyRunner(32, alpha_pair(32, 0.5)[0], 64)


def test_a_follower_does_what_its_leader_does() -> None:
    """Rollbacks travel with the next forward; a request that does not fit is refused before anybody is told."""
    wire, mine, theirs = Wire(), toy(), toy()
    leader = LeadingRunner(mine, wire)
    feed_chain(leader, [1, 2, 3], 0)
    leader.rollback(1)
    with pytest.raises(RequestError):
        feed_chain(leader, [0] * 64, 1)
    feed_chain(leader, [2, 3], 1)
    leader.rollback(2)
    leader.fork(0, 3)
    leader.forward([Feed([4, 5, 6], 3, 0, (-1, 0, -1)), Feed([7, 8], 1, 3)])
    leader.keep([0, 1])
    leader.forward([Feed([9], 1, 0), Feed([10, 11], 2, 3, (-1, -1))])
    leader.keep([1], 3)
    feed_chain(leader, [12], 1, 3)
    leader.fork(3, 0, 4, 2)
    leader.rollback(0, 1)
    dismiss(wire)
    follow(theirs, wire)
    assert theirs._tokens == mine._tokens
    assert mine._tokens[0] == [1, 2, 7, 8]
    assert mine._tokens[3] == [1, 2, 7, 8, 11, 12]


@pytest.mark.parametrize(
    ("error", "lost", "told"),
    [
        (torch.OutOfMemoryError("no memory"), TargetLost, "OutOfMemoryError: no memory"),
        (MemoryError("no memory"), DraftLost, "MemoryError: no memory"),
        (ValueError("bad"), TargetLost, "ValueError: bad"),
        (TransportError("rank 1 is gone"), TransportError, "^rank 1 is gone"),  # another rank's end
    ],
)
def test_a_forward_that_fails_on_one_rank_ends_them_all(
    error: Exception, lost: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the midst of it: out of memory, which a target of one survives, is here the end."""
    runner = toy()
    monkeypatch.setattr(runner, "forward", MagicMock(side_effect=error))
    ends: Any = TargetLost if lost is TransportError else lost
    with pytest.raises(lost, match=told):
        feed_chain(LeadingRunner(runner, Wire(), ends), [1], 1)


# ---- two processes ----

CHILD = """
import os, signal, sys, torch
from pathlib import Path
from pearl.transport.address import private_directory
from pearl.transport.torch_dist import RankGroup
store, rank, kind, *paths = sys.argv[1:]
device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(rank))
if kind == "cuda":
    torch.cuda.set_device(device)
group = RankGroup(Path(store), int(rank), 2, device, 120.0)
"""


class Pair:
    """This process as rank `mine` of two, and a child as the other that runs `script` and ends."""

    def __init__(self, store: Path, script: str, *paths: Path, mine: int = 0, device: torch.device = CPU) -> None:
        arguments = [str(store), str(1 - mine), device.type, *map(str, paths)]
        self.child = subprocess.Popen(
            [sys.executable, "-c", f"{CHILD}\n{script}\nos._exit(0)", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            self.group = RankGroup(store, mine, 2, device, WAIT)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.group.close()
        pair.stop()


LOGITS = """
from pearl.models.checkpoints.loading import load_runner
from tests.test_forward_runner import logits
for path in paths:
    group.gather(logits(load_runner(path, device=device, max_context=64, group=group)))
"""


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU a rank")
def test_two_gpus_compute_what_one_does(pairs: list[Pair], tmp_path: Path) -> None:
    """Over NCCL; a GPU multiplies float32 in another order than a CPU, so the bound is wider."""
    device, path = torch.device("cuda", 0), biased("qwen2", tmp_path)
    pairs.append(Pair(tmp_path / "store", LOGITS, path, device=device))
    found = logits(load_runner(str(path), device=device, max_context=64, group=pairs[0].group))
    gc.collect()  # its recordings: NCCL does not let go of a group that some hold
    both = pairs[0].group.gather(found)
    assert torch.equal(*both.chunk(2, -1))
    assert (found.cpu() - whole(path)).abs().max() <= 1e-4


def test_words_arrive_and_an_end_is_noticed(pairs: list[Pair], tmp_path: Path) -> None:
    """Few words and many; then rank 1 dies amid a sum, and rank 0 is told which one it was, in both of its threads."""
    script = """
words = [group.told() for _ in range(3)]
group.sum(torch.tensor([sum(map(sum, words))]))
group.told()
os.kill(os.getpid(), signal.SIGKILL)
"""
    pairs.append(Pair(tmp_path / "store", script))
    group, lost = pairs[0].group, SimpleQueue[str]()
    group.watch(lost.put)
    for words in ([7], [], list(range(1000))):
        group.tell(words)
    assert int(group.sum(torch.tensor([0]))) == 7 + sum(range(1000))
    assert lost.empty()
    group.tell([1])
    with pytest.raises(TransportError, match="rank 1 of the target is gone"):
        group.sum(torch.zeros(3))
    assert lost.get(timeout=WAIT) == "rank 1 of the target is gone"


@pytest.mark.slow
def test_an_idle_rank_waits_longer_than_the_ranks_had_to_meet(tmp_path: Path) -> None:
    """An engine may be idle for days."""
    bound = 2.0
    leader: list[RankGroup] = []
    thread = threading.Thread(target=lambda: leader.append(RankGroup(tmp_path / "store", 0, 2, CPU, bound)))
    thread.start()
    follower = RankGroup(tmp_path / "store", 1, 2, CPU, bound)
    thread.join()
    timer = threading.Timer(bound + 1, leader[0].tell, [[3]])
    timer.start()
    assert follower.told() == [3]
    timer.join()


def test_a_rank_that_never_comes_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="have not found each other"):
        RankGroup(tmp_path / "store", 0, 2, CPU, 0.5)


# ---- an engine ----

PROMPT = [20, 30, 40, 50]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def pair() -> tuple[str, str]:
    """Target and draft, the same weights disturbed; made before a test has a temporary directory of its own."""
    return str(tiny_model()), str(tiny_model(noise=0.3))


def alone(pair: tuple[str, str], sampling: Sampling, tokens: int) -> list[int]:
    """What the pair writes on one rank, found without any of the runtime: each position judged by itself."""
    target, draft = (load_runner(path, device=CPU, max_context=128) for path in pair)
    draws, judges, text = make_draft_half("ratio", sampling), make_target_half("ratio", sampling), list(PROMPT)
    for position in range(len(text), len(text) + tokens):
        ((draw, probs),) = draws.draft([fed(draft, text)], [position])
        guess = read_draw(draw)
        verdict = judges.judge(fed(target, text)[None], [guess], [] if probs is None else [probs], position)
        text.append(guess if verdict.token is None else verdict.token)
    return text[len(PROMPT) :]


def fed(runner: ModelRunner, text: list[int]) -> torch.Tensor:
    """The logits behind the whole of `text`."""
    return feed_chain(runner, text[runner.length() :], 1)[0]


def workers(engine: Engine) -> list[psutil.Process]:
    shared = [engine._launcher.target, engine._launcher.draft.worker if engine._launcher.draft else None]
    return [psutil.Process(one.pid) for ranks in shared if ranks for one in (ranks, *ranks.followers)]


def check_texts(engine: Engine, pair: tuple[str, str]) -> None:
    """Greedily and with a seed."""
    for temperature in (0.0, 1.0):
        params = GREEDY.model_copy(update={"temperature": temperature, "seed": 5})
        (result,) = engine.generate([PROMPT], params, decoding=AS_PUBLISHED)
        assert result.tokens == alone(pair, Sampling(temperature=temperature, seed=5), 60)
        assert result.statistics.num_accepted_draft_tokens > 0


def test_two_ranks_and_a_draft_write_what_one_would(anew: None, pair: tuple[str, str], temporary: Path) -> None:
    """Then the second rank dies in mid-forward, and everything ends."""
    before = children()
    with Engine(*pair, target_tp=2, max_context=128) as engine:
        check_texts(engine, pair)
        assert [fed for fed, _ in engine.welcome.t_target] == [1, 2, 4, 8], "they were measured together"
        engine.start_trace(temporary / "trace.json")
        engine.generate([PROMPT], GREEDY, method="pearl")
        assert engine.stop_trace().stat().st_size > 0

        processes = workers(engine)
        stream = engine.stream(PROMPT, GREEDY.model_copy(update={"max_tokens": 120}), method="pearl")
        processes[1].send_signal(signal.SIGSTOP)  # so that the first waits for it amid a forward
        eventually(lambda: processes[1].status() == psutil.STATUS_STOPPED, "it has stopped")
        processes[1].kill()
        with pytest.raises(TargetLost, match="target rank 1 worker was killed by signal 9"):
            list(stream)
    assert all(gone(process.pid) for process in processes)
    assert children() <= before


def test_a_shared_draft_guesses_as_one_would_and_is_started_again(pair: tuple[str, str], temporary: Path) -> None:
    """All its ranks, with any of them: the text goes on meanwhile, and the next one has a draft again."""
    before = children()
    with Engine(*pair, draft_tp=2, max_context=128) as engine:
        check_texts(engine, pair)
        processes = workers(engine)
        assert len(processes) == 3

        processes[2].kill()
        (result,) = engine.generate([PROMPT], GREEDY, method="pearl")
        assert result.tokens == alone(pair, Sampling(temperature=0), 60)
        keeper = engine._launcher.draft
        assert keeper is not None
        eventually(
            lambda: keeper.worker.pid != processes[1].pid and keeper.worker.reached("ready"), "a draft is there again"
        )
        assert all(gone(process.pid) for process in processes[1:])
        assert len({*workers(engine)} - {*processes}) == 2

        def drafted() -> bool:
            (result,) = engine.generate([PROMPT], GREEDY, decoding=AS_PUBLISHED)
            return result.statistics.num_accepted_draft_tokens > 0

        eventually(drafted, "it has joined")
    assert children() <= before


@pytest.mark.slow
def test_a_rank_that_dies_while_nothing_is_asked_takes_the_others_along(pair: tuple[str, str], temporary: Path) -> None:
    """They do not wait for the next request."""
    with Engine(pair[0], "none", target_tp=2, max_context=128) as engine:
        processes = workers(engine)
        processes[1].kill()
        eventually(lambda: all(gone(process.pid) for process in processes), "both ranks are gone")
        with pytest.raises(TargetLost, match="target rank 1 worker was killed by signal 9"):
            list(engine.stream(PROMPT, ENDLESS.model_copy(update={"max_tokens": 9}), method="ar"))


@pytest.mark.slow
def test_no_rank_outlives_its_front(pair: tuple[str, str], temporary: Path) -> None:
    """Killed in the middle of a text, the second rank being stopped."""
    text = "engine.stream([5], SamplingParams(max_tokens=250, ignore_eos=True), method='ar')"
    front, directory, ranks = start_front(
        f"for piece in {text}: print(flush=True)", f"{pair[0]!r}, 'none', target_tp=2"
    )
    assert front.stdout is not None
    front.stdout.readline()
    os.kill(ranks[1], signal.SIGSTOP)
    front.kill()
    check_nothing_left(front, directory, ranks)


def test_a_rank_that_dies_before_the_ranks_have_met_is_told(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first would wait for it until startup_timeout."""

    class Doomed(Worker):
        def _write(self, line: bytes) -> None:  # not even its settings: it meets nobody, however late it is killed
            self.kill()

    monkeypatch.setattr("pearl.engine.processes.Worker", Doomed)  # of the others; the first is a class of its own
    monkeypatch.setattr("pearl.engine.launcher.check", lambda *arguments: None)  # ranks never share a toy
    before = children()
    with pytest.raises(StartError, match="target rank 1 worker was killed by signal 9"):
        Engine("toy", "none", target_tp=2)
    assert children() <= before
