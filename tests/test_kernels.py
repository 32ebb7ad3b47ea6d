"""Our GPU kernels in Triton's interpreter, against plain torch: small models of every family, chains, trees, slots.

All in float32: see `test_interpreter` for what the interpreter makes of bfloat16. `test_gpu_path` has bits of that.
"""

from functools import partial

import pytest
import torch
import transformers
from torch.nn.functional import linear, silu

from pearl.decoding import sampling
from pearl.decoding.keys import Purpose, draw_key
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.forward.experts import Experts
from pearl.models.forward.linear_layers import Rounding, matrix, packed_together
from pearl.models.gpu.recordings import not_recorded
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import feed_chain
from pearl.protocol.messages import Submit
from tests.kernels import (
    FULL_TABLE,
    MODELS,
    ONE_LAYER,
    ROWS,
    SMALL,
    decoded,
    fed_both,
    runner_of,
    shared,
    text,
)
from tests.kernels import no_prompts as no_prompts  # a fixture for all
from tests.options import drawn_by, resolved

from pearl.decoding import draw_kernels  # isort: skip
from pearl.models.gpu import autotune, product_kernels, tile_kernels  # isort: skip


@ONE_LAYER
def test_forwards_are_those_of_torch() -> None:
    """Several slots, a cut within a part and across parts, a tree and its kept path, and beyond 512 positions."""
    both = shared("one layer"), runner_of("one layer", kernels=False)
    for slot in range(3):
        both[0].rollback(0, slot)
    for runner in both:
        feed_chain(runner, text(508), 1, prompt=True)
        feed_chain(runner, text(61, 5), 1, 1, prompt=True)
    fed_both(
        both, Feed(text(7, 1), 7), Feed(text(6, 2), 2, 1), Feed(text(3, 3), 3, 2)
    )  # to 515, 67 and 3
    tree = Feed(text(5, 4), 5, 1, (-1, 0, 0, 1, 2))
    fed_both(both, tree, Feed(text(1, 5), 1, 2))
    for runner in both:
        runner.keep([0, 2, 4], 1)
        runner.rollback(512)
        runner.fork(1, 2)
    fed_both(
        both, Feed(text(2, 6), 2), Feed(text(2, 7), 2, 1), Feed(torch.tensor(text(2, 8)), 2, 2)
    )


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("name", [name for name in MODELS if name != "one layer"])
def test_every_family(name: str) -> None:
    """A chain behind a prompt that is longer than windows, with a tree beside it; the chain's rows and a path of the
    tree alone; and a text.
    """
    both = runner_of(name, context=160), runner_of(name, kernels=False, context=160)
    for runner in both:
        feed_chain(runner, text(126), 1, prompt=True)
        feed_chain(runner, text(75, 5), 1, 1, prompt=True)
    tree = Feed(text(6, 4), 6, 1, (-1, 0, 0, 1, 2, 3))
    whole, nodes = fed_both(both, Feed(text(6, 1), 6), tree)
    for runner in both:
        runner.keep([0, 2, 4], 1)
    fed_both(both, Feed(text(2, 7), 2, 1))
    both[0].rollback(126)
    apart = [
        feed_chain(both[0], text(6, 1)[at : at + count], count) for at, count in ((0, 1), (1, 5))
    ]
    assert torch.equal(torch.cat(apart), whole)
    both[0].rollback(75, 1)
    assert torch.equal(
        feed_chain(both[0], [tree.tokens[node] for node in (0, 2, 4)], 3, 1), nodes[[0, 2, 4]]
    )

    draft, guesses = (
        shared("one layer", kernels=False),
        {"rule": "coupled", "look_ahead": 6, "siblings": 2},
    )
    for emptied in (*both, draft):
        for slot in range(3):
            emptied.rollback(0, slot)
    greedy = partial(resolved, sampling=drawn_by(0.0))
    pearl, ar = (
        Submit(1, text(20) * 2, 46, options)
        for options in (greedy("pearl", **guesses), greedy("ar"))
    )
    assert decoded(pearl, both[0], draft) == decoded(ar, both[1])


