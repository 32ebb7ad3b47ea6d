"""The fast forward of the Llama family: the contract, and that it computes what transformers computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.errors import ModelError
from pearl.models import graphs
from pearl.models.graphs import FED, PREFILL, pieces, visible
from pearl.models.hf import HFRunner
from pearl.models.llama import LlamaRunner, is_llama
from pearl.models.loading import load_runner
from pearl.models.matrices import matrix
from pearl.models.runner import feed_chain
from pearl.models.toy import ToyRunner
from tests.runner_contract import RunnerContract, close, some_tokens
from tests.tiny import tiny_model

CPU = torch.device("cpu")
KINDS = ("llama", "llama-biased", "llama-tied", "llama-long", "mistral", "qwen2", "qwen3")
CHUNKS = (7, 1, 4, 2, 1, 1, 3, 8, 20)  # fed to both, so that every row has a cache behind it


def load(kind: str = "llama", dtype: str = "float32", device: torch.device = CPU) -> LlamaRunner:
    runner = load_runner(str(tiny_model(kind)), device=device, dtype=dtype, max_context=64)
    assert isinstance(runner, LlamaRunner)
    return runner


def reference(kind: str, dtype: str) -> HFRunner:
    runner = load_runner(str(tiny_model(kind)), device=CPU, dtype=dtype, max_context=64, forwards="transformers")
    assert isinstance(runner, HFRunner)
    return runner


def logits(runner: LlamaRunner | HFRunner) -> torch.Tensor:
    """Of all tokens, fed in chunks, with a rollback between any two."""
    found = []
    for count in CHUNKS:
        start = runner.length()
        feed_chain(runner, some_tokens(runner, 5, start=60), 5)
        runner.rollback(start)
        found.append(feed_chain(runner, some_tokens(runner, count, start), count))
    return torch.cat(found)


class TestContract(RunnerContract):
    @pytest.fixture(params=KINDS)
    def runner(self, request: pytest.FixtureRequest) -> LlamaRunner:
        return load(request.param)


def toy_distribution(tokens: tuple[int, ...]) -> torch.Tensor:
    """Of 64 tokens, another one in every context."""
    generator = torch.Generator().manual_seed(hash(tokens) % (1 << 62))
    return torch.rand(64, generator=generator).softmax(-1)


def into_one_buffer(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """As a graph: each replay writes its logits where those of the last stand."""
    kept = work().clone()
    return lambda: kept.copy_(work())


def replayed(kind: str, dtype: str = "float32") -> LlamaRunner:
    """Whose forwards of few tokens are those that a GPU records; here they are carried out each time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=getattr(torch, dtype))
    return LlamaRunner(model, 64, record=into_one_buffer)


class TestContractOfWhatIsRecorded(RunnerContract):
    @pytest.fixture(params=KINDS)
    def runner(self, request: pytest.FixtureRequest) -> LlamaRunner:
        return replayed(request.param)


class TestContractOfToys(RunnerContract):
    @pytest.fixture
    def runner(self) -> ToyRunner:
        return ToyRunner(64, lambda tokens: toy_distribution(tuple(tokens)), 64)


class TestContractOfSeveralSlots(RunnerContract):
    @pytest.fixture(params=[None, into_one_buffer])
    def runner(self, request: pytest.FixtureRequest) -> LlamaRunner:
        return LlamaRunner(AutoModelForCausalLM.from_pretrained(tiny_model()), 64, slots=2, record=request.param)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestContractCuda(RunnerContract):
    @pytest.fixture
    def runner(self) -> LlamaRunner:
        return load(device=torch.device("cuda", 0))


@pytest.mark.parametrize("make", [load, replayed])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str, make: Callable[[str], LlamaRunner]) -> None:
    close(logits(make(kind)), logits(reference(kind, "float32")))


