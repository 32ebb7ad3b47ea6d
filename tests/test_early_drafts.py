"""The draft's thread: what it begins by itself is what a loop would have asked for, and nothing else ever shows."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config import RequestOptions
from pearl.drafting.proposer import ModelProposer
from pearl.drafting.step import Step
from pearl.execution import early_drafts as module
from pearl.execution.draft import DraftExecutor
from pearl.execution.early_drafts import DraftThread
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import Feed, ModelRunner
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.events import Draft, Drafted, Open, Rollback
from pearl.protocol.speeds import ForwardTimes
from tests.options import drawn_by, resolved
from tests.tiny import random_llama
from tests.virtual import Counting

VOCAB, PROMPT, BOUND = 8, (1, 2, 3), 20.0
OPEN = Open(PROMPT, resolved(sampling=drawn_by(temperature=1.0, seed=3)))


class Watched(ToyRunner):
    """Notes the lengths at which forwards begin; one at `breaks` fails."""

    def __init__(self) -> None:
        super().__init__(VOCAB, alpha_pair(VOCAB, 0.5)[1])
        self.began: list[int] = []
        self.breaks = -1
        self.hangs: threading.Event | None = None
        self.moved = threading.Condition()

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        with self.moved:
            self.began.append(self.length())
            self.moved.notify_all()
        if self.hangs is not None and self.length() == len(PROMPT):
            self.hangs.wait()
        if self.length() == self.breaks:
            raise ValueError("broken")
        return super().forward(feeds)

    def wait_for(self, length: int) -> None:
        with self.moved:
            assert self.moved.wait_for(lambda: self.began[-1:] == [length], BOUND)


def executor(runner: ModelRunner, chains: bool = False) -> DraftExecutor:
    return DraftExecutor(ModelProposer(runner, runner.vocab_size, chains=chains))


@pytest.fixture
def runner() -> Watched:
    return Watched()


@pytest.fixture(params=[False, True], ids=["", "chained"])
def chains(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def draft_thread(runner: Watched, chains: bool) -> Iterator[DraftThread]:
    with closing(DraftThread(executor(runner, chains), lambda: True)) as draft_thread:
        draft_thread.execute(OPEN)
        yield draft_thread


def drafted(
    draft_thread: DraftThread, start: int, tokens: tuple[int, ...], more: bool = True
) -> int:
    event = draft_thread.execute(Draft(start, tokens, 1 + more))
    assert isinstance(event, Drafted)
    (token,) = event.tokens
    return token


@pytest.mark.parametrize(("more", "wanted"), [(False, True), (True, False)])
def test_none_begins_beyond_the_bound_nor_while_a_message_waits(
    runner: Watched, more: bool, wanted: bool, chains: bool
) -> None:
    with closing(DraftThread(executor(runner, chains), lambda: wanted)) as draft_thread:
        draft_thread.execute(OPEN)
        drafted(draft_thread, 0, PROMPT, more)
    assert runner.began == [0]


def test_the_next_forward_begins_untold_and_is_not_computed_again(
    draft_thread: DraftThread, runner: Watched
) -> None:
    token = drafted(draft_thread, 0, PROMPT)
    runner.wait_for(3)
    drafted(draft_thread, 3, (token,), more=False)
    draft_thread.close()
    assert runner.began == [0, 3]


def test_a_failure_is_told_to_who_asks_for_it(draft_thread: DraftThread, runner: Watched) -> None:
    runner.breaks = 3
    token = drafted(draft_thread, 0, PROMPT)
    runner.wait_for(3)
    with pytest.raises(ValueError, match="broken"):
        draft_thread.execute(Draft(3, (token,), 1))


def test_a_guess_that_failed_in_vain_is_no_failure(
    draft_thread: DraftThread, runner: Watched
) -> None:
    runner.breaks = 3
    drafted(draft_thread, 0, PROMPT)
    runner.wait_for(3)
    draft_thread.execute(Rollback(1))
    drafted(draft_thread, 1, PROMPT[1:])


def test_closing_does_not_wait_for_a_guess_that_hangs(
    runner: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    release = threading.Event()
    others = {*threading.enumerate()}
    with closing(DraftThread(executor(runner), lambda: True)) as draft_thread:
        (thread,) = {*threading.enumerate()} - others
        draft_thread.execute(OPEN)
        runner.hangs = release
        drafted(draft_thread, 0, PROMPT)
        runner.wait_for(3)
    assert thread.is_alive()
    release.set()
    thread.join(BOUND)
    assert not thread.is_alive()


def test_a_thread_that_ends_by_itself_says_why(runner: Watched) -> None:
    def wanted() -> bool:
        raise ValueError("no more")

    with closing(DraftThread(executor(runner), wanted)) as draft_thread:
        draft_thread.execute(OPEN)
        with pytest.raises(ValueError, match="no more"):
            draft_thread.execute(Draft(0, PROMPT, 2))


@settings(max_examples=40)
@given(
    st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=20)
)
def test_any_course_of_commands_gives_what_it_gives_plainly(
    chains: bool, turns: list[tuple[int, bool, bool]]
) -> None:
    """Rejections, waits and new requests at any place: the tokens and rows are those of one without a thread."""
    commands: list[object] = [OPEN, Draft(0, PROMPT, 2)]
    runner, text = Watched(), list(PROMPT)
    own = executor(runner)
    events = [own.execute(command) for command in commands]
    for back, more, opens in turns:
        last = events[-1]
        assert isinstance(last, Drafted)
        text += last.tokens
        if back > 6:  # rejected: another token stands `back - 6` before the end
            del text[max(1, len(text) - (back - 6)) :]
            text.append(back % VOCAB)
        if opens:
            commands.append(OPEN)
            events.append(own.execute(OPEN))
        start = min(runner.length(), len(text) - 1)
        if start < runner.length():
            commands.append(Rollback(start))
            events.append(own.execute(commands[-1]))
        commands.append(Draft(start, tuple(text[start:]), 1 + more))
        events.append(own.execute(commands[-1]))
    with closing(DraftThread(executor(Watched(), chains), lambda: True)) as draft_thread:
        for command, event in zip(commands, events, strict=True):
            got = draft_thread.execute(command)
            if isinstance(event, Drafted):
                assert isinstance(got, Drafted)
                assert got.tokens == event.tokens
                assert torch.equal(got.rows[0], event.rows[0])


# ---- chained ----


class Noting(ModelProposer):
    """Notes the order in which it is asked."""

    def __init__(self, runner: ToyRunner) -> None:
        super().__init__(runner, VOCAB, chains=True)
        self.asked: list[str] = []

    def launch(self, command: Draft, after: Step | None = None) -> Step:
        self.asked.append(f"launch {command.start}")
        assert (after is None) == (command.tokens != (-1,))
        return super().launch(command, after)

    def collect(self, launched: Step) -> Drafted:
        self.asked.append("collect")
        return super().collect(launched)


def test_the_next_forward_is_launched_before_the_token_is_known(runner: Watched) -> None:
    noting = Noting(runner)
    with closing(DraftThread(DraftExecutor(noting), lambda: True)) as draft_thread:
        draft_thread.execute(OPEN)
        token = drafted(draft_thread, 0, PROMPT)
        token = drafted(draft_thread, 3, (token,))
        drafted(draft_thread, 4, (token,), more=False)
    assert noting.asked == ["launch 0", "launch 3", "collect", "launch 4", "collect", "collect"]


def chained_with_lookup(draft: Counting, prompt: tuple[int, ...]) -> list[int]:
    """40 tokens, where one forward takes as long as another."""
    draft.rollback(0)
    draft.fed.clear()
    proposer = ModelProposer(draft, VOCAB, chains=True)
    # Seconds; beside them no launch here takes any.
    proposer.model.times = ForwardTimes([(1, 1e3), (16, 1e3)])
    proposer.model.times.observe = lambda fed, seconds: None  # type: ignore[method-assign]
    tokens: list[int] = []
    with closing(DraftThread(DraftExecutor(proposer), lambda: True)) as draft_thread:
        draft_thread.execute(
            Open(prompt, resolved(draft_lookup=8, sampling=drawn_by(temperature=1.0, seed=3)))
        )
        start, fed = 0, prompt
        while len(tokens) < 40:
            event = draft_thread.execute(Draft(start, fed, 40 - len(tokens), len(tokens)))
            assert isinstance(event, Drafted)
            start, fed = start + len(fed) + event.cached, event.tokens[event.cached :]
            tokens += event.tokens
    return tokens


def test_a_token_is_awaited_where_the_draft_guesses_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fed with what may follow it; where nothing repeats each forward is launched before the last is done."""
    cycle = Counting(ToyRunner(VOCAB, lambda seen: torch.eye(VOCAB)[(seen[-1] + 1) % VOCAB]))
    prompt = tuple(range(VOCAB)) * 3
    monkeypatch.setattr(module, "LEAST_LEAD", 0.0)
    assert chained_with_lookup(cycle, prompt) == [position % VOCAB for position in range(40)]
    assert len(cycle.fed) < 15
    monkeypatch.setattr(module, "LEAST_LEAD", 1e6)
    assert chained_with_lookup(cycle, prompt)[:8] == list(range(8))
    fed = [len(feed.tokens) for feeds in cycle.fed for feed in feeds]
    assert set(fed[2:]) == {1}, "to await a token would cost more than guesses gain"