@pytest.mark.parametrize("name", ["experts", "experts with biases, windows and sinks"])
@pytest.mark.parametrize("rounding", ["", "int8", "int4"])
def test_products_of_experts(name: str, rounding: Rounding) -> None:
    """And padding asks for none of its own: the experts of 15 such rows would be most of what a token reads."""
    family, config = (
        MODELS[name][0],
        SMALL | MODELS[name][1] | {"hidden_size": 64, "intermediate_size": 64},
    )
    one = partial(matrix, dtype=torch.float32, rounding=rounding, is_native=False)
    both = []
    for kernels_ in (True, False):
        torch.manual_seed(0)
        given = getattr(transformers, f"{family}Config")(**config | {"moe_intermediate_size": 64})
        model = getattr(transformers, f"{family}ForCausalLM")(given).requires_grad_(False)
        for key, weight in model.named_parameters():
            if "bias" in key:
                torch.nn.init.normal_(weight, std=0.3)
        both.append(Experts(model.model.layers[0].mlp, model.config.to_dict(), one, kernels_))
    x = torch.randn(ROWS, 64)
    torch.testing.assert_close(both[0](x), both[1](x), rtol=1e-4, atol=1e-4)
    alone = torch.arange(ROWS) < 1
    assert torch.equal(both[0](x, alone)[0], both[0](x)[0])
    asked: list[torch.Tensor] = []
    both[0].products = lambda x, chosen: asked.append(chosen) or torch.zeros(*chosen.shape, 64)  # type: ignore
    both[0](x, alone)
    assert len(asked[0].unique()) == config["num_experts_per_tok"]


