"""What can be told of the path on GPUs without one: what CUDA, NCCL and torch are asked for, and in which order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pearl.config import EngineConfig, ModelConfig
from pearl.decoding.distribution import AnnouncedRow
from pearl.decoding.rules import make_half
from pearl.decoding.rules.ratio import RatioTarget
from pearl.errors import ModelError
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Timing, VirtualProposer
from pearl.models.checkpoints.loading import load_model, load_runner
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.gpu.recordings import PREFILL
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import DraftTokens, Submit
from pearl.worker import build
from pearl.worker.draft_link import DraftLink
from pearl.worker.settings import TargetSettings, WorkerSettings
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.runner_contract import some_tokens
from tests.tiny import random_llama, tiny_model
from tests.virtual import Turns

GPU = torch.device("cuda", 0)
NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="loads to a GPU that must not be there"
)


@NO_GPU
@pytest.mark.parametrize("load", [load_runner, load_model])
def test_attention_of_cudnn_is_off_where_a_model_is_on_a_gpu(load: object) -> None:
    """In workers of either forward, and in the process of the outside baseline: else that is unfairly slow."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with pytest.raises(ModelError):  # there is no GPU
            load(ModelConfig(str(tiny_model())), GPU)  # type: ignore[operator]
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("tensors", ["auto", "frames", "nccl"])
def test_rows_travel_as_frames_between_gpus_too_unless_nccl_is_asked_for(
    tensors: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(target_device="cuda:0", draft_device="cuda:1", tensors=tensors)  # type: ignore[arg-type]
    settings = WorkerSettings(role="target", config=config, directory=tmp_path)
    channel = build.tensor_channel(settings, 0, GPU)
    assert (channel is not None) == (tensors == "nccl")


# ---- all rows judged together ----

LOGITS = 3 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rule", "epsilon"), [("ratio", 0.0), ("opt", 0.01), ("uno", 0.01)])
def test_odds_summed_together_are_those_summed_one_by_one(rule: str, epsilon: float) -> None:
    options = drawn_by(1.0, seed=3)
    parameters = {"epsilon": epsilon} if epsilon else {}
    half = make_half("target", options.changed(rule=rule, parameters=parameters))
    assert isinstance(half, RatioTarget)
    target, draft, tokens = (
        torch.softmax(LOGITS, -1),
        torch.softmax(LOGITS.flip(0), -1),
        range(len(LOGITS)),
    )
    one_by_one = [half.facts(target[i : i + 1], draft[i : i + 1], [i])[0] for i in tokens]
    assert half.facts(target, draft, tokens) == one_by_one


# ---- forwards in fixed sizes ----


@pytest.mark.gpu
def test_recorded_forwards_give_the_bits_of_those_that_are_not() -> None:
    """Across the limits of parts, after rollbacks too, in tables of both sizes."""
    runners = [
        KernelRunner(random_llama(1200, torch.bfloat16).to(GPU), 1200, records=records)  # type: ignore[arg-type]
        for records in (True, False)
    ]
    tokens = some_tokens(runners[0], 1200)
    for runner in runners:
        feed_chain(runner, tokens[:490], 1)
    at = 490
    for fed in (1, 5, 16, 40, 3, 8) * 18:
        rows = [feed_chain(runner, tokens[at : at + fed], fed) for runner in runners]
        assert rows[0].isfinite().all()
        assert torch.equal(rows[0], rows[1]), at
        for runner in runners:
            runner.rollback(at + fed - fed // 2)
        at += fed - fed // 2
    assert at > 1024


@pytest.mark.gpu
def test_prompts_by_our_kernels_are_those_of_tables() -> None:
    """Recorded and not, in two slots, whose bits are the same."""
    given: list[dict[str, Any]] = [{"slots": 2}, {"records": False}]
    runners = [
        KernelRunner(random_llama(1200, torch.bfloat16).to(GPU), 1200, **some) for some in given
    ]  # type: ignore
    tokens = some_tokens(runners[0], 1100)
    rows = [feed_chain(runner, tokens, 600, prompt=True) for runner in runners]
    assert torch.equal(rows[0], feed_chain(runners[0], tokens, 600, 1, prompt=True))
    runners[1].rollback(0)
    tabled = feed_chain(runners[1], tokens, 600)
    for some in rows:
        assert (some - tabled).norm() < 0.03 * tabled.norm()


def test_announced_rows_are_received_where_messages_are_read() -> None:
    """Beside the forwards: over NCCL a row takes two waits for the device, which are not to be the loop's."""
    executor, row = TargetExecutor(ToyRunner(32, alpha_pair(32, 0.5)[0])), torch.full((32,), 1 / 32)
    channel = Mock(receive=lambda count: row.expand(count, -1))
    settings = TargetSettings(EngineConfig(draft_timeout=1.0), 32, 64, b"")
    link = DraftLink(settings, executor, lambda: channel, Mock(), Mock(), Mock())
    link.peer = b"draft"
    link.open_channel()
    message = link.examined(b"draft", DraftTokens(0, 0, 3, (1,), rows=(AnnouncedRow(),)))
    assert isinstance(message, DraftTokens)
    assert torch.equal(message.rows[0], row)


class OtherBitsInPrompts(CpuRunner):
    """Computes prompts in the pieces of a GPU, whose kernels give other bits there: here quite other ones."""

    def __init__(self) -> None:
        super().__init__(random_llama(1600), 1600, slots=2)
        self.capabilities = replace(
            self.capabilities, tree_nodes=0, launches=True, prompt_piece=PREFILL
        )

    def _compute(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        return [self._one(feed) for feed in feeds]

    def _one(self, feed: Feed) -> torch.Tensor:
        embedding = self.layers.embedding
        if feed.prompt:
            self.layers.embedding = embedding.roll(1, 0)
        (logits,) = super()._compute([feed])
        self.layers.embedding = embedding
        return logits


def other_bits_by_size(seed: int) -> OtherBitsInPrompts:
    torch.manual_seed(seed)
    return OtherBitsInPrompts()


@pytest.mark.parametrize(("method", "temperature"), [("ar", 1.0), ("sd", 0.0), ("pearl", 1.0)])
def test_a_text_does_not_depend_on_what_was_in_the_cache(method: str, temperature: float) -> None:
    """The same prompt again, a second turn, prompts beside others, windows of more tokens than a small piece has."""
    timing = Timing(0.05, lambda fed: 1.0)
    chat = [7 * i % 250 for i in range(700)]
    prompts = [chat, chat[:40], chat, [], chat[:512], chat, chat[:530], [*chat[:30], *chat]]

    def loops() -> Turns:
        target, draft = other_bits_by_size(0), other_bits_by_size(0)
        proposer = VirtualProposer(draft, 256, lambda fed: timing.t_draft, texts=2)
        return Turns(TargetExecutor(target), DraftExecutor(proposer), timing, 2, draft.context)

    def submit(number: int) -> Submit:
        decoding = resolved(method, *(("stream", None) if method == "ar" else ("fixed", 20)))
        prompt = tuple(prompts[number])
        return Submit(
            number,
            prompt,
            len(prompt) + 24,
            replace(decoding, sampling=drawn_by(temperature=temperature, seed=3)),
        )

    one = loops()
    prompts[3] = [*chat, *one.run([submit(0)])[0], *chat[::-1]]
    for numbers in ([1], [2], [3], [4, 5], [6, 7]):
        one.run([submit(number) for number in numbers])
    for number in range(len(prompts)):
        assert one.tokens[number] == loops().run([submit(number)])[number], number