SAMPLINGS = [
    drawn_by(),
    drawn_by(temperature=1.0, seed=3),
    drawn_by(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_launch_does_not_wait_for_the_gpu(rule: str, sampling: RequestOptions) -> None:
    runner = KernelRunner(random_llama(128, torch.bfloat16).to("cuda:0"), 128)  # type: ignore[arg-type]
    chained = ModelProposer(runner, runner.vocab_size, chains=True)
    chained.open(Open(PROMPT, resolved(rule=rule, sampling=sampling)))
    last = chained.launch(Draft(0, PROMPT, 3))
    last = chained.launch(Draft(3, (-1,), 2), last)  # records
    torch.cuda.set_sync_debug_mode("error")
    try:
        last = chained.launch(Draft(4, (-1,), 1), last)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(chained.collect(last).tokens) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_chained_on_a_gpu_as_one_by_one(rule: str, sampling: RequestOptions) -> None:
    prompt = tuple(range(5, 25))
    texts = []
    for chains in (False, True):
        runner = KernelRunner(random_llama(128, torch.bfloat16).to("cuda:0"), 128)  # type: ignore[arg-type]
        with closing(DraftThread(executor(runner, chains), lambda: True)) as draft_thread:
            draft_thread.execute(Open(prompt, resolved(rule=rule, sampling=sampling)))
            text, fed = [*prompt], 0
            while len(text) < 100:
                text.append(drafted(draft_thread, fed, tuple(text[fed:])))
                fed = len(text) - 1
        texts.append(text)
    assert texts[0] == texts[1]
