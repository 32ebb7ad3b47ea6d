"""Our GPU kernels in Triton's interpreter, against plain torch: small models of every family, chains, trees, slots."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # isort: skip
from transformers import Qwen3Config, Qwen3ForCausalLM  # isort: skip

from pearl.decoding import sampling
from pearl.decoding.keys import Purpose, draw_key
from pearl.models.feeds import Feed
from pearl.models.forward.experts import Experts
from pearl.models.forward.graphs import FED
from pearl.models.forward.matrices import Quantised, Rounding, matrix, packed_at_once
from pearl.models.forward.row_table import MOST_PARTS, NUMBERS, ROWS, lay_tables, numbers
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from pearl.protocol.options import Sampling

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these are for the interpreter; test_forward_runner has the GPU's", allow_module_level=True)
assert os.environ["TRITON_INTERPRET"] == "1"  # set by conftest

from pearl.decoding import draw_kernels  # noqa: E402
from pearl.models.forward import cuts, decode, kernels  # noqa: E402

_SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
_ONE = {"num_hidden_layers": 1}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "initializer_range": 0.3}
_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3, "swiglu_limit": 0.5}
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "one layer": (LlamaForCausalLM, LlamaConfig, _ONE),
    "biases, three query heads a key": (
        Qwen2ForCausalLM,
        Qwen2Config,
        _ONE | {"num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "norms of queries and keys, a key a query head": (
        Qwen3ForCausalLM,
        Qwen3Config,
        _ONE | {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    ),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, _ONE | _MOE),
    "experts with biases, windows and sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        _ONE | _OSS | {"sliding_window": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}


def model_of(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, config, other = MODELS[name]
    model = cls(config(**_SIZES | other)).eval()
    for key, weight in model.named_parameters():
        if weight.dim() == 1 or "bias" in key:  # norms and biases, which begin as ones and zeros
            torch.nn.init.normal_(weight, mean=float("norm" in key), std=0.3)
    return model  # type: ignore[no-any-return]


def runner_of(name: str, kernels: bool = True, context: int = 600) -> ForwardRunner:
    return ForwardRunner(model_of(name), context, slots=3, record=lambda work: work, kernels=kernels)


@cache
def shared(name: str) -> ForwardRunner:
    """With our kernels; several tests use it, for making one takes seconds."""
    return runner_of(name)


def text(count: int, start: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 3 * i * i + start) % 90 for i in range(count))


def fed_both(runners: Sequence[ForwardRunner], *feeds: Feed) -> list[torch.Tensor]:
    """The logits by the first runner, which those by the others must be near."""
    found, *others = ([rows.clone() for rows in runner.forward(feeds)] for runner in runners)
    for other in others:
        for some, rows in zip(found, other, strict=True):
            torch.testing.assert_close(some, rows, rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.parametrize("name", [name for name in MODELS if "one layer" not in name and "with" not in name])
def test_forwards_are_those_of_torch(name: str) -> None:
    """Several slots, a cut within a part and across parts, a tree and its kept path, and beyond 512 positions."""
    both = shared(name), runner_of(name, kernels=False)
    assert both[0]._decode is not None
    assert both[1]._decode is None
    for slot in range(3):
        both[0].rollback(0, slot)
    for runner in both:
        feed_chain(runner, text(508), 1, prompt=True)
        feed_chain(runner, text(61, 5), 1, 1, prompt=True)
    fed_both(both, Feed(text(7, 1), 7), Feed(text(6, 2), 2, 1), Feed(text(3, 3), 3, 2))  # to 515, 67 and 3
    tree = Feed(text(5, 4), 5, 1, (-1, 0, 0, 1, 2))
    fed_both(both, tree, Feed(text(1, 5), 1, 2))
    for runner in both:
        runner.keep([0, 2, 4], 1)
        runner.rollback(512)
        runner.fork(1, 2)
    fed_both(both, Feed(text(2, 6), 2), Feed(text(2, 7), 2, 1), Feed(torch.tensor(text(2, 8)), 2, 2))


def test_a_model_with_biases_of_gate_and_up_keeps_torchs_operations() -> None:
    """Its logits were wrong: that kernel adds none."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_SIZES | _ONE, mlp_bias=True)).eval()
    assert ForwardRunner(model, 600, record=lambda work: work, kernels=True)._decode is None


def test_experts_of_a_model_that_our_other_kernels_do_not_fit_are_ours() -> None:
    """gpt-oss's, in a recording of torch's other operations; a row is alone, then with others."""
    name = "experts with biases, windows and sinks"
    both = runner_of(name, context=64), runner_of(name, kernels=False, context=64)
    assert both[0]._decode is None
    assert both[0]._layers.layers[0].experts._products is not None
    (whole,) = fed_both(both, Feed(text(ROWS), ROWS))
    both[0].rollback(0)
    assert torch.equal(torch.cat([feed_chain(both[0], text(ROWS)[at : at + 4], 4) for at in range(0, ROWS, 4)]), whole)


