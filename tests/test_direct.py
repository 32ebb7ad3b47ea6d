"""Checkpoints that are read without transformers: the bits of the others, and nothing that is not as expected."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pearl.config import ModelConfig
from pearl.errors import ModelError
from pearl.models.checkpoints.direct import Unsupported, read_decoder
from pearl.models.checkpoints.formats import mxfp4
from pearl.models.checkpoints.loading import load_model
from pearl.models.checkpoints.memory import needed
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.cpu.runner import CpuRunner
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from tests.runner_contract import close
from tests.tiny import CPU, changed_model, on_cpu, tiny_model

KINDS = [
    "llama",
    "llama-biased",
    "llama-tied",
    "llama-long",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt-oss",
    "qwen3-moe",
]


def logits(model: Any) -> torch.Tensor:
    return feed_chain(CpuRunner(model, 256), [5, 9, 2, 7, 100, 31, 8], 7)


def check_same(directory: Path, dtype: str = "auto") -> None:
    read = read_decoder(directory, None if dtype == "auto" else getattr(torch, dtype), CPU)
    assert torch.equal(
        logits(read), logits(load_model(ModelConfig(str(directory), dtype=dtype), CPU))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_bits(kind: str) -> None:
    check_same(tiny_model(kind))
    if kind == "llama":
        check_same(tiny_model(dtype="bfloat16"), "float32")
        check_same(tiny_model(), "bfloat16")


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}


def older(scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Settings as they were written before."""
    return {"rope_parameters": ..., "rope_theta": 2e4, "rope_scaling": scaling}


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": YARN},
        {
            "rope_parameters": YARN
            | {"truncate": False, "beta_fast": 2.0, "beta_slow": 0.5, "attention_factor": 1.5},
        },
        older(None),
        older({"type": "linear", "factor": 2.0}),
        older(
            {"type": "linear", "factor": 2.0, "rope_theta": 70.0}
        ),  # goes before the one beside it
    ],
)
def test_ropes(tmp_path: Path, changed: dict[str, Any]) -> None:
    """Over more positions than a forward of the other tests has."""
    directory = changed_model(tmp_path / "model", **changed)
    read, reference = (
        read_decoder(directory, None, CPU),
        load_model(ModelConfig(str(directory)), CPU),
    )
    like, positions = torch.empty(0), torch.arange(4096)[None]
    for ours, theirs in zip(
        read.model.rotary_emb(like, positions),
        reference.model.rotary_emb(like, positions),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, out, in], bfloat16"""
    return torch.stack(
        [mxfp4(*each).dequantised().bfloat16() for each in zip(blocks, scales, strict=True)]
    )


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    """Of all bytes and exponents; and a published file, whose configuration names no dtype."""
    generator = torch.Generator().manual_seed(0)
    every = torch.arange(256, dtype=torch.uint8)
    given = (
        every.view(1, 1, 16, 16).expand(1, 256, 16, 16),
        every.view(1, 256, 1).expand(1, 256, 16),
    )
    theirs = convert_moe_packed_tensors(*given).mT
    torch.testing.assert_close(dequantised(*given), theirs, rtol=0, atol=0, equal_nan=True)
    tensors = load_file(tiny_model("gpt-oss", dtype="bfloat16") / "model.safetensors")
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        some = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": some, f"{name}_scales": exponents}
        plain[name] = dequantised(some, exponents).mT.contiguous()
    config = json.loads((tiny_model("gpt-oss", dtype="bfloat16") / "config.json").read_text())
    for path, held in ((tmp_path / "plain", plain), (tmp_path / "packed", tensors)):
        path.mkdir()
        save_file(held, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        config = {**config, "quantization_config": {"quant_method": "mxfp4"}}
        config.pop("dtype", None)
    both = [read_decoder(path, None, CPU) for path in (tmp_path / "plain", tmp_path / "packed")]
    assert torch.equal(*(logits(read) for read in both))
    packed, unpacked = (
        needed(path, "auto", 64, 64) for path in (tmp_path / "packed", tmp_path / "plain")
    )
    assert packed.weights == pytest.approx(unpacked.weights, rel=0.05)
    own_bits = needed(tmp_path / "packed", "auto", 64, 64, keeps_bits=True)
    assert own_bits.weights < 0.7 * packed.weights
    theirs = on_cpu(tmp_path / "packed", max_context=64, forwards="transformers", dtype="float32")
    ours = on_cpu(tmp_path / "packed", max_context=64, dtype="float32")
    assert isinstance(ours, ForwardRunner)
    tokens = [5, 9, 2, 7, 100]
    wanted = feed_chain(theirs, tokens, 5)
    close(feed_chain(ours, tokens, 5), wanted)
    few = on_cpu(tmp_path / "packed", max_context=64, exact=True)
    assert isinstance(few, ForwardRunner)
    assert few.weights == "4 bits", "its own"
    assert (feed_chain(few, tokens, 5) - wanted).abs().mean() < 0.05 * wanted.std()


def test_shards(tmp_path: Path) -> None:
    directory = changed_model(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    with pytest.raises(Unsupported, match="no safetensors files"):
        read_decoder(directory, None, CPU)
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file(
            {name: tensors[name] for name in tensors if where[name] == file}, directory / file
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    read = read_decoder(directory, None, CPU)
    assert torch.equal(logits(read), logits(read_decoder(tiny_model(), None, CPU)))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llama-dynamic", {}),
        ("smollm3-short", {}),  # transformers knows which of its layers have no rope
        ("gpt2", {}),
        ("llama", {"architectures": ["OtherForCausalLM"]}),
        ("llama", {"architectures": None}),
        ("llama", {"quantization_config": {"quant_method": "awq"}}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"intermediate_size": 65}),
        ("llama", {"attention_bias": True}),  # and the file has none
        ("llama-biased", {"attention_bias": False}),  # and the file has some
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"num_hidden_layers": 1}),
        ("llama", {"rms_norm_eps": ...}),
        ("llama", {"dtype": ...}),
        ("llama", {"tie_word_embeddings": ...}),
        ("llama", {"is_causal": False}),
        ("llama", {"tie_word_embeddings": True}),  # and the file has a head that is another
        # As a model card says how to read longer texts, in a file that transformers 5 has written: it takes this one.
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("llama-long", {"original_max_position_embeddings": 64}),  # goes before that of the rope
        ("llama", {"rope_parameters": {"rope_type": "default"}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}),
        ("qwen3-moe", {"norm_topk_prob": ...}),  # transformers takes false
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ...}),  # in which layers?
    ],
)
def test_what_is_not_as_expected_is_left_to_transformers(
    tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    directory = changed_model(tmp_path / "model", kind, **changed)
    with pytest.raises(Unsupported) as raised:
        read_decoder(directory, None, CPU)
    assert str(raised.value), "the log names the reason"


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("llama", "lm_head.weight", None),
        ("bloom", "transformer.h.1.mlp.dense_h_to_4h.bias", None),
        ("minimax-m2", "e_score_correction_bias", None),
        ("minimax-m2", "e_score_correction_bias", (5,)),
    ],
)
def test_a_weight_that_is_in_no_file_is_not_made_up(
    tmp_path: Path, kind: str, name: str, shape: tuple[int, ...] | None
) -> None:
    """Nor cut to size. transformers takes random numbers, or zeros: texts were others from start to start."""
    directory = changed_model(tmp_path / "model", kind)
    weights = load_file(file := directory / "model.safetensors")
    whole = next(each for each in weights if name in each)
    del weights[whole]
    save_file(
        weights | ({} if shape is None else {whole: torch.ones(shape)}), file, {"format": "pt"}
    )
    cause = (
        r"has the shape \[5\] where \[6\] is expected"
        if shape
        else f"1 of its weights are in no file, .*{name}"
    )
    with pytest.raises(ModelError, match=cause):
        on_cpu(directory)


def test_a_worker_imports_no_compiler(tmp_path: Path) -> None:
    """transformers imports torch._dynamo: seconds of every start, for what a plain run never uses."""
    code = """
import sys, torch
import pearl.worker.build
from pearl.config import ModelConfig
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
load_tokenizer(sys.argv[1])
load_runner(ModelConfig(sys.argv[1]), torch.device("cpu"))
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules])
"""
    load_tokenizer(str(tiny_model()))  # keeps it for the next
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model())], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