@pytest.mark.parametrize("make", [load, replayed])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_no_worse_than_that_of_transformers(
    kind: str, dtype: str, make: Callable[[str, str], LlamaRunner]
) -> None:
    """The bound: 1.5 times what transformers' logits are off from those of the same weights in float32."""
    weights = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=getattr(torch, dtype))
    exact = logits(HFRunner(weights.float(), 64))
    theirs, ours = ((logits(runner) - exact).abs() for runner in (reference(kind, dtype), make(kind, dtype)))
    assert theirs.max() > 0, "nothing was rounded, so nothing was tested"
    assert ours.max() <= 1.5 * theirs.max()
    assert ours.mean() <= 1.2 * theirs.mean()


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama-dynamic"])
def test_others_keep_the_forward_of_transformers(kind: str) -> None:
    """Of a dynamic rotation the angles depend on the length of the text; a table made beforehand would be wrong."""
    assert isinstance(load_runner(str(tiny_model(kind)), device=CPU), HFRunner)


def test_a_sliding_window_is_refused_as_ever() -> None:
    with pytest.raises(ModelError, match="MistralForCausalLM"):
        load_runner(str(tiny_model("mistral-sliding")), device=CPU)


class Quantised(torch.nn.Module):
    """Stands for what bitsandbytes and the like put in a matrix's place."""


def test_quantised_matrices_are_left_to_transformers() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    assert is_llama(model)
    model.model.layers[1].mlp.down_proj = Quantised()
    assert not is_llama(model)


def test_weights_are_there_once() -> None:
    """A model that fills a device must not be copied on it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    runner = LlamaRunner(model, 64)
    assert {name.split(".")[-2] for name, _ in model.named_parameters()} == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }
    assert feed_chain(runner, [3, 4], 1).isfinite().all()


def test_greedy_text_equals_generate() -> None:
    runner, prompt = load(), [20, 30, 40, 50]
    text = list(prompt)
    for _ in range(24):
        text.append(int(feed_chain(runner, text[runner.length() :], 1).argmax()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    ids = torch.tensor([prompt])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=-1)
    assert text == wanted[0].tolist()
    assert len(set(text[4:])) > 3, "a text of one token proves nothing"


def test_the_last_tokens_of_a_context_may_be_fewer_than_are_recorded() -> None:
    """5 rows are computed as 8, three of them beyond the end."""
    ours, theirs = replayed("llama"), reference("llama", "float32")
    for runner in (ours, theirs):
        feed_chain(runner, some_tokens(runner, 59), 1)
    close(*(feed_chain(runner, some_tokens(runner, 5, 59), 5) for runner in (ours, theirs)))


def test_texts_longer_than_one_recording_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_LEAST_VISIBLE", 64)
    runners = [
        LlamaRunner(AutoModelForCausalLM.from_pretrained(tiny_model()), 256, record=record)
        for record in (None, into_one_buffer)
    ]
    tokens = some_tokens(runners[0], 200)
    whole, found = feed_chain(runners[0], tokens, 200), [feed_chain(runners[1], tokens[:50], 50)]
    found += [feed_chain(runners[1], tokens[i : i + 3], 3) for i in range(50, 200, 3)]
    close(torch.cat(found), whole)
    assert runners[1]._graphs is not None
    assert set(runners[1]._graphs._known) == {(0, 64), (0, 128), (0, 256)}


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_what_a_rejected_forward_left_is_not_seen_by_what_is_recorded(kept: int) -> None:
    """Nor a NaN: a recorded forward looks beyond the text, and 0 times NaN is not 0."""
    runner = replayed("llama")
    wanted = feed_chain(runner, some_tokens(runner, kept + 4), 4)
    feed_chain(runner, some_tokens(runner, 36 - kept), 1)
    with torch.inference_mode():
        runner._slots.keys[..., kept:40, :] = torch.nan
        runner._slots.values[..., kept:40, :] = torch.nan
    runner.rollback(kept)
    assert torch.equal(feed_chain(runner, some_tokens(runner, 4, kept), 4), wanted)


def test_few_recordings_serve_a_whole_text() -> None:
    made = []
    model = AutoModelForCausalLM.from_pretrained(tiny_model())

    def record(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        made.append(work)
        return work

    runner = LlamaRunner(model, 200, record=record)
    for fed in (20, 1, 3, 1, 8, 5, 1, 16, 12, 1):
        feed_chain(runner, some_tokens(runner, fed), 1)
    assert len(made) == 1, "of one size: which rows stand beside a row must not matter"


@pytest.mark.parametrize("start", [0, 1, 500, 511, 512, 1015, 1024, 5000])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 300, 512, 1100])
def test_what_a_row_is_computed_with_depends_on_its_position_and_no_more(start: int, count: int) -> None:
    """How far it looks; and a few rows are always as many, and so are a prompt's."""
    cut = list(pieces(start, count))
    assert [stop for _, _, stop in cut[:-1]] == [begin for _, begin, _ in cut[1:]]
    assert (cut[0][1], cut[-1][2]) == (start, start + count)
    for rows, begin, stop in cut:
        assert rows == (FED if count <= FED else PREFILL)
        assert stop - begin <= rows
        assert {visible(position) for position in range(begin, stop)} == {visible(begin)}
        assert stop <= visible(begin) <= max(512, 2 * begin)


