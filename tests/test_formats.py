"""Quantised checkpoints of other tools in our own forward: files written here by the formats' formulas."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pearl.models.checkpoints import packed, recipes
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from tests.runner_contract import some_tokens
from tests.tiny import CPU, changed_model, on_cpu

GROUP = 32
Written = tuple[
    dict[str, torch.Tensor], torch.Tensor
]  # a module's tensors, and the weights that they stand for
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each half byte of a word


def words(fields: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[..., n] numbers of 4 bits as words of 32 bits [..., n / 8]."""
    eights = fields.astype(np.uint32).reshape(*fields.shape[:-1], -1, 8)
    packed = np.zeros(eights.shape[:-1], np.uint32)
    for place, column in enumerate(order):
        packed |= eights[..., column] << np.uint32(4 * place)
    return torch.from_numpy(packed.view(np.int32))


def in_groups(
    weight: torch.Tensor, groups: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Steps [out, in], zero points and scales [out, groups], and the weights of these; `groups`: of each input."""
    count = int(groups.max()) + 1
    least = torch.stack([weight[:, groups == n].amin(1) for n in range(count)], 1).clamp_max(0)
    most = torch.stack([weight[:, groups == n].amax(1) for n in range(count)], 1).clamp_min(0)
    scales = ((most - least) / 15).clamp_min(1e-6).half()
    zeros = (-least / scales.float()).round().clamp(1, 15)
    steps = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return (
        steps.numpy(),
        zeros.numpy(),
        scales,
        (steps - zeros[:, groups]) * scales.float()[:, groups],
    )


def awq(weight: torch.Tensor) -> Written:
    steps, zeros, scales, whole = in_groups(weight, torch.arange(weight.shape[1]) // GROUP)
    parts = {
        "qweight": words(steps.T, _AWQ),
        "qzeros": words(zeros.T, _AWQ),
        "scales": scales.T.contiguous(),
    }
    return parts, whole


def gptq(weight: torch.Tensor, acts: bool = False) -> Written:
    of = torch.arange(weight.shape[1]) // GROUP
    of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(1))] if acts else of
    steps, zeros, scales, whole = in_groups(weight, of)
    parts = {
        "qweight": words(steps).T.contiguous(),
        "qzeros": words(zeros.T - 1),  # as the first version of the format has them
        "scales": scales.T.contiguous(),
        "g_idx": of.int(),
    }
    return parts, whole


def in_words(weight: torch.Tensor) -> Written:
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    steps = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    parts = {
        "weight_packed": words(steps.view(weight.shape).numpy() + 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (steps * scales.float()[..., None]).view(weight.shape)


def in_words_with_zeros(weight: torch.Tensor) -> Written:
    """Zero points are packed along the outputs."""
    steps, zeros, scales, whole = in_groups(weight, torch.arange(weight.shape[1]) // GROUP)
    parts = {
        "weight_packed": words(steps),
        "weight_scale": scales,
        "weight_zero_point": words(zeros.T).T.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, whole


def bytes_(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    steps = (weight / scales.float()).round().clamp(-127, 127)
    return {"weight": steps.to(torch.int8), "weight_scale": scales}, steps * scales.float()


def floats(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    steps = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {"weight": steps, "weight_scale": scales}, steps.float() * scales.float()


def blocks(weight: torch.Tensor) -> Written:
    """One scale for each 128 by 128, or what there is of these."""
    rows = [some.split(128, 1) for some in weight.split(128)]
    scales = torch.stack([torch.stack([block.abs().max() / 448 for block in row]) for row in rows])
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    steps = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": steps, "weight_scale_inv": scales}, steps.float() * whole


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat((FP4, -FP4))


def fp4_pairs(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest of 16 numbers, two in a byte with the first one low; and what they stand for, in groups."""
    groups = weight.view(len(weight), scales.shape[1], -1)
    steps = (groups / scales[..., None]).unsqueeze(-1).sub(FP4).abs().argmin(-1)
    pairs = steps.view(len(weight), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), (
        FP4[steps] * scales[..., None]
    ).view(weight.shape)


def nvfp4(weight: torch.Tensor) -> Written:
    """16 weights share a scale in e4m3, which a float32 of the matrix divides."""
    whole = 6 * 448 / weight.abs().max().reshape(1)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    pairs, stands_for = fp4_pairs(weight, scales.float() / whole)
    parts = {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": whole}
    return parts | {"input_global_scale": torch.ones(1)}, stands_for


def powers(weight: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of groups of 32 an exponent each, less -127, and the power of two that it stands for."""
    exponents = (weight.view(len(weight), -1, 32).abs().amax(2) / largest).log2().ceil()
    return (exponents + 127).to(torch.uint8), 2**exponents


def mxfp4(weight: torch.Tensor) -> Written:
    exponents, scales = powers(weight, 6)
    pairs, stands_for = fp4_pairs(weight, scales)
    return {"weight_packed": pairs, "weight_scale": exponents}, stands_for


def mxfp8(weight: torch.Tensor) -> Written:
    exponents, scales = powers(weight, 448)
    steps = (weight.view(*scales.shape, -1) / scales[..., None]).to(torch.float8_e4m3fn)
    stands_for = steps.float() * scales[..., None]
    return {"weight": steps.view(weight.shape), "weight_scale": exponents}, stands_for.view(
        weight.shape
    )


def dense(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] unsigned numbers as words of 32 bits, bit behind bit."""
    rows = []
    for row in fields.tolist():
        whole = sum(int(number) << bits * place for place, number in enumerate(row))
        rows.append(
            np.frombuffer(whole.to_bytes(-(-len(row) * bits // 32) * 4, "little"), np.int32)
        )
    return torch.from_numpy(np.stack(rows))


def whole_in_words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] unsigned numbers as words of 32 bits, each with as many whole numbers as fit."""
    per_word = 32 // bits
    missing = -fields.shape[1] % per_word
    runs = torch.nn.functional.pad(fields.long(), (0, missing)).unflatten(1, (-1, per_word))
    return (runs << torch.arange(per_word) * bits).sum(-1).to(torch.int32)


def packed_in(
    bits: int,
    symmetric: bool = True,
    pack: Callable[[torch.Tensor, int], torch.Tensor] = dense,
) -> Callable[[torch.Tensor], Written]:
    """compressed-tensors' integers of so many bits, in groups of 32."""

    def write(weight: torch.Tensor) -> Written:
        groups = weight.view(len(weight), -1, GROUP)
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        half = 2 ** (bits - 1)
        scales = (high - low if not symmetric else 2 * groups.abs().amax(2)) / (2 * half - 1)
        scales = scales.bfloat16().clamp_min(1e-6)  # of padding's row too
        zeros = (
            (-low / scales.float()).round().clamp(0, 2 * half - 1)
            if not symmetric
            else torch.full_like(low, half)
        )
        steps = (
            (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2 * half - 1)
        )
        parts = {
            "weight_packed": pack(steps.flatten(1), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = pack(zeros.T, bits).T
        return parts, ((steps - zeros[..., None]) * scales.float()[..., None]).view(weight.shape)

    return write


def gptq_in(bits: int, less: int = 1) -> Callable[[torch.Tensor], Written]:
    """GPTQ without the groups of inputs, with zero points `less` so many."""

    def write(weight: torch.Tensor) -> Written:
        groups = weight.view(len(weight), -1, GROUP)
        least, most = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = ((most - least) / (2**bits - 2)).half()
        zeros = (-least / scales.float()).round().clamp(1, 2**bits - 1)
        steps = (
            (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
        )
        parts = {
            "qweight": dense(steps.flatten(1), bits).T,
            "qzeros": dense(zeros.T - less, bits),
            "scales": scales.T,
        }
        return parts, ((steps - zeros[..., None]) * scales.float()[..., None]).view(weight.shape)

    return write


def nibbles_in_bytes(weight: torch.Tensor) -> Written:
    """W4A4: steps of 4 bits with a sign, a byte each."""
    scales = (weight.abs().amax(1, keepdim=True) / 7).bfloat16()
    steps = (weight / scales.float()).round().clamp(-8, 7)
    return {"weight": steps.to(torch.int8), "weight_scale": scales}, steps * scales.float()


def nf4(weight: torch.Tensor, is_nested: bool = True) -> Written:
    """Blocks of 64 in the 16 numbers of QLoRA, their largest ones in 256 numbers."""
    half = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    table = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, *half])
    scales = weight.view(-1, 64).abs().amax(1)
    parts = {"weight.quant_map": table, "weight.absmax": scales}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    if is_nested:
        levels, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        most = (scales - offset).abs().max().reshape(1)
        codes = ((scales - offset) / most * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        scales = levels[codes.long()] * most + offset
        parts |= {
            "weight.absmax": codes,
            "weight.nested_absmax": most,
            "weight.nested_quant_map": levels,
        }
        state |= {"nested_blocksize": 256, "nested_offset": offset}
    steps = (
        ((weight.view(-1, 64) / scales[:, None])[..., None] - table)
        .abs()
        .argmin(-1)
        .to(torch.uint8)
    )
    pairs = steps.view(-1, 2)
    parts["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return parts, (table[steps.long()] * scales[:, None]).view(weight.shape)


def auto_round(packing: str, bits: int = 4, **more: Any) -> dict[str, Any]:
    scheme = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:{packing}",
        "bits": bits,
        "sym": True,
    }
    return scheme | {
        "data_type": "int",
        "group_size": GROUP,
        "block_name_to_quantize": "model.layers",
        **more,
    }


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"symmetric": True, **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


TOOLS: dict[str, tuple[Callable[[torch.Tensor], Written], dict[str, Any], str]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        "4 bits",
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}, "4 bits"),
    "gptq with act-order": (
        lambda weight: gptq(weight, True),
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        "4 bits",
    ),
    "pack-quantized": (
        in_words,
        compressed("pack-quantized", num_bits=4, group_size=GROUP),
        "4 bits",
    ),
    "pack-quantized with zero points": (
        in_words_with_zeros,
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
        "4 bits",
    ),
    "int-quantized": (bytes_, compressed("int-quantized", num_bits=8), "8 bits"),
    "float-quantized": (floats, compressed("float-quantized", num_bits=8, type="float"), "8 bits"),
    "nf4": (
        nf4,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "4 bits",
    ),
    "nf4 without nested scales": (
        lambda weight: nf4(weight, False),
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "4 bits",
    ),
    "nvfp4": (
        nvfp4,
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
        "4 bits",
    ),
    "mxfp4": (
        mxfp4,
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        "4 bits",
    ),
    "mxfp8": (
        mxfp8,
        compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32),
        "8 bits",
    ),
    "3 bits": (packed_in(3), compressed("pack-quantized", num_bits=3, actorder="weight"), "4 bits"),
    "6 bits": (packed_in(6), compressed("pack-quantized", num_bits=6, actorder="static"), "8 bits"),
    "8 bits with zero points": (
        packed_in(8, symmetric=False),
        compressed("pack-quantized", num_bits=8, symmetric=False),
        "8 bits",
    ),
    "3 bits with zero points": (
        packed_in(3, symmetric=False),
        compressed("pack-quantized", num_bits=3, symmetric=False),
        "4 bits",
    ),
    "3 bits with zero points, before 0.18": (
        packed_in(3, symmetric=False, pack=whole_in_words),
        compressed("pack-quantized", num_bits=3, symmetric=False),
        "4 bits",
    ),
    "6 bits, before 0.18": (
        packed_in(6, pack=whole_in_words),
        compressed("pack-quantized", num_bits=6),
        "8 bits",
    ),
    "W4A4": (nibbles_in_bytes, compressed("int-quantized", num_bits=4), "4 bits"),
    "gptq without g_idx": (gptq_in(4), {"quant_method": "gptq", "bits": 4}, "4 bits"),
    "gptq of 8 bits": (gptq_in(8), {"quant_method": "gptq", "bits": 8}, "8 bits"),
    "gptq of 3 bits, second version": (
        gptq_in(3, less=0),
        {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2"},
        "4 bits",
    ),
    "auto-round": (gptq_in(4), auto_round("auto_gptq"), "4 bits"),
    "auto-round as awq": (awq, auto_round("auto_awq"), "4 bits"),
    "auto-round's nvfp4": (
        nvfp4,
        auto_round("llm_compressor", data_type="nv_fp", act_bits=4),
        "4 bits",
    ),
    "fp8": (blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "8 bits"),
}


Choose = Callable[
    [str], Callable[[torch.Tensor], Written] | None
]  # how a module is written; None: whole


def save(
    tool: str, directory: Path, kind: str = "qwen3", scheme: Any = None
) -> dict[str, torch.Tensor]:
    """A tiny model as that tool writes it; returns the weights that it stands for. `scheme`: in place of its own."""
    write, usual, _ = TOOLS[tool]
    return save_mixed(directory, scheme or usual, lambda module: write, kind)


def save_mixed(
    directory: Path, scheme: Any, choose: Choose, kind: str = "qwen3"
) -> dict[str, torch.Tensor]:
    """As `save`, with a choice for each module."""
    changed_model(directory, kind, dtype="bfloat16", quantization_config=scheme)
    state, found = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        write = choose(module) if name.endswith("_proj.weight") else None
        if write is None:
            state[name] = tensor.bfloat16()
            found[name] = state[name].float()
            continue
        parts, found[name] = write(tensor.float())
        state |= {f"{module}.{part}": each.contiguous() for part, each in parts.items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return found


CASES = [*product(TOOLS, ["qwen3"]), ("awq", "qwen3-moe"), ("float-quantized", "qwen3-moe")]


@pytest.mark.parametrize(("tool", "kind"), CASES)
def test_other_tools_files_run_at_their_own_bits(tool: str, kind: str, tmp_path: Path) -> None:
    """Beside transformers in float32 over the dequantised weights; and each row has its bits in any company."""
    weights = save(tool, tmp_path / "model", kind)
    save_file(
        weights, changed_model(tmp_path / "plain", kind) / "model.safetensors", {"format": "pt"}
    )
    plain = on_cpu(tmp_path / "plain", max_context=96, forwards="transformers")
    runner = on_cpu(tmp_path / "model", max_context=96, exact=True)
    assert isinstance(runner, ForwardRunner)
    assert runner.weights == TOOLS[tool][2]
    tokens = some_tokens(plain, 40)
    wanted, found = feed_chain(plain, tokens, 40), feed_chain(runner, tokens, 40)
    bound = 0.05 if kind == "qwen3-moe" else 0.02  # rounded rows may choose another expert
    assert (found - wanted).abs().mean() < bound * wanted.std(), (
        "bfloat16 is all that is between the two"
    )
    runner.rollback(0)
    assert torch.equal(
        torch.cat([feed_chain(runner, tokens[n : n + 5], 5) for n in range(0, 40, 5)]), found
    )
    wide = on_cpu(tmp_path / "model", max_context=96, dtype="float32")
    torch.testing.assert_close(feed_chain(wide, tokens, 40), wanted, rtol=1e-3, atol=1e-4)


def group(target: str, **weights: Any) -> dict[str, Any]:
    return {"weights": {"type": "int", "symmetric": True, **weights}, "targets": [target]}


def written(rules: dict[str, Callable[[torch.Tensor], Written] | None]) -> Choose:
    """How a module is written: by the first of the expressions that is found in its name."""
    return lambda module: next(write for rule, write in rules.items() if re.search(rule, module))


MIXED: dict[str, tuple[dict[str, Any], Choose, str]] = {
    "two groups of one format": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": group("re:.*self_attn.*", num_bits=4),
                "group_1": group("re:.*mlp.*", num_bits=8),
            },
            "ignore": ["lm_head", "model.layers.0.mlp.up_proj"],
        },
        written({"0.mlp.up_proj": None, "self_attn": packed_in(4), "mlp": packed_in(8)}),
        "4 and 8 bits",
    ),
    "groups of several formats": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "group_0": group("re:.*[qk]_proj$", num_bits=6) | {"format": "pack-quantized"},
                "group_1": group("Linear", num_bits=8, type="float")
                | {"format": "naive-quantized"},
                "group_2": group("model.layers.1.self_attn.v_proj", num_bits=4, type="float")
                | {"format": "nvfp4-pack-quantized"},
            },
        },
        written({"1.self_attn.v_proj": nvfp4, "[qk]_proj": packed_in(6), "": floats}),
        "4 and 8 bits",
    ),
    "dynamic rules": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "dynamic": {
                "+:.*k_proj.*": {"bits": 8, "group_size": GROUP},
                "-:.*0.mlp.down_proj": {},
                ".*self_attn": {"bits": 3},
            },
        },
        written(
            {"k_proj": gptq_in(8), "0.mlp.down_proj": None, "self_attn": gptq_in(3), "": gptq_in(4)}
        ),
        "4 and 8 bits",
    ),
    "extra_config": (
        auto_round(
            "auto_gptq",
            extra_config={
                ".*v_proj.*": {"bits": 2},
                "model.layers.0.self_attn.v_proj": {"bits": 8, "super_bits": None},
                "model.layers.1.mlp.gate_proj": {"bits": 16},
            },
        ),
        written(
            {
                "0.self_attn.v_proj": gptq_in(8),
                "1.mlp.gate_proj": None,
                "v_proj": gptq_in(2),
                "": gptq_in(4),
            }
        ),
        "4 and 8 bits",
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_modules_have_the_bits_of_their_rule(case: str, tmp_path: Path) -> None:
    """Beside transformers in float32 over the weights that these stand for."""
    scheme, choose, bits = MIXED[case]
    weights = save_mixed(tmp_path / "model", scheme, choose)
    save_file(
        weights, changed_model(tmp_path / "plain", "qwen3") / "model.safetensors", {"format": "pt"}
    )
    plain = on_cpu(tmp_path / "plain", max_context=96, forwards="transformers")
    runner = on_cpu(tmp_path / "model", max_context=96, exact=True)
    assert isinstance(runner, ForwardRunner)
    assert runner.weights == bits
    tokens = some_tokens(plain, 40)
    wanted, found = feed_chain(plain, tokens, 40), feed_chain(runner, tokens, 40)
    assert (found - wanted).abs().mean() < 0.02 * wanted.std()
    runner.rollback(0)
    assert torch.equal(
        torch.cat([feed_chain(runner, tokens[n : n + 5], 5) for n in range(0, 40, 5)]), found
    )


@pytest.mark.parametrize("tool", [tool for tool in TOOLS if "nf4" not in tool])
def test_weights_are_those_of_the_formula_bit_for_bit(tool: str) -> None:
    """Of more inputs than a tiny model has, and of numbers of all sizes."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(2))
    write, scheme, _ = TOOLS[tool]
    parts, wanted = write(weight * torch.logspace(-3, 1, 24)[:, None])
    tensors = {f"some.module.{part}": tensor.contiguous() for part, tensor in parts.items()}
    found = packed.matrices(scheme, tensors, tensors.__getitem__)
    assert torch.equal(found["some.module.weight"]().dequantised(), wanted)


def test_scales_of_a_cache_are_unused_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llm-compressor writes them with quantised weights, or with nothing else."""
    for number, tool in enumerate(("float-quantized", "")):
        path = tmp_path / f"model-{number}"
        scheme = (
            TOOLS[tool][1] if tool else {"quant_method": "compressed-tensors", "config_groups": {}}
        )
        scheme = {**scheme, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
        save_mixed(path, scheme, lambda module, tool=tool: TOOLS[tool][0] if tool else None)
        runner = on_cpu(path, max_context=64)
        caplog.clear()
        tensors = load_file(path / "model.safetensors")
        scales = {
            f"model.layers.{n}.self_attn.{of}_scale": torch.ones(1) for n in (0, 1) for of in "kv"
        }
        save_file(tensors | scales, path / "model.safetensors", {"format": "pt"})
        other = on_cpu(path, max_context=64)
        assert isinstance(other, ForwardRunner)
        assert torch.equal(*(feed_chain(each, [5, 9, 2, 7], 4) for each in (runner, other)))
        assert [
            record.message
            for record in caplog.records
            if "keys and values stay whole" in record.message
        ]
        assert len(caplog.records) == 1


def test_an_embedding_may_be_quantised(tmp_path: Path) -> None:
    save("pack-quantized", tmp_path / "model")
    tensors = load_file(file := tmp_path / "model" / "model.safetensors")
    parts, whole = packed_in(8)(tensors["model.embed_tokens.weight"].float())
    save_file(tensors | {"model.embed_tokens.weight": whole.bfloat16()}, file, {"format": "pt"})
    wanted = feed_chain(on_cpu(tmp_path / "model", max_context=64), [5, 9, 2, 7], 4)
    del tensors["model.embed_tokens.weight"]
    tensors |= {f"model.embed_tokens.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = group("model.embed_tokens", num_bits=8)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    runner = on_cpu(tmp_path / "model", max_context=64)
    assert isinstance(runner, ForwardRunner)
    assert torch.equal(feed_chain(runner, [5, 9, 2, 7], 4), wanted)


@pytest.mark.parametrize(
    ("weight", "scales"), [((192, 256), (2, 3)), ((128, 192), (1, 2)), ((128, 192), (2, 1))]
)
def test_blocks_of_another_size_are_refused(
    weight: tuple[int, int], scales: tuple[int, int]
) -> None:
    """And not read as groups of 96, which 192 inputs have two of."""
    with pytest.raises(ValueError, match="scales"):
        packed.float8(torch.zeros(weight).to(torch.float8_e4m3fn), torch.ones(scales))


MODULE = "model.layers.0.mlp.down_proj"
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("tool", "scheme", "named"),
    [
        ("awq", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ("awq", {"quant_method": "unheard-of"}, "quant_method is 'unheard-of'"),
        ("awq", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit is None"),
        (
            "gptq",
            {"quant_method": "gptq", "bits": 3},
            r"down_proj: qweight has the shape .* is of 3 bits",
        ),
        (
            "gptq",
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'",
        ),
        (
            "gptq",
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp": {}}},
            r"0.mlp.down_proj is quantised, which dynamic\['-:\.\*mlp'\] excludes",
        ),
        (
            "gptq",
            {"quant_method": "gptq", "bits": 4, "dynamic": {".*mlp": {"rotation": "hadamard"}}},
            r"dynamic\['\.\*mlp'\]\.rotation is 'hadamard'",
        ),
        (
            "auto-round",
            auto_round("auto_gptq", rotation_config={"block_size": 32}),
            "rotation_config is {'block_size'",
        ),
        (
            "auto-round",
            auto_round("auto_gptq", extra_config={"(": {"bits": 8}}),
            "no regular expression",
        ),
        (
            "auto-round",
            auto_round("auto_gptq", extra_config={"down_proj": {"bits": 16}}),
            "bits is 16",
        ),
        (
            "auto-round",
            auto_round("llm_compressor_nvfp4_e5m3"),
            "packing_format is 'auto_round:llm_compressor_nvfp4_e5m3'",
        ),
        (
            "pack-quantized",
            compressed("pack-quantized", num_bits=4, type="float"),
            "group_0.weights has type 'float'",
        ),
        ("pack-quantized", compressed("marlin-24", num_bits=4), "group_0.format is 'marlin-24'"),
        (
            "pack-quantized",
            PACKED | {"config_groups": {"W4A16": ["Linear"]}},
            "W4A16 is the name of a preset",
        ),
        (
            "pack-quantized",
            PACKED | {"config_groups": {"a": group(MODULE, num_bits=4)}},
            "no target of config_groups",
        ),
        (
            "pack-quantized",
            compressed("pack-quantized", num_bits=4) | {"ignore": ["re:.*mlp"]},
            "which ignore excludes",
        ),
        (
            "pack-quantized",
            compressed("pack-quantized", num_bits=4)
            | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config is",
        ),
        (
            "nvfp4",
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", symmetric=False),
            "symmetric is False",
        ),
    ],
    ids=str,
)
def test_what_is_not_read_here_is_named_and_left_to_transformers(
    tool: str, scheme: dict[str, Any], named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from pearl.models.checkpoints.direct import UnsupportedWeights, read_decoder
    from pearl.models.checkpoints.loading import log_unsupported

    save(tool, tmp_path / "model", scheme=scheme)
    with pytest.raises(UnsupportedWeights, match=named) as raised:
        read_decoder(tmp_path / "model", None, CPU, keeps_bits=True)
    log_unsupported(tmp_path / "model", raised.value)
    assert re.search(named, caplog.text)
    assert str(tmp_path / "model") in caplog.text


@pytest.mark.parametrize(
    ("tool", "part"),
    [("pack-quantized", "weight_g_idx"), ("gptq", "had_rotation"), ("nvfp4", "pre_quant_scale")],
)
def test_a_tensor_of_a_quantised_module_that_nothing_reads_is_named(
    tool: str, part: str, tmp_path: Path
) -> None:
    """It might turn the weights into others: were it left out, texts would be wrong without a word."""
    from pearl.models.checkpoints.direct import UnsupportedWeights, read_decoder

    save(tool, tmp_path / "model")
    tensors = load_file(file := tmp_path / "model" / "model.safetensors")
    save_file(tensors | {f"{MODULE}.{part}": torch.ones(1)}, file, {"format": "pt"})
    reason = f"{MODULE}.{part} is a tensor that nothing reads"
    with pytest.raises(UnsupportedWeights, match=re.escape(reason)):
        read_decoder(tmp_path / "model", None, CPU, keeps_bits=True)


def test_of_two_expressions_the_first_in_the_alphabet_decides() -> None:
    """As compressed-tensors has it, 0.20.1, whatever their order in the file; a full name goes before them."""
    groups = {
        "a": group("re:.*proj", num_bits=8),
        "b": group("re:.*down", num_bits=3),
        "c": group(MODULE, num_bits=4),
    }
    choose = recipes.chooser(
        PACKED | {"config_groups": groups | {"d": group("Linear", num_bits=2)}}
    )
    names = (MODULE, "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj", "lm_head")
    assert [choose(name).bits for name in names] == [4, 3, 8, 2]
