"""Quantised matrices and our products on a CPU, for every kind and every instruction set that this processor has."""

import hashlib
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import gelu, linear, silu
from transformers import AutoModelForCausalLM

from pearl.models.checkpoints.formats import FP4, GGUF_BLOCKS, from_gguf
from pearl.models.cpu import native
from pearl.models.cpu.native import Native
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed, depths, lay_out, paths
from pearl.models.forward import linear_layers
from pearl.models.forward import quantised as quantised_matrices
from pearl.models.forward.attention import Heads, Scoring
from pearl.models.forward.quantised import (
    QuantisedMatrix,
    StoredMatrix,
    are_alike,
    rounded,
    stacked,
)
from pearl.models.forward.slot_attention import NativeAttention
from pearl.models.forward.slots import Slots
from pearl.models.runner import feed_chain
from tests.pairwise import pairwise
from tests.tiny import attended, irregular, random_llama, tiny_model

BUILT = [
    file
    for name, flags in native.BUILDS
    if flags <= native.flags()
    for file in sorted(Path(native.__file__).parent.glob(f"{name}.*so"))
]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not BUILT, reason="our products are not built: no compiler")


def numbers(*shape: int, high: int) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.uint8)


def halves(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape) * 0.02 - 0.01).half()


def with_scales(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """Random blocks [out, blocks, bytes] of a GGUF file with scales of a usual size."""
    if kind == "MXFP4":  # powers of two
        blocks[..., 0] = blocks[..., 0] % 16 + 110
        return blocks
    has_two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for at in [208] if kind == "Q6_K" else [0, 2] if has_two else [0]:
        blocks[..., at : at + 2] = halves(*blocks.shape[:2], 1).view(torch.uint8)
    return blocks


def rows_of(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """Random rows of a GGUF file, [out, bytes]."""
    size, length, _ = GGUF_BLOCKS[kind]
    blocks = numbers(outputs, inputs // size, length, high=256)
    return with_scales(kind, blocks).flatten(1)


def quantised(kind: str, outputs: int, inputs: int) -> QuantisedMatrix:
    """Random weights of a kind."""
    torch.manual_seed(outputs)
    if kind in GGUF_BLOCKS:
        return from_gguf(kind, rows_of(kind, outputs, inputs))
    if kind == "table":
        table = torch.randn(16).bfloat16().float()  # a CPU with bfloat16 rounds them to that
        return QuantisedMatrix(
            numbers(outputs, inputs, high=16), 4, torch.rand(outputs, inputs // 64), table=table
        )
    if kind == "zeros":
        return QuantisedMatrix(
            numbers(outputs, inputs, high=16),
            4,
            halves(outputs, inputs // 128),
            zeros=numbers(outputs, inputs // 128, high=17),
        )
    if kind == "float8":
        every = torch.arange(outputs * inputs) % 256  # all numbers; two are none
        steps = (
            every.masked_fill(every % 128 == 127, 1)
            .to(torch.uint8)
            .view(outputs, inputs)
            .view(torch.float8_e4m3fn)
        )
        return QuantisedMatrix(steps, 8, torch.rand(outputs, inputs // 128) * 1e-3)
    if (
        kind == "nvfp4"
    ):  # a scale in e4m3 for 16, of any size, which another number of each row divides
        scales = (torch.rand(outputs, inputs // 16) * 400 + 0.01).to(torch.float8_e4m3fn)
        divisors = torch.rand(outputs, 1) * 1e4 + 1
        return QuantisedMatrix(
            numbers(outputs, inputs, high=16), 4, scales, table=FP4, divisors=divisors
        )
    if kind == "mxfp8":
        steps = (torch.rand(outputs, inputs) * 896 - 448).to(torch.float8_e4m3fn)
        exponents = torch.randint(-20, -8, (outputs, inputs // 32))
        return QuantisedMatrix(steps, 8, (2.0**exponents).bfloat16())
    if kind == "bytes with zeros":
        steps = numbers(outputs, inputs, high=255).view(torch.int8)
        zeros = torch.randint(-128, 129, (outputs, inputs // 32), dtype=torch.int16)
        return QuantisedMatrix(steps, 8, halves(outputs, inputs // 32), zeros=zeros)
    if kind == "order":
        return QuantisedMatrix(
            numbers(outputs, inputs, high=16),
            4,
            halves(outputs, inputs // 32),
            order=torch.randperm(inputs),
        )
    return rounded(irregular(outputs, inputs, torch.bfloat16), "int8" if kind == "int8" else "int4")


WHOLE = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "narrow": torch.float32,
}
KINDS = (
    *GGUF_BLOCKS,
    "table",
    "zeros",
    "float8",
    "nvfp4",
    "mxfp8",
    "bytes with zeros",
    "order",
    "int8",
    "int4",
)


@pytest.fixture(params=BUILT, ids=lambda file: file.name.partition(".")[0])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = native.load(request.param)
    monkeypatch.setattr(native, "library", lambda: opened)


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_blocks_are_what_the_reference_reads(kind: str) -> None:
    from gguf import GGMLQuantizationType, quants

    length = GGUF_BLOCKS[kind][1]
    blocks = with_scales(kind, numbers(24, 3, length, high=256))
    if kind == "MXFP4":
        blocks[:, 0, 0] = torch.arange(24, dtype=torch.uint8) * 11  # from the least
    wanted = quants.dequantize(blocks.flatten(1).numpy(), GGMLQuantizationType[kind]).reshape(
        24, -1
    )
    assert torch.equal(from_gguf(kind, blocks.flatten(1)).dequantised(), torch.from_numpy(wanted))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_a_matrix_in_a_file_is_laid_out_in_pieces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each piece is released before the next is read. Looked-up rows are those of the whole matrix."""
    monkeypatch.setattr(native, "_PIECE", 64)
    rows = rows_of(kind, 150, 512)
    steps: list[str] = []

    def read(piece: torch.Tensor) -> QuantisedMatrix:
        steps.append(f"read {len(piece)}")
        return from_gguf(kind, piece)

    def release() -> None:
        steps.append("release")

    stored = StoredMatrix(rows, read, release, torch.Size((150, 512)), torch.bfloat16)
    product = Native(stored, wide=True)
    assert steps == ["read 64", "release", "read 64", "release", "read 22", "release"]
    whole = from_gguf(kind, rows)
    x = irregular(3, 512, torch.bfloat16)
    assert torch.equal(product(x), Native(whole, wide=True)(x))
    ids = torch.tensor([149, 0, 7, 7])
    assert torch.equal(stored[ids], whole.dequantised()[ids].bfloat16())


def test_rows_that_were_looked_up_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there are too many of them. What a look-up returned may be written to."""
    monkeypatch.setattr(quantised_matrices, "_RECENT", 6)
    rows = rows_of("Q8_0", 150, 512)
    read: list[int] = []

    def convert(piece: torch.Tensor) -> QuantisedMatrix:
        read.append(len(piece))
        return from_gguf("Q8_0", piece)

    stored = StoredMatrix(rows, convert, lambda: None, torch.Size((150, 512)), torch.float32)
    whole = from_gguf("Q8_0", rows).dequantised()
    for ids, newly_read in (
        ([3, 9], [2]),
        ([9], []),
        ([9, 3, 9, 4], [1]),
        ([*range(20)], [20]),  # a long look-up is kept nowhere
        ([5, 6, 7, 8], [4]),  # too many with the earlier ones, which are forgotten
        ([5, 3], [1]),
    ):
        looked_up = stored[torch.tensor(ids)]
        assert torch.equal(looked_up, whole[ids]), ids
        assert read == newly_read, ids
        looked_up.zero_()
        read.clear()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16", "float32", "float16", "narrow"])
def test_products(kind: str) -> None:
    """Of rows of both dtypes, with bias and what is added, for outputs that fill no panel: the same whatever the rows
    beside, and the threads."""
    if dtype := WHOLE.get(kind):
        weights = irregular(75, 512, torch.bfloat16 if kind == "narrow" else dtype).to(dtype)
    else:
        weights = quantised(kind, 75, 512)
    assert native.takes(weights)
    whole = weights.float() if isinstance(weights, torch.Tensor) else weights.dequantised()
    x, bias = irregular(70, 512, torch.bfloat16), torch.randn(75)
    product, wide = Native(weights, bias), Native(weights, wide=True)
    found, wanted = wide(x, None), linear(x.float(), whole)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    for begin, end in ((0, 1), (3, 5), (4, 7), (8, 12), (12, 17), (14, 20), (7, 20), (1, 70)):
        assert torch.equal(wide(x[begin:end], None), found[begin:end])
    assert torch.equal(product(x, None), (found + bias).bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        y = irregular(70, 75, dtype)
        assert torch.equal(product(x, y), (found + bias + y).to(dtype))
    if native.keeps_float32() or WHOLE.get(kind, torch.bfloat16) != torch.bfloat16:
        full = irregular(3, 512, torch.float32)
        torch.testing.assert_close(
            wide(full, None), linear(full, whole), rtol=1e-5, atol=1e-5 * float(wanted.abs().max())
        )
    torch.set_num_threads(2)
    try:
        assert torch.equal(wide(x, None), found)
    finally:
        torch.set_num_threads(1)


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows as numbers of 8 bits times a scale for each 16."""
    groups = x.float().view(len(x), -1, 16)
    largest = groups.abs().amax(2, keepdim=True)
    # torch.div: `127 / largest` multiplies by a rounded reciprocal.
    steps = (groups * torch.div(torch.tensor(127.0), largest)).round()
    return (steps * (largest / 127)).nan_to_num(0.0).view(x.shape)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_products_of_rows_of_8_bits(kind: str) -> None:
    """By their definition, and the same whatever the rows beside; weights that are not for them take whole rows."""
    if kind == "bfloat16":
        weights = irregular(75, 512, torch.bfloat16)
        whole = weights.float()
    else:
        weights = quantised(kind, 75, 512)
        whole = weights.dequantised()
    x = irregular(70, 512, torch.bfloat16)
    x[:, 32:48] = 0
    x[3, 100] = torch.inf
    product = Native(weights, wide=True, rounds_rows=True)
    found = product(x)
    if not product.rounds_rows:
        assert torch.equal(found.nan_to_num(), Native(weights, wide=True)(x).nan_to_num())
        return
    order = slice(None) if weights.order is None else weights.order
    wanted = linear(rounded_rows(x[:, order]), whole[:, order])
    assert not found[3].isfinite().any()
    others = [row for row in range(70) if row != 3]
    torch.testing.assert_close(
        found[others], wanted[others], rtol=1e-4, atol=1e-4 * float(wanted[others].abs().max())
    )
    for begin, end in ((0, 1), (4, 6), (7, 20), (5, 70)):
        assert torch.equal(product(x[begin:end]), found[begin:end])


@pytest.mark.usefixtures("built")
def test_weights_that_rows_of_8_bits_are_for() -> None:
    kinds = [
        kind for kind in KINDS if Native(quantised(kind, 16, 512), rounds_rows=True).rounds_rows
    ]
    few_bits = {"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "zeros", "order", "int4"}
    if native.keeps_float32():
        few_bits |= {"MXFP4", "nvfp4"}  # whole numbers of 5 bits
    if Path(native._loaded()._name).name.startswith("_native."):  # without AVX2
        few_bits = set()
    assert {*kinds} == few_bits
    assert not Native(quantised("Q4_0", 16, 512)).rounds_rows


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("delay", [0, 200_000, 2_000_000])
def test_a_late_thread_changes_no_bit(delay: int) -> None:
    """Every other thread sleeps amid its pieces: the caller computes what is left, and takes pieces back.

    Products have different sizes.
    """
    products = [Native(quantised("Q4_K", outputs, 512), wide=True) for outputs in (16, 75, 2000)]
    x = irregular(70, 512, torch.bfloat16)
    wanted = [product(x, None) for product in products]
    library = native.library()
    assert library is not None
    library.pearl_delay(delay)
    try:
        for count in (2, 5, 1, 3):
            others = native.use_threads(count)
            assert len({*others}) == count - 1
            for _ in range(5):
                for product, result in zip(products, wanted, strict=True):
                    assert torch.equal(product(x, None), result)
    finally:
        library.pearl_delay(0)
        native.use_threads(1)


@pytest.mark.usefixtures("built")
def test_late_threads_change_no_bit_of_a_forward() -> None:
    """Layers add products to the hidden state in place, so a piece may not be added twice."""
    library = native.library()
    assert library is not None
    logits: list[list[torch.Tensor]] = []
    library.pearl_delay(200_000)
    try:
        for threads in (1, 2, 4):
            native.use_threads(threads)
            runner = CpuRunner(random_llama(128, torch.bfloat16), 128)
            logits.append([feed_chain(runner, [5] * rows, rows) for rows in (70, 1, 6, 1, 20)])
    finally:
        library.pearl_delay(0)
        native.use_threads(1)
    for late in logits[1:]:
        assert all(map(torch.equal, logits[0], late))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K"])
def test_products_of_rows_out_of_the_ordinary(kind: str) -> None:
    """Not finite: nor is any result. All zeros, very small and very large ones: as they are. The largest of a block is
    taken apart into bytes without one that overflows, whatever its rounding."""
    weights = quantised(kind, 32, 512)
    product, whole = Native(weights, wide=True), weights.dequantised()
    x = torch.zeros(40, 512)
    x[0, 77], x[1, 300] = torch.nan, -torch.inf
    assert not product(x[:2], None).isfinite().any()
    x = irregular(40, 512, torch.float32)
    for row, size in enumerate((0.0, 1e-20, 1e20)):
        x[row] *= size
    x = x.bfloat16()
    found, wanted = product(x, None), linear(x.float(), whole)
    bound = 1e-5 * wanted.abs().amax(1, keepdim=True)
    assert bool(((found - wanted).abs() <= bound.clamp_min(1e-28)).all())


def test_matrices_of_one_kind_are_one_and_others_side_by_side() -> None:
    q, k, v = quantised("Q4_K", 32, 512), quantised("Q4_K", 16, 512), quantised("Q6_K", 16, 512)
    assert are_alike(q, k)
    assert not are_alike(k, v)
    both = stacked([q, k])
    assert torch.equal(both.dequantised(), torch.cat([q.dequantised(), k.dequantised()]))
    modules = []
    for part in (q, k, v):
        modules.append(torch.nn.Module())
        modules[-1].weight, modules[-1].bias = part, torch.randn(len(part.steps))
    wanted = [
        (part.dequantised(), module.bias) for part, module in zip((q, k, v), modules, strict=True)
    ]
    x = irregular(3, 512, torch.bfloat16)
    found = linear_layers.matrix(*modules, dtype=torch.bfloat16, is_native=True, wide=True)(x)
    torch.testing.assert_close(
        found, torch.cat([linear(x.float(), *each) for each in wanted], 1), rtol=1e-4, atol=1e-3
    )
    for group in (16, 32):
        assert torch.equal(q.in_bytes(group).dequantised(), q.dequantised())


@pytest.mark.parametrize("inputs", [6, 9, 24])
def test_inputs_that_our_c_does_not_take_are_multiplied_by_torch(inputs: int) -> None:
    """Our C would read past each row."""
    torch.manual_seed(inputs)
    layer = torch.nn.Linear(inputs, 40, bias=False)
    x = torch.randn(3, inputs)
    wanted = layer(x).detach()
    found = linear_layers.matrix(layer, dtype=torch.float32, is_native=True)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("x", "weight"), list(itertools.product((torch.float32, torch.bfloat16), repeat=2))
)
def test_norms_and_gates(x: torch.dtype, weight: torch.dtype) -> None:
    """As in transformers, but for the order of sums; of gates whose exponentials no float holds too."""
    rows, weights = irregular(9, 72, x), irregular(1, 72, weight)[0]
    rows[0, :6] = torch.tensor([-120.0, -40.0, -12.0, 12.0, 40.0, 120.0])
    found = [
        native.normalise(rows, weights, 1e-5, dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    gates = [native.gated(rows, is_gelu) for is_gelu in (False, True)]
    full = rows.float() * (rows.float().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    for each in found:
        torch.testing.assert_close(
            each, ((full.to(x) if x == weight else full) * weights).to(each.dtype)
        )
    for each, activate in zip(
        gates, (silu, lambda gate: gelu(gate, approximate="tanh")), strict=True
    ):
        gate, up = rows.chunk(2, 1)
        torch.testing.assert_close(each, activate(gate) * up)


def test_a_build_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structures may be others: a call would end the process. Whoever changes the C raises both versions, and
    notes the digest of what has it now."""
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted((Path(native.__file__).parent / "c").iterdir()):
        digest.update(re.sub(r"//.*|\s", "", file.read_text()).encode())
    assert (native._VERSION, digest.hexdigest()) == (7, "88ec5a4d")
    monkeypatch.setattr(native, "_VERSION", 0)
    with pytest.raises(OSError, match="other sources"):
        native.load(BUILT[0])


def test_models_that_the_c_does_not_take() -> None:
    config = AutoModelForCausalLM.from_pretrained(tiny_model()).config.to_dict()
    assert native.takes_model(CPU, config)
    for wrong in (
        {"intermediate_size": 100},
        {"hidden_size": 36},
        {"num_attention_heads": 3, "head_dim": 12},
    ):
        assert not native.takes_model(CPU, {**config, **wrong})
        assert native.takes_model(torch.device("cuda"), {**config, **wrong})
    assert not native.takes_model(CPU, {**config, "num_attention_heads": 1024, "head_dim": 64})


TREE = (-1, 0, 0, 1, 1, 2, -1, 6)


@pytest.mark.parametrize(
    ("built", "dtype", "heads", "scored"),
    pairwise(
        BUILT,
        [torch.float32, torch.bfloat16],  # of cached keys and values
        [Heads(9, 3, 64), Heads(2, 2, 16), Heads(14, 2, 40)],
        [(0, 0.0, 0), (40, 0.0, 1), (0, 20.0, 0)],  # window, cap, sinks
    ),
    indirect=["built"],
)
def test_attention(
    built: None, dtype: torch.dtype, heads: Heads, scored: tuple[int, float, int]
) -> None:
    """By its definition, for chains and trees in two slots; each row has the bits that it has alone, and a tree's
    node those of its path."""
    window, cap, sinks = scored
    scoring = Scoring(
        (window,), heads.dim**-0.5, cap, (irregular(1, heads.query, torch.float32)[0],) * sinks
    )
    shape = (2, 1, heads.kv, 512, heads.dim)

    def slots(dtype: torch.dtype = dtype) -> Slots:
        made = Slots(shape, dtype, CPU)
        made.keys.copy_(irregular(2 * heads.kv, 512 * heads.dim, torch.float32).view(shape))
        made.values.copy_(made.keys.flip(-1))
        made.lengths = [137, 60]
        return made

    def states(rows: int) -> torch.Tensor:
        return irregular(40, (heads.query + 2 * heads.kv) * heads.dim, torch.float32)[:rows].view(
            rows, -1, heads.dim
        )

    def computed(feeds: list[Feed], given: torch.Tensor, held: Slots) -> torch.Tensor:
        layout = lay_out(feeds, held.lengths)
        attends = NativeAttention(
            layout.table,
            layout.end,
            any(feed.parents for feed in feeds),
            held,
            scoring,
            heads,
            1e-6,
        )
        return attends.attend_states(0, given, (None, None), None)

    feeds = [Feed([1] * 5, 1), Feed([1] * len(TREE), 1, 1, TREE)]
    n = 5 + len(TREE)
    found = computed(feeds, states(n), held := slots())
    other, rows = slots(), range(5, n)
    for feed, given, own in zip(
        feeds, states(n).split([5, len(TREE)]), found.split([5, len(TREE)]), strict=True
    ):
        queries, *new = given.split([heads.query, heads.kv, heads.kv], 1)
        length, parents = other.lengths[feed.slot], feed.parents or range(-1, 4)
        cached = (each[feed.slot, 0, :, :length] for each in (other.keys, other.values))
        keys, values = (
            torch.cat((old, each.transpose(0, 1)), 1) for old, each in zip(cached, new, strict=True)
        )
        at = torch.tensor([*range(length), *(length + depth for depth in depths(parents))])
        nodes = torch.tensor(
            [[node in path for node in range(len(given))] for path in paths(parents)]
        )
        sees = torch.cat((torch.ones(len(given), length), nodes), 1).bool()
        sees &= at > at[length:, None] - (window or 512)
        wanted = attended(queries, keys, values, sees, scoring.scale, cap, scoring.sinks_of(0))
        rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.01, 0.01)
        torch.testing.assert_close(own, wanted, rtol=rtol, atol=atol)
    for new, kept in zip(
        states(5).split([heads.query, heads.kv, heads.kv], 1)[1:],
        (other.keys, other.values),
        strict=True,
    ):
        kept[0, 0, :, 137:142] = new.transpose(0, 1)
    assert torch.equal(held.keys[0], other.keys[0]), "the chain is in its slot"
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        alone = computed(
            [Feed([1] * len(path), 1, 1)], states(n)[[rows[each] for each in path]], slots()
        )
        assert torch.equal(alone[-1], found[rows[node]])
    for row in range(5):
        held = slots()
        held.keys, held.values, held.lengths = other.keys, other.values, [137 + row, 60]
        assert torch.equal(computed([Feed([1], 1)], states(n)[row : row + 1], held)[0], found[row])


@pytest.mark.parametrize("rounding", ["", "int4"])
@pytest.mark.parametrize(
    "kind",
    [
        "llama-biased",
        "qwen3-short",
        "gemma3-short",
        "olmo2",
        "granite-scaled",
        "phi4-mini",
        "qwen3-moe",
    ],
)
def test_layers_in_one_call(kind: str, rounding: linear_layers.Rounding) -> None:
    """The bits of logits, features and later tokens are those of layer by layer, for chains and trees in two slots."""
    found: list[list[torch.Tensor]] = []
    for is_in_one_call in (True, False):
        model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.bfloat16)
        runner = CpuRunner(model, 64, slots=2, rounding=rounding, taps=(2, 0, 1))
        layers = runner.layers
        assert (layers.in_one_call is None) == (kind == "qwen3-moe")
        layers.in_one_call = layers.in_one_call if is_in_one_call else None
        kept = []
        for feeds in (
            [Feed([5, 6, 7, 8, 9], 5)],
            [Feed([7] * 8, 8, 0, TREE), Feed([9, 8, 7], 2, 1)],
        ):
            kept += [*runner.forward(feeds), layers.features]
        runner.keep([0, 2, 5])
        kept += [*runner.forward([Feed([3, 4], 2)]), layers.features]
        found.append([each.clone() for each in kept if each is not None])
    assert len(found[0]) == 7
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4", "nvfp4", "table"])
def test_weights_of_a_table_on_a_gpu(kind: str) -> None:
    """In bytes where the table has whole numbers, else dequantised; beside weights of another kind too."""
    one, other = quantised(kind, 64, 256), quantised("Q4_0", 64, 256)
    found = linear_layers.KernelMatrix.of(one, None, torch.float32)
    assert (found.scales is None) == (kind == "table")
    both = linear_layers.for_kernels([one, other], None, torch.float32)
    assert (both.scales is None) == (found.scales is None)
    weights = [each.dequantised() for each in (found, both)]
    torch.testing.assert_close(weights[0], one.dequantised())
    torch.testing.assert_close(weights[1], torch.cat((one.dequantised(), other.dequantised())))


@pytest.mark.parametrize("kind", ["mxfp8", "float8", "bytes with zeros", "order"])
def test_matrices_of_several_kinds_on_a_gpu(kind: str) -> None:
    """What is no whole number of 8 bits, or has its inputs in another order, is dequantised beside others."""
    one, other = quantised(kind, 64, 256), quantised("int8", 64, 256)
    both = linear_layers.for_kernels([one, other], None, torch.float32)
    assert (both.scales is None) == (kind != "bytes with zeros")
    weights = both.dequantised()
    torch.testing.assert_close(
        weights, torch.cat((one.dequantised(), other.dequantised())), equal_nan=True
    )
    alone = linear_layers.for_kernels([one], None, torch.float32)
    weights = alone.dequantised()
    torch.testing.assert_close(weights, one.dequantised(), equal_nan=True)
