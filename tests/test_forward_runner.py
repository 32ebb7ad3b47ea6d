"""The fast forward of the Llama family: the contract, and that it computes what transformers computes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints.loading import load_runner
from pearl.models.cpu import native
from pearl.models.cpu.runner import CpuRunner
from pearl.models.forward.linear_layers import rounding_for
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.check import KernelsUnfit
from pearl.models.gpu.runner import KernelRunner
from pearl.models.own_forward import has_own_forward
from pearl.models.runner import feed_chain
from pearl.models.toy import ToyRunner
from pearl.models.transformers.runner import HFRunner
from tests.forwards import KINDS
from tests.pairwise import pairwise
from tests.runner_contract import Kinds, RunnerContract, close, some_tokens
from tests.tiny import CPU, changed_model, on_cpu, tiny_model

CHUNKS = (7, 1, 4, 2, 1, 1, 3, 8, 20)  # fed to both, so that every row has a cache behind it


def load(kind: str = "llama", dtype: str = "float32", device: torch.device = CPU) -> ForwardRunner:
    runner = load_runner(ModelConfig(str(tiny_model(kind)), dtype=dtype, max_context=64), device)
    assert isinstance(runner, ForwardRunner)
    return runner


def reference(kind: str, dtype: str) -> HFRunner:
    runner = on_cpu(tiny_model(kind), dtype=dtype, max_context=64, forwards="transformers")
    assert isinstance(runner, HFRunner)
    return runner


def logits(runner: ForwardRunner | HFRunner) -> torch.Tensor:
    """Of all tokens, fed in chunks, with a rollback between any two."""
    found = []
    for count in CHUNKS:
        start = runner.length()
        feed_chain(runner, some_tokens(runner, 5, start=60), 5)
        runner.rollback(start)
        found.append(feed_chain(runner, some_tokens(runner, count, start), count))
    return torch.cat(found)


def toy_distribution(tokens: tuple[int, ...]) -> torch.Tensor:
    """Of 64 tokens, another one in every context."""
    generator = torch.Generator().manual_seed(hash(tokens) % (1 << 62))
    return torch.rand(64, generator=generator).softmax(-1)


def toy() -> ToyRunner:
    return ToyRunner(64, lambda tokens: toy_distribution(tuple(tokens)), 64)


def several() -> ForwardRunner:
    return CpuRunner(AutoModelForCausalLM.from_pretrained(tiny_model()), 64, slots=2)


class TestContract(RunnerContract):
    kinds: ClassVar[Kinds] = {
        "toy": toy,
        "llama": load,
        "qwen3": partial(load, "qwen3"),
        "gemma3": partial(load, "gemma3-short"),
    }
    others: ClassVar[Kinds] = {
        **{kind: partial(load, kind) for kind in KINDS if kind not in ("llama", "qwen3")},
        "several": several,
    }


@pytest.mark.gpu
class TestContractCuda(RunnerContract):
    kinds: ClassVar[Kinds] = {
        f"cuda {kind}": partial(load, kind, device=torch.device("cuda", 0))
        for kind in ("llama", "qwen3-moe", "gpt-oss", "glm4")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(kind: str) -> None:
    close(logits(load(kind)), logits(reference(kind, "float32")))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_biases_count(kind: str) -> None:
    """They begin as ones and zeros, with which an exchange of two of them shows nowhere."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or "bias" in name:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
    wanted = logits(HFRunner(deepcopy(model), 64))
    close(logits(CpuRunner(model, 64)), wanted)


@pytest.mark.parametrize(("kind", "dtype"), pairwise(KINDS, ["bfloat16", "float16"]))
def test_rounding_is_no_worse_than_that_of_transformers(kind: str, dtype: str) -> None:
    """The bound: 1.5 times what transformers' logits are off from those of the same weights in float32."""
    weights = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=getattr(torch, dtype))
    exact = logits(HFRunner(weights.float(), 64))
    theirs, ours = (
        (logits(runner) - exact).abs() for runner in (reference(kind, dtype), load(kind, dtype))
    )
    assert theirs.max() > 0, "nothing was rounded, so nothing was tested"
    assert ours.max() <= 1.5 * theirs.max()
    assert ours.mean() <= 1.2 * theirs.mean()


