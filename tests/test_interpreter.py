"""Where Triton's interpreter computes otherwise than a GPU, so that our kernels' tests mind it and notice its end.

It keeps bfloat16 as 16-bit integers. A cast from float32 drops the lower bits, where a GPU rounds to the nearest, and
arithmetic and products take the bits for numbers. So the tests of whole forwards compute in float32, and the two
kernels here, which compute in float32 and round to bfloat16, have a cast that rounds.
"""

from typing import Any

import pytest
import torch

from tests.kernels import ROWS  # skips where there is no Triton, or a GPU

import triton  # isort: skip
import triton.language as tl  # isort: skip
from triton.runtime import interpreter  # isort: skip

from pearl.models.gpu import product_kernels

WIDTH = 32


@triton.jit
def cast(x, plain, nearest, half, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    numbers = tl.load(x + at)
    tl.store(plain + at, numbers.to(tl.bfloat16))
    tl.store(nearest + at, numbers.to(tl.bfloat16, fp_downcast_rounding="rtne"))
    tl.store(half + at, numbers.to(tl.float16))


@triton.jit
def multiply(x, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    block = tl.load(x + at)
    tl.store(out + at, tl.dot(block, block))


def random_numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def truncated(numbers: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of float32."""
    return (numbers.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def test_the_interpreter_drops_bits_where_a_gpu_rounds_to_bfloat16() -> None:
    """Even where rounding is asked for by name; float16 is rounded. If this fails: give up `rounding_casts`."""
    numbers = random_numbers(64)
    plain, nearest = torch.zeros(2, 64, dtype=torch.bfloat16)
    half = torch.zeros(64, dtype=torch.float16)
    cast[(1,)](numbers, plain, nearest, half, 64)
    assert not torch.equal(truncated(numbers), numbers.bfloat16())
    assert torch.equal(plain, truncated(numbers))
    assert torch.equal(nearest, truncated(numbers))
    assert torch.equal(half, numbers.half())


def test_the_interpreter_multiplies_the_bits_of_bfloat16() -> None:
    """Therefore whole forwards are tested in float32. If this fails: test some in bfloat16 too."""
    block = random_numbers(16, 16).bfloat16()
    out = torch.zeros(16, 16)
    multiply[(1,)](block, out, 16)
    assert (out - block.float() @ block.float()).abs().max() > 1e6


@pytest.fixture
def rounding_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's casts round to bfloat16 as a GPU's do."""
    original = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.uint16)
            return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)
        return original(builder, source, kind)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)


@pytest.mark.usefixtures("rounding_casts")
def test_embeddings_are_rounded_as_torch_rounds_them() -> None:
    embedding = random_numbers(90, WIDTH).bfloat16()
    ids = torch.arange(ROWS) * 5
    table = torch.cat((torch.ones(1, dtype=torch.long), ids))
    x, squares = torch.zeros(ROWS, WIDTH).bfloat16(), torch.zeros(WIDTH // 16, ROWS)
    sizes = {"H": WIDTH, "BN": 16, "ROWS": ROWS}
    product_kernels.embed[(WIDTH // 16,)](
        table, embedding, x, squares, 3.3, OVERLAPS=False, **sizes
    )
    assert torch.equal(x, (embedding[ids].float() * torch.tensor(3.3)).bfloat16())


@pytest.mark.usefixtures("rounding_casts")
@pytest.mark.parametrize("norms", [False, True])
def test_a_residual_is_rounded_as_torch_rounds_it(norms: bool) -> None:
    """After the norm, after its weights, and after the sum."""
    x, part = random_numbers(2, ROWS, WIDTH).bfloat16()
    norm = random_numbers(WIDTH).bfloat16()
    part_squares = part.float().view(ROWS, -1, 16).square().sum(2).T.contiguous()
    squares = torch.zeros(WIDTH // 16, ROWS)
    added = part
    if norms:
        scale = 1 / torch.sqrt(part_squares.sum(0) / WIDTH + 1e-5)
        added = (part.float() * scale[:, None]).bfloat16()
        added = (added.float() * norm.float()).bfloat16()
    expected = (x.float() + added.float() * 0.5).bfloat16()
    sizes = {"H": WIDTH, "BN": 16, "ROWS": ROWS}
    options = {"NORMS": norms, "OVERLAPS": False}
    product_kernels.add[(WIDTH // 16,)](
        x, part, part_squares, norm, squares, 0.5, 1e-5, **sizes, **options
    )
    assert torch.equal(x, expected)
    torch.testing.assert_close(squares, expected.float().view(ROWS, -1, 16).square().sum(2).T)
