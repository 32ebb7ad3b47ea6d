"""What can be told of the path on GPUs without one: what CUDA, NCCL and torch are asked for, and in which order."""

from pathlib import Path
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
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu import recordings
from pearl.models.runner import feed_chain
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import DraftTokens, Submit
from pearl.worker import build
from pearl.worker.draft_link import DraftLink
from pearl.worker.settings import TargetSettings, WorkerSettings
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.runner_contract import close, some_tokens
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
    channel = build._channel(settings, 0, GPU)
    assert (channel is not None) == (tensors == "nccl")


# ---- all rows judged together ----

LOGITS = 3 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("rule", "epsilon"), [("ratio", 0.0), ("opt", 0.01), ("uno", 0.01)])
def test_odds_summed_together_are_those_summed_one_by_one(rule: str, epsilon: float) -> None:
    half = make_half(
        "target", rule, drawn_by(1.0, seed=3), (("epsilon", epsilon),) if epsilon else ()
    )
    assert isinstance(half, RatioTarget)
    target, draft, tokens = (
        torch.softmax(LOGITS, -1),
        torch.softmax(LOGITS.flip(0), -1),
        range(len(LOGITS)),
    )
    one_by_one = [half._facts(target[i : i + 1], draft[i : i + 1], [i])[0] for i in tokens]
    assert half._facts(target, draft, tokens) == one_by_one


# ---- forwards in fixed sizes ----


@pytest.mark.parametrize("chunks", [(1100,), (300, 512, 288), (512, 512, 76)])
def test_a_prompt_in_pieces_gives_what_it_gives_in_one(chunks: tuple[int, ...]) -> None:
    """Of 512 tokens at most, however it comes: in one piece its mask alone would be a gigabyte at 8,192 tokens."""
    whole = ForwardRunner(random_llama(1101), 1101)
    largest: list[int] = []
    cut = ForwardRunner(random_llama(1101), 1101, record=lambda work: work)
    fixed = cut._fixed
    cut._graphs._step = lambda piece, *sizes: largest.append(len(piece.ids)) or fixed(piece, *sizes)  # type: ignore[union-attr]
    tokens, found, fed = some_tokens(whole, 1101), [], 0
    for count in (*chunks, 1):
        found.append(feed_chain(cut, tokens[fed : fed + count], count, prompt=True))
        fed += count
    close(torch.cat(found), feed_chain(whole, tokens, 1101))
    assert max(largest) == recordings.PREFILL


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_recorded_forwards_give_the_bits_of_those_that_are_not(dtype: torch.dtype) -> None:
    """Across the ends of two recordings, after rollbacks too; our kernels', in tables of both sizes, and torch's."""
    runners = [
        ForwardRunner(random_llama(1200, dtype).to(GPU), 1200, records=records, kernels=True)  # type: ignore[arg-type]
        for records in (True, False)
    ]
    assert {runner._decode is not None for runner in runners} == {dtype == torch.bfloat16}
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
def test_prompts_by_our_kernels_are_those_of_torch() -> None:
    """Recorded and not, in two slots, whose bits are the same."""
    given = {"slots": 2, "kernels": True}, {"kernels": True, "records": False}, {"kernels": False}
    runners = [
        ForwardRunner(random_llama(1200, torch.bfloat16).to(GPU), 1200, **some) for some in given
    ]  # type: ignore
    assert [each._graphs is not None and each._graphs.prompts is not None for each in runners] == [
        True,
        True,
        False,
    ]
    tokens = some_tokens(runners[0], 1100)
    rows = [feed_chain(runner, tokens, 600, prompt=True) for runner in runners]
    assert torch.equal(rows[0], feed_chain(runners[0], tokens, 600, 1, prompt=True))
    for some in rows[:2]:
        assert (some - rows[2]).norm() < 0.03 * rows[2].norm()


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


def other_bits_by_size(seed: int) -> ForwardRunner:
    """In the fixed sizes of a GPU, whose kernels give other bits for few rows than for many: here quite other ones."""
    torch.manual_seed(seed)
    runner = ForwardRunner(random_llama(1600), 1600, slots=2, record=lambda work: work)
    graphs_of, embedding = runner._graphs, runner._layers.embedding
    assert graphs_of is not None
    plain = graphs_of._step

    def step(piece: recordings.PieceInputs, slot: int, end: int, rows: int) -> torch.Tensor:
        runner._layers.embedding = (
            embedding if len(piece.ids) == recordings.FED else embedding.roll(1, 0)
        )
        return plain(piece, slot, end, rows)

    graphs_of._step = step
    return runner


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