@pytest.mark.parametrize("name", ["experts", "experts with biases, windows and sinks"])
@pytest.mark.parametrize("rounding", ["", "int8", "int4"])
def test_products_of_experts(name: str, rounding: Rounding) -> None:
    """And padding asks for none of its own: the experts of 15 such rows would be most of what a token reads."""
    kind, config = MODELS[name][1], _SIZES | MODELS[name][2] | {"hidden_size": 64, "intermediate_size": 64}
    one = partial(matrix, dtype=torch.float32, rounding=rounding, plain=True)
    both = []
    for kernels_ in (True, False):
        torch.manual_seed(0)
        model = MODELS[name][0](kind(**config | {"moe_intermediate_size": 64})).requires_grad_(False)
        for key, weight in model.named_parameters():
            if "bias" in key:
                torch.nn.init.normal_(weight, std=0.3)
        both.append(Experts(model.model.layers[0].mlp, model.config.to_dict(), one, kernels_))
    x = torch.randn(ROWS, 64)
    torch.testing.assert_close(both[0](x), both[1](x), rtol=1e-4, atol=1e-4)
    alone = torch.arange(ROWS) < 1
    assert torch.equal(both[0](x, alone)[0], both[0](x)[0])
    asked: list[torch.Tensor] = []
    both[0]._products = lambda x, chosen: asked.append(chosen) or torch.zeros(*chosen.shape, 64)  # type: ignore
    both[0](x, alone)
    assert len(asked[0].unique()) == config["num_experts_per_tok"]


@pytest.fixture(scope="module", params=["one layer", "experts"])
def runner(request: pytest.FixtureRequest) -> ForwardRunner:
    return shared(request.param)


def test_bits_depend_on_no_company_slot_or_cut(runner: ForwardRunner) -> None:
    runner.rollback(0)
    feed_chain(runner, text(60), 1, prompt=True)
    runner.fork(0, 1)
    (whole,) = runner.forward([Feed(text(ROWS, 1), ROWS)])
    for cut in ([1, 3, 12], [10, 6]):
        runner.rollback(0, 2)
        runner.rollback(60, 1)
        at, found = 0, []
        for count in cut:
            company = [Feed(text(2, count), 2, 2)] if at else []
            found.append(runner.forward([*company, Feed(text(ROWS, 1)[at : at + count], count, 1)])[-1])
            at += count
        assert torch.equal(torch.cat(found), whole)


def test_more_rows_than_a_table_has_are_in_several(runner: ForwardRunner) -> None:
    for slot in range(3):
        runner.rollback(0, slot)
    apart = [runner.forward([Feed(text(14, slot), 3, slot)])[0] for slot in (0, 1)]
    for slot in range(3):
        runner.rollback(0, slot)
    together = runner.forward([Feed(text(14, slot), 3, slot) for slot in (0, 1)])
    assert all(map(torch.equal, together, apart))
    assert runner.length(0) == runner.length(1) == 14


def test_kernels_whose_bits_depend_on_the_cut_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    true = decode.Decode.forward

    def planted(self: decode.Decode, feeds: Sequence[Feed]) -> list[Any]:
        found = zip(true(self, feeds), feeds, strict=True)
        return [(rows * (1 + 1e-6 * (len(feed.tokens) == 1)), more) for (rows, more), feed in found]

    monkeypatch.setattr(decode.Decode, "forward", planted)
    assert runner_of("one layer")._decode is None
    assert "depend on their company" in caplog.text


def test_kernels_that_do_not_compile_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuts, "candidates", lambda name, shape, bits: [])
    found = runner_of("one layer")
    assert found._decode is None
    assert "no cut fits" in caplog.text
    assert feed_chain(found, text(3), 3).shape == (3, 90)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("adds", "bias"), [(False, False), (False, True), (True, False)])