def test_others_keep_the_forward_of_transformers() -> None:
    """Of a dynamic rotation the angles depend on the length of the text; a table made beforehand would be wrong."""
    for kind in ("gpt2", "opt", "llama-dynamic", "stablelm", "gemma4"):
        assert isinstance(on_cpu(tiny_model(kind), max_context=64), HFRunner)
    assert not has_own_forward(
        AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_of_another_activation_are_left_to_transformers(kind: str, tmp_path: Path) -> None:
    """Our experts compute SiLU, and did so for these too."""
    model = changed_model(tmp_path / "model", kind, hidden_act="gelu_pytorch_tanh")
    assert isinstance(on_cpu(model, max_context=64), HFRunner)


def test_quantised_models_are_left_to_transformers() -> None:
    """Those with matrices of another class, as of bitsandbytes, and plain ones with other tensors, as of torchao."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    assert has_own_forward(model)
    model.config.quantization_config = {"quant_method": "torchao"}
    assert not has_own_forward(model)
    model.config.quantization_config = None
    model.model.layers[1].mlp.down_proj = torch.nn.Module()
    assert not has_own_forward(model)


def test_weights_are_there_once() -> None:
    """A model that fills a device must not be copied on it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    runner = CpuRunner(model, 64)
    assert {name.split(".")[-2] for name, _ in model.named_parameters()} == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }
    assert feed_chain(runner, [3, 4], 1).isfinite().all()


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_what_a_rejected_forward_left_is_not_seen(kept: int) -> None:
    """Nor a NaN: a forward looks at whole blocks of positions, and 0 times NaN is not 0."""
    runner = load("llama")
    wanted = feed_chain(runner, some_tokens(runner, kept + 4), 4)
    feed_chain(runner, some_tokens(runner, 36 - kept), 1)
    with torch.inference_mode():
        runner.slots.keys[..., kept:40, :] = torch.nan
        runner.slots.values[..., kept:40, :] = torch.nan
    runner.rollback(kept)
    assert torch.equal(feed_chain(runner, some_tokens(runner, 4, kept), 4), wanted)


def in_8_bits(weight: torch.Tensor) -> torch.Tensor:
    scale = (weight.abs().amax(1, keepdim=True) / 127).float().clamp_min(1e-30)
    return (weight.float() / scale).round() * scale


def in_4_bits(weight: torch.Tensor) -> torch.Tensor:
    groups = weight.float().view(len(weight), -1, 32)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-30)
    middle, step = (
        (low + 8 * step).bfloat16().float(),
        step.bfloat16().float(),
    )  # as the kernel takes them
    return (((groups - middle) / step).round().clamp(-8, 7) * step + middle).view_as(weight)


ROUNDINGS = {"int8": in_8_bits, "int4": in_4_bits}


@pytest.mark.parametrize(
    ("dtype", "kind", "fed"),
    pairwise(ROUNDINGS, ["llama", "llama-biased", "llama-tied", "qwen3"], [1, 3, 20]),
)
def test_rounded_weights_are_off_by_no_more_than_their_steps_explain(
    dtype: str, kind: str, fed: int
) -> None:
    """The reference: transformers in float32 over weights that were rounded here, by themselves."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32)
    plain = HFRunner(
        AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32), 64
    )
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
    assert (found - wanted).abs().mean() < 0.02 * wanted.std(), (
        "bfloat16 is all that is between the two"
    )
    assert (found - exact).abs().mean() > (found - wanted).abs().mean(), (
        "nothing was rounded, so nothing was tested"
    )


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets from how many weights on a model is large."""
    return lambda weights: monkeypatch.setattr("pearl.models.forward.linear_layers.LARGE", weights)