@pytest.mark.parametrize(("adds", "bias"), [(False, False), (False, True), (True, False)])
def test_products(adds: bool, bias: bool) -> None:
    """With a last tile that is not full, where nothing is added; twice."""
    torch.manual_seed(1)
    inputs, outputs = 64, 48 if adds else 41
    x, w = torch.randn(ROWS, inputs), torch.randn(outputs, inputs)
    norm, more, out = torch.rand(inputs), torch.randn(outputs), torch.randn(ROWS, outputs)
    squares = x.view(ROWS, -1, 16).square().sum(2).T.contiguous()
    expected = linear(
        x if adds else x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm, w
    )
    after = torch.zeros(outputs // 16, ROWS)
    for _ in range(2):
        expected_now = out + expected if adds else expected + more if bias else expected
        product_kernels.multiply[(-(-outputs // 16),)](
            FULL_TABLE, x, squares, norm, w, w, more, out, after, 1.0, 1e-5, K=inputs, N=outputs, BN=16,
            BK=16, S=2, ROWS=ROWS, NORMS=not adds, ADDS=adds, SQUARES=adds, BIAS=bias, BITS=16, GROUP=32,
            EXTRA=0, OFFSET=0.0, OVERLAPS=False,
        )  # fmt: skip
        torch.testing.assert_close(out, expected_now)
    if adds:
        torch.testing.assert_close(after, out.view(ROWS, -1, 16).square().sum(2).T)


@pytest.mark.parametrize(("rounding", "inputs"), [("int4", 768), ("int4", 192), ("int8", 256)])
def test_products_of_quantised_weights(rounding: Rounding, inputs: int) -> None:
    """With as many inputs packed together as the kernels like, and fewer; and where few rows are needed."""
    torch.manual_seed(1)
    x, layer, out = (
        torch.randn(ROWS, inputs),
        torch.nn.Linear(inputs, 41, bias=False),
        torch.zeros(ROWS, 41),
    )
    at_once = 4 * packed_together(inputs, 32) if rounding == "int4" else 64
    found = matrix(
        layer.requires_grad_(False), dtype=torch.float32, rounding=rounding, is_native=False
    )
    few, fed = (
        torch.zeros(ROWS, 41),
        torch.where(torch.arange(1 + 3 * ROWS) < 1 + 2 * ROWS + 5, FULL_TABLE, 0),
    )
    for table, to in ((FULL_TABLE, out), (fed, few)):
        product_kernels.multiply[(3,)](
            table, x, x, x, found.weight, found.scales, x, to, x, 1.0, 1e-5, K=inputs, N=41, BN=16,
            BK=at_once, S=4, ROWS=ROWS, NORMS=False, ADDS=False, SQUARES=False, BIAS=False, OVERLAPS=False,
            **found.options(),
        )  # fmt: skip
    torch.testing.assert_close(out, linear(x, found.dequantised()))
    assert torch.equal(few[:5], out[:5])
    if found.bits == 4:
        weights = torch.empty(41, inputs)
        more = {name: value for name, value in found.options().items() if name != "BITS"}
        tile_kernels.dequantise[(3, inputs // at_once)](
            found.weight, found.scales, weights, K=inputs, N=41, BK=at_once, BN=16, **more
        )
        assert torch.equal(weights, found.dequantised())


def test_gate_and_up() -> None:
    torch.manual_seed(2)
    x, w, norm, out = (
        torch.randn(ROWS, 32),
        torch.randn(2 * 40, 32),
        torch.rand(32),
        torch.zeros(ROWS, 40),
    )
    squares = x.view(ROWS, -1, 16).square().sum(2).T.contiguous()
    for _ in range(2):
        product_kernels.gate_up[(3,)](
            FULL_TABLE, x, squares, norm, w, w, w, out, 1e-5, K=32, N=40, BN=16, BK=16, S=2, ROWS=ROWS,
            NORMS=True, GELU=False, BIAS=False, BITS=16, GROUP=32, EXTRA=0, OFFSET=0.0, OVERLAPS=False,
        )  # fmt: skip
        both = linear(x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm, w)
        torch.testing.assert_close(out, silu(both[:, :40]) * both[:, 40:])


@pytest.mark.parametrize(
    ("shape", "fits"), [((4096, 11008), True), ((30, 80), False), ((90, 24), False)]
)
def test_cuts_fit_or_there_is_none(shape: tuple[int, int], fits: bool) -> None:
    kind = tuple({"BITS": 16, "GROUP": shape[1]}.items())
    for name in ("qkv", "out", "gate_up", "down", "head"):
        for cut in autotune.candidates(autotune.Product(name, shape, kind, ROWS)):
            assert shape[1] % cut.inputs == 0
            assert name not in ("out", "down") or shape[0] % cut.columns == 0
    assert bool(autotune.candidates(autotune.Product("down", shape, kind, ROWS))) == fits


@pytest.mark.parametrize("rounding", ["int4", "int8"])
def test_forwards_of_quantised_weights_are_those_of_the_weights_that_they_stand_for(
    rounding: Rounding,
) -> None:
    """Products with norms, gate-up, the head, prompts; sizes that no tile divides."""
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, initializer_range=0.2)
        models.append(transformers.LlamaForCausalLM(config).eval())
    for linear_ in (each for each in models[1].modules() if isinstance(each, torch.nn.Linear)):
        copy = torch.nn.Linear(1, 1, bias=False)
        copy.weight = torch.nn.Parameter(linear_.weight.detach().clone(), requires_grad=False)
        stood_for = matrix(copy, dtype=torch.float32, rounding=rounding, is_native=False)
        linear_.weight = torch.nn.Parameter(stood_for.dequantised(), requires_grad=False)
    ours = KernelRunner(models[0], 600, slots=2, record=not_recorded, rounding=rounding)
    theirs = CpuRunner(models[1], 600, slots=2)
    for runner in (ours, theirs):
        feed_chain(runner, text(30), 1, prompt=True)
    fed_both((ours, theirs), Feed(text(5, 1), 5), Feed(text(6, 2), 2, 1))


@pytest.mark.parametrize("vocab", [90, 1024, 2500])
def test_kernels_race_as_torchs_operations_do(vocab: int) -> None:
    """With impossible tokens too; and the check value of a row that is not finite is not."""
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(1))
    logits[3, 7:] = -torch.inf
    keys = [draw_key(drawn_by(seed=seed), 5, Purpose.DRAFT) for seed in range(len(logits))]
    ours = draw_kernels.race_rows(logits, keys, 0.7)
    assert (
        ours[:, 1].tolist()
        == sampling.race_rows(torch.softmax(logits / 0.7, -1), keys)[:, 1].tolist()
    )
    assert ours[:, 0].isfinite().all()
    bad = logits[:4].clone()
    bad[0, 5], bad[1, 3], bad[2] = torch.nan, torch.inf, -torch.inf
    assert draw_kernels.race_rows(bad, keys)[:, 0].isfinite().tolist() == [
        False,
        False,
        False,
        True,
    ]