def test_products(parts: int, adds: bool, bias: bool) -> None:
    """With a last tile that is not full, where nothing is added; twice, for what parts leave behind."""
    torch.manual_seed(1)
    inputs, outputs = 64, 48 if adds else 41
    x, w = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
    norm, more, out = torch.rand(inputs), torch.randn(outputs), torch.randn(ROWS, outputs)
    squares, sums, counts = x.view(ROWS, -1, 16).square().sum(2).T.contiguous(), torch.empty(9999), torch.zeros(9).int()
    expected = linear(x if adds else x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm, w)
    after = torch.zeros(outputs // 16, ROWS)
    for _ in range(2):
        expected_now = out + expected if adds else expected + more if bias else expected
        kernels.multiply[(-(-outputs // 16), parts)](
            x, squares, norm, w, w, more, out, after, sums, counts, 1e-5, K=inputs, N=outputs, BN=16, BK=32,
            PARTS=parts, NORMS=not adds, ADDS=adds, BIAS=bias, BITS=16, GROUP=32, EXTRA=0, OFFSET=0.0, OVERLAPS=False,
        )  # fmt: skip
        torch.testing.assert_close(out, expected_now)
        assert not counts.any()
    if adds:
        torch.testing.assert_close(after, out.view(ROWS, -1, 16).square().sum(2).T)


@pytest.mark.parametrize(("rounding", "inputs"), [("int4", 768), ("int4", 192), ("int8", 256)])
def test_products_of_quantised_weights_in_parts(rounding: Rounding, inputs: int) -> None:
    """With as many inputs packed together as the kernels like, and fewer."""
    torch.manual_seed(1)
    x, layer, out = torch.randn(ROWS, inputs), torch.nn.Linear(inputs, 41, bias=False), torch.zeros(ROWS, 41)
    parts = 1 if inputs == 192 else 2
    at_once = packed_at_once(inputs) if rounding == "int4" else 64
    sums, counts = torch.empty(9999), torch.zeros(9).int()
    found = matrix(layer.requires_grad_(False), dtype=torch.float32, rounding=rounding, plain=True)
    assert isinstance(found, Quantised)
    kernels.multiply[(3, parts)](
        x, x, x, found.weight, found.scales, x, out, x, sums, counts, 1e-5, K=inputs, N=41, BN=16, BK=at_once,
        PARTS=parts, NORMS=False, ADDS=False, BIAS=False, OVERLAPS=False, **found.options(),
    )  # fmt: skip
    torch.testing.assert_close(out, linear(x, found.dequantised()))
    if found.bits == 4:
        weights = torch.empty(41, inputs)
        more = {name: value for name, value in found.options().items() if name != "BITS"}
        kernels.dequantise[(3, inputs // at_once)](
            found.weight, found.scales, weights, K=inputs, N=41, BK=at_once, BN=16, **more
        )
        assert torch.equal(weights, found.dequantised())


def test_gate_and_up() -> None:
    torch.manual_seed(2)
    x, w, norm, out = torch.randn(ROWS, 32), torch.randn(2 * 40, 32), torch.rand(32), torch.zeros(ROWS, 40)
    squares = x.view(ROWS, -1, 16).square().sum(2).T.contiguous()
    kernels.gate_up[(3,)](
        x, squares, norm, w, w, out, 1e-5, K=32, N=40, BN=16, BK=16, BITS=16, GROUP=32, EXTRA=0, OFFSET=0.0,
        OVERLAPS=False,
    )  # fmt: skip
    both = linear(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm, w)
    torch.testing.assert_close(out, silu(both[:, :40]) * both[:, 40:])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pearl.models.forward import expert_kernels, kernels, prompt_kernels

TYPES = {"ids": "*i64", "counts": "*i32", "w_stride": "i32", "scales_stride": "i32"}
TYPES |= {name: "*fp32" for name in ("squares", "x_squares", "sums")}
TYPES |= {name: "fp32" for name in ("alpha", "limit", "eps")}
SIZES = {"K": 512, "N": 48, "H": 256, "TOP": 8, "BN": 32, "PARTS": 2}
SIZES |= {name: True for name in ("BIAS", "CLAMPS", "NORMS", "ADDS", "OVERLAPS")}
for bits, words, group, extra in (
    (16, "*bf16", 512, 0), (8, "*i8", 512, 0), (8, "*i8", 16, 1), (8, "*fp8e4nv", 128, 0),
    (4, "*u8", 32, 1), (4, "*u8", 128, 2), (4, "*u8", 32, 0),
):
    sizes = SIZES | {"BITS": bits, "BK": 256 if bits == 4 else 128, "GROUP": group, "EXTRA": extra, "OFFSET": 8.0}
    chosen = [kernels.multiply, kernels.gate_up, expert_kernels.expert_gate_up, expert_kernels.expert_down]
    chosen += {4: [kernels.dequantise], 16: [expert_kernels.add_mixed]}.get(bits, [])
    for kernel in chosen:
        known = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        types = {name: "constexpr" if name in known else TYPES.get(name, "*bf16") for name in kernel.arg_names}
        types |= {"w": words} if "w" in types else {}
        triton.compile(ASTSource(kernel, types, known), target=GPUTarget("cuda", 90, 32))
TYPES = {"given": "*i64", "inner": "fp32", "outer": "fp32"}
for dim, window, other in ((64, 0, False), (128, 0, False), (256, 4096, True), (512, 0, True), (16, 128, True)):
    tile = prompt_kernels.tile_of(dim)
    sizes = {"HQ": 8, "HK": 2, "D": dim, "BM": tile.rows, "BN": tile.positions, "WINDOW": window}
    sizes |= {"CAPS": other, "SINKS": other, "TURNS": True}
    for kernel in (prompt_kernels.write, prompt_kernels.attend):
        known = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        types = {name: TYPES.get(name, "i32" if "stride" in name else "*bf16") for name in kernel.arg_names}
        types |= dict.fromkeys(known, "constexpr")
        whole = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(types) if types[name][0] in "i*"}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(ASTSource(kernel, types, known, whole), target=GPUTarget("cuda", 90, 32), options=options)
        assert made.metadata.shared <= 232448, (dim, made.metadata.shared)  # a Hopper has no more
        assert kernel is prompt_kernels.write or dim < 64 or "wgmma" in made.asm["ptx"], dim
"""


def test_kernels_compile_for_a_gpu() -> None:
    """Which needs none, and finds what the interpreter takes and the compiler does not."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_tables() -> None:
    """Chains are cut where a table is full, trees are not; rows that look at parts of other lengths are other tiles."""
    feeds = [Feed(text(20), 1), Feed(text(14), 1, 1, (-1, *range(13))), Feed(text(2), 1, 2)]
    tables = lay_tables(feeds, [1020, 100, 0])
    assert [[(piece.feed, piece.begin, piece.end, piece.row) for piece in table] for table in tables] == [
        [(0, 0, 16, 0)],
        [(0, 16, 20, 0)],
        [(1, 0, 14, 0), (2, 0, 2, 14)],
    ]
    flat = numbers(feeds, tables[0])
    assert len(flat) == NUMBERS
    assert flat[0] == 2
    # first, rows, feed, fed, slot, start, span, parts: position 1023 is the last whose parts have 64 positions
    assert flat[1 + 3 * ROWS :][:16] == [0, 4, 0, 16, 0, 1020, 64, 16, 4, 12, 0, 16, 0, 1020, 128, 9]
    assert max(flat[1 + 3 * ROWS + 7 :: 8]) <= MOST_PARTS
    assert FED == ROWS == kernels.ROWS.value
    assert kernels.MOST_PARTS.value == MOST_PARTS


@pytest.mark.parametrize(("shape", "fits"), [((4096, 11008), True), ((30, 80), False), ((90, 24), False)])
def test_cuts_fit_or_there_is_none(shape: tuple[int, int], fits: bool) -> None:
    for name in decode.PRODUCTS:
        for cut in cuts.candidates(name, shape):
            assert shape[1] % cut.inputs == 0
            assert shape[1] >= cut.parts * cut.inputs
            assert name not in ("out", "down") or shape[0] % cut.columns == 0
    assert bool(cuts.candidates("down", shape)) == fits


@pytest.mark.parametrize("rounding", ["int4", "int8"])
def test_forwards_of_quantised_weights_are_those_of_the_weights_that_they_stand_for(rounding: Rounding) -> None:
    """Products with parts and norms, gate-up, the head, prompts; sizes that no tile divides."""
    sizes = _SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).eval())
    for linear_ in (each for each in models[1].modules() if isinstance(each, torch.nn.Linear)):
        copy = torch.nn.Linear(1, 1, bias=False)
        copy.weight = torch.nn.Parameter(linear_.weight.detach().clone(), requires_grad=False)
        stood_for = matrix(copy, dtype=torch.float32, rounding=rounding, plain=True)
        assert isinstance(stood_for, Quantised)
        linear_.weight = torch.nn.Parameter(stood_for.dequantised(), requires_grad=False)
    ours = ForwardRunner(models[0], 600, slots=2, record=lambda work: work, kernels=True, rounding=rounding)
    theirs = ForwardRunner(models[1], 600, slots=2, record=lambda work: work, kernels=False)
    assert ours._decode is not None
    for runner in (ours, theirs):
        feed_chain(runner, text(30), 1, prompt=True)
    fed_both((ours, theirs), Feed(text(5, 1), 5), Feed(text(6, 2), 2, 1))


@pytest.mark.parametrize("vocab", [90, 1024, 2500])
def test_kernels_race_as_torchs_operations_do(vocab: int) -> None:
    """With impossible tokens too; and the check value of a row that is not finite is not."""
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(1))
    logits[3, 7:] = -torch.inf
    keys = [draw_key(Sampling(seed=seed), 5, Purpose.DRAFT) for seed in range(len(logits))]
    ours = draw_kernels.race_rows(logits, keys, 0.7)
    assert ours[:, 1].tolist() == sampling.race_rows(torch.softmax(logits / 0.7, -1), keys)[:, 1].tolist()
    assert ours[:, 0].isfinite().all()
    bad = logits[:4].clone()
    bad[0, 5], bad[1, 3], bad[2] = torch.nan, torch.inf, -torch.inf
    assert draw_kernels.race_rows(bad, keys)[:, 0].isfinite().tolist() == [False, False, False, True]