@pytest.mark.skipif(native.library() is None, reason="our products are not built")
def test_a_large_draft_of_bfloat16_is_rounded_to_4_bits(large: Callable[[int], None]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    layers, names = model.model.layers, ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    weights = len(layers) * sum(
        linear.weight.numel()
        for name, linear in layers[0].named_modules()
        if name.rpartition(".")[2] in names
    )
    large(weights)
    assert rounding_for(model) == "", "of float32"
    narrow = model.to(torch.bfloat16)
    assert rounding_for(narrow) == "int4"
    assert rounding_for(narrow.float()) == "int4", "the same weights"
    large(weights + 1)
    assert rounding_for(narrow) == ""


@pytest.mark.skipif(native.library() is None, reason="our products are not built")
@pytest.mark.parametrize("kind", ["gemma3-short", "phi4-mini"])
def test_a_draft_that_is_rounded_has_the_rope_of_its_checkpoint(
    kind: str, large: Callable[[int], None]
) -> None:
    """transformers keeps frequencies in buffers, which were rounded to bfloat16 with the weights."""
    large(0)
    model = str(tiny_model(kind, dtype="bfloat16"))
    target, draft = (
        load_runner(ModelConfig(model, role=role, max_context=256), CPU)
        for role in ("target", "draft")
    )
    assert draft.weights == "int4"
    assert isinstance(target, ForwardRunner)
    assert isinstance(draft, ForwardRunner)
    for name, tables in target._ropes.items():
        assert all(map(torch.equal, tables, draft._ropes[name]))


@pytest.mark.parametrize(
    ("kind", "forwards", "asked", "said"),
    [
        ("gpt2", "auto", {"dtype": "int8"}, "int8"),
        ("llama", "transformers", {"dtype": "int4"}, "int4"),
        ("gpt2", "auto", {"rows": "int8"}, "does not round rows to int8"),
        ("gpt2", "auto", {"exact": True}, r"runs through transformers.*--exact"),
        ("llama", "transformers", {"slots": 2}, "cache holds one sequence: leave slots at 1"),
    ],
)
def test_what_only_our_forward_has_is_refused_elsewhere(
    kind: str, forwards: str, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        on_cpu(tiny_model(kind), forwards=forwards, **asked)


@pytest.mark.skipif(
    native.library() is None or "avx2" not in native.flags(), reason="no products of 8 bits here"
)
def test_rows_of_8_bits(caplog: pytest.LogCaptureFixture) -> None:
    """They are another model, whose logits do not depend on how many tokens are fed together."""
    whole = on_cpu(tiny_model(), dtype="int4", max_context=64)
    runner = on_cpu(tiny_model(), dtype="int4", rows="int8", max_context=64)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    together = feed_chain(runner, tokens, len(tokens))
    assert runner.rounds_rows
    assert not torch.equal(feed_chain(whole, tokens, len(tokens)), together)
    runner.rollback(0)
    alone = [feed_chain(runner, [token], 1) for token in tokens]
    assert torch.equal(torch.cat(alone), together)
    assert "changes nothing" not in caplog.text
    assert not on_cpu(tiny_model(), dtype="float32", rows="int8", max_context=64).rounds_rows
    assert "rows int8 changes nothing here" in caplog.text


def test_a_model_that_our_kernels_do_not_fit_runs_through_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose refusals name what our own forward alone has."""

    def refuse(*given: Any, **named: Any) -> None:
        raise KernelsUnfit("our kernels give wrong rows here")

    monkeypatch.setattr("pearl.models.own_forward.own_runner", refuse)
    assert isinstance(on_cpu(tiny_model(), max_context=64), HFRunner)
    assert "runs through transformers, slower: our kernels give wrong rows here" in caplog.text
    with pytest.raises(ModelError, match="leave slots at 1"):
        on_cpu(tiny_model(), max_context=64, slots=2)


def test_kernels_of_a_gpu_take_bfloat16_alone() -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16)
    with pytest.raises(KernelsUnfit, match="take bfloat16, and this is float16"):
        KernelRunner(model, 64)