def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
    scale = (weight.abs().amax(1, keepdim=True) / 127).float().clamp_min(1e-30)
    return (weight.float() / scale).round() * scale


def in_4_bits(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.float().view(len(weight), -1, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-30)
    middle, step = (low + 8 * step).bfloat16().float(), step.bfloat16().float()  # as the kernel takes them
    return (((groups - middle) / step).round().clamp(-8, 7) * step + middle).view_as(weight)


ROUNDINGS = {"int8": in_8_bits, "int4": in_4_bits}


@pytest.mark.parametrize("fed", [1, 3, 20])
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "llama-tied", "qwen3"])
@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_rounded_weights_are_off_by_no_more_than_their_steps_explain(dtype: str, kind: str, fed: int) -> None:
    """The reference: transformers in float32 over weights that were rounded here, by themselves."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    plain = HFRunner(AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32), 64)
    embedding = model.get_input_embeddings().weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
            linear.weight.copy_(ROUNDINGS[dtype](linear.weight.bfloat16()))
        model.get_input_embeddings().weight.copy_(embedding)
    tokens = some_tokens(plain, fed)
    wanted, exact = feed_chain(HFRunner(model, 64), tokens, fed), feed_chain(plain, tokens, fed)
    found = feed_chain(load(kind, dtype), tokens, fed)
    assert (found - wanted).abs().mean() < 0.02 * wanted.std(), "bfloat16 is all that is between the two"
    assert (found - exact).abs().mean() > (found - wanted).abs().mean(), "nothing was rounded, so nothing was tested"


@pytest.mark.parametrize("rows", [16, 64, 100, 4096, 4200])
def test_int4_holds_the_weights_of_a_q4_1_file(rows: int) -> None:
    """Whatever the number of rows, which the kernel takes in panels and we convert in parts."""
    generator = torch.Generator().manual_seed(rows)
    steps = torch.randint(0, 16, (rows, 3, 32), generator=generator)
    steps[:, :, :2] = torch.tensor([0, 15])  # a group of a real file reaches from end to end
    scale, least = (torch.randn(rows, 3, 1, generator=generator).bfloat16().float() for _ in range(2))
    weight = (scale.abs() * steps + least).view(rows, 96)
    layer = torch.nn.Linear(96, rows, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(weight)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    found, wanted = matrix(layer, rounding="int4")(x, None), x.float() @ weight.T
    assert (found.float() - wanted).abs().max() < 0.01 * wanted.abs().max()


@pytest.mark.parametrize("dtype", ROUNDINGS)
@pytest.mark.parametrize(("kind", "forwards"), [("gpt2", "auto"), ("llama", "transformers")])
def test_rounding_is_refused_where_the_forward_is_not_ours(kind: str, forwards: str, dtype: str) -> None:
    with pytest.raises(ModelError, match=dtype):
        load_runner(str(tiny_model(kind)), device=CPU, dtype=dtype, forwards=forwards)
