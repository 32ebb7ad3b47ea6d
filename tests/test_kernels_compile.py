"""Every Triton kernel of our forward is compiled for a GPU, which needs none."""

import os
import sys

import pytest

from tests.conftest import output

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pearl.models.gpu import attention_kernels, expert_kernels, prefill_kernels, product_kernels, tile_kernels

TYPES = {"table": "*i64", "ids": "*i64"}
TYPES |= {name: "i32" for name in ("w_stride", "scales_stride", "slot_stride", "head_stride")}
TYPES |= {name: "*fp32" for name in ("squares", "x_squares", "part_squares", "sums", "stats")}
TYPES |= {name: "fp32" for name in ("alpha", "limit", "eps", "scale", "multiplier")}
SIZES = {"K": 512, "N": 48, "H": 256, "TOP": 8, "BN": 32, "HQ": 6, "HK": 2, "D": 96, "WINDOW": 40, "S": 4}
SIZES |= {name: True for name in ("BIAS", "CLAMPS", "ADDS", "SQUARES", "GELU", "TURNS", "SINKS", "OVERLAPS")}
SIZES |= {"NORMS": 2, "CAP": 30.0}

def compile(kernel, sizes, words="*bf16"):
    known = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    types = {name: "constexpr" if name in known else TYPES.get(name, "*bf16") for name in kernel.arg_names}
    types |= {"w": words} if "w" in types else {}
    triton.compile(ASTSource(kernel, types, known), target=GPUTarget("cuda", 90, 32))

compile(product_kernels.embed, SIZES | {"ROWS": 64})
for kernel in (product_kernels.add, attention_kernels.attend, attention_kernels.add_parts):
    compile(kernel, SIZES | {"ROWS": 16})
gate_up = [expert_kernels.expert_gate_up, product_kernels.gate_up]
for bits, words, group, extra, beside, rows in (  # products of each kind of weights, other kernels of some
    (16, "*bf16", 512, 0, gate_up, 64), (8, "*i8", 512, 0, [], 16), (8, "*i8", 16, 1, [expert_kernels.expert_down], 16),
    (8, "*fp8e4nv", 128, 0, [], 16), (4, "*u8", 32, 1, [*gate_up, tile_kernels.dequantise], 64),
    (4, "*u8", 128, 2, [], 16), (4, "*u8", 32, 0, [], 16), (4, "*u8", 512, 2, [], 16),
):
    sizes = SIZES | {"BITS": bits, "BK": 128, "GROUP": group, "EXTRA": extra, "OFFSET": 8.0, "ROWS": rows}
    for kernel in (product_kernels.multiply, *beside):
        compile(kernel, sizes, words)
TYPES = {"inputs": "*i64", "inner": "fp32", "outer": "fp32"}
for dim, window, other in ((128, 0, False), (256, 4096, True), (512, 0, True)):
    tile = prefill_kernels.tile_of(dim)
    sizes = {"HQ": 8, "HK": 2, "D": dim, "BM": tile.rows, "BN": tile.positions, "WINDOW": window}
    sizes |= {"CAPS": other, "SINKS": other, "TURNS": True}
    for kernel in (prefill_kernels.write, prefill_kernels.attend):
        known = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        types = {name: TYPES.get(name, "i32" if "stride" in name else "*bf16") for name in kernel.arg_names}
        types |= dict.fromkeys(known, "constexpr")
        whole = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(types) if types[name][0] in "i*"}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(ASTSource(kernel, types, known, whole), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (dim, made.metadata.shared)  # a Hopper has no more
        assert kernel is prefill_kernels.write or dim < 64 or "wgmma" in made.asm["ptx"], dim
"""


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    """Which needs none, and finds what the interpreter takes and the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    output(sys.executable, "-c", COMPILE, env=env, timeout=600)
