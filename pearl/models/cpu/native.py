"""Our own forward on a CPU: the functions in C, and matrices laid out for them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pearl.models.forward.quantised import QuantisedMatrix, Weights, panels

log = logging.getLogger(__name__)

_VERSION = 3  # see `native.h`
_LANES = 16  # outputs of a panel
_LEAST = 8  # inputs are a multiple of this
_BLOCK = 32  # and those of quantised weights of this: see `products.c`
_SMALL_TABLE, _FLOAT8, _TABLE, _WHOLE_TABLE = 7, 9, 10, 11  # in place of bits: see `products.c`
_WIDEST, _MOST_TOGETHER = (
    16384,
    64,
)  # see `native.h`: numbers of a row's queries; query heads of a key-value head
_BUILT = (  # in this folder: name, flags of /proc/cpuinfo that it takes
    ("_native_bf16", {"avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
    ("_native_vnni", {"avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
    ("_native_avxvnni", {"avx2", "fma", "f16c", "avx_vnni"}),
    ("_native_v3", {"avx2", "fma", "f16c"}),
    ("_native", set[str]()),
)
_DTYPES = (torch.float32, torch.bfloat16)  # of rows
_KINDS = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.float32: 4,
    torch.float8_e4m3fn: 5,
}
_CASES = {  # bits, kind of scales, whether groups are whole blocks
    *((4, kind, True) for kind in (0, 1, 2)),
    *((5, kind, True) for kind in (0, 2)),
    (6, 3, False),
    *((8, kind, True) for kind in (0, 1, 4)),
    *((_FLOAT8, kind, True) for kind in (1, 4)),
    *((bits, 5, False) for bits in (_TABLE, _SMALL_TABLE)),
    *((_TABLE, kind, True) for kind in (0, 1, 3, 4)),
    *((_WHOLE_TABLE, kind, True) for kind in (0, 1, 3)),
    *((_SMALL_TABLE, kind, True) for kind in (0, 1, 4)),
}

_threads = 0  # 0: as many as torch has


class _Weights(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits", "group", "kind")),
        *(
            (name, ctypes.c_void_p)
            for name in ("steps", "scales", "of_scales", "least", "of_least", "zeros")
        ),
        ("bias", ctypes.c_void_p),
        ("offset", ctypes.c_float),
        ("table", ctypes.c_void_p),
    )


def flags() -> set[str]:
    """What this processor has, as Linux names it."""
    info = Path("/proc/cpuinfo")
    return (
        set(info.read_text().partition("\nflags")[2].partition("\n")[0].split())
        if info.exists()
        else set()
    )


@cache
def library() -> ctypes.CDLL | None:
    """The functions built for this processor; None where they were not built."""
    has = flags()
    for name, needed in _BUILT:
        for file in sorted(Path(__file__).parent.glob(f"{name}.*so")) if needed <= has else ():
            try:
                return _opened(file)
            except (OSError, AttributeError) as problem:
                log.warning("%s does not load: %s", file, problem)
    log.warning(
        "our products for this processor are not built: models run through transformers, slower and larger"
    )
    return None


def _opened(file: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(file))
    if opened.pearl_version() != _VERSION:  # AttributeError: built from sources that had none yet
        raise OSError("it was built from other sources: run scripts/setup, or install PEARL again")
    pointer, flag, count, number = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    opened.pearl_multiply.argtypes = (
        pointer,
        pointer,
        flag,
        pointer,
        flag,
        pointer,
        flag,
        count,
        count,
        pointer,
        flag,
    )
    opened.pearl_layers.argtypes = (pointer,)
    opened.pearl_normalise.argtypes = (
        pointer,
        flag,
        pointer,
        flag,
        number,
        count,
        count,
        pointer,
        pointer,
        flag,
    )
    opened.pearl_gate.argtypes = (pointer, count, count, flag, flag, pointer)
    opened.pearl_attend.argtypes = (pointer,)
    opened.pearl_helpers.argtypes = (flag, pointer)
    opened.pearl_delay.argtypes = (count,)
    opened.pearl_pack.argtypes = (pointer, count, count, flag, flag, pointer)
    return opened


def use_threads(count: int) -> list[int]:
    """Compute with `count` threads from now on, the calling one among them; return the native ids of the others.

    They are our own, asleep while there is nothing to compute, and torch gets none: its threads spin for each other.
    """
    global _threads
    torch.set_num_threads(1)
    _threads = count
    ids = (ctypes.c_int32 * count)()
    helpers = _loaded().pearl_helpers(count, ids)
    return list(ids)[:helpers]


def threads() -> int:
    """How many threads compute: as `use_threads` had it last, else as many as torch has."""
    return _threads or torch.get_num_threads()


def keeps_float32() -> bool:
    """Whether rows of float32 keep 24 bits in products, and are not rounded to bfloat16."""
    loaded = library()
    return loaded is not None and not loaded.pearl_rounds()


def takes(weights: Weights) -> bool:
    """Whether `Native` multiplies by these weights here."""
    if library() is None or weights.device.type != "cpu":
        return False
    if isinstance(weights, QuantisedMatrix):
        return _case(weights) in _CASES and weights.shape[1] % _BLOCK == 0
    return weights.is_floating_point() and weights.shape[1] % _LEAST == 0


def _case(weights: QuantisedMatrix) -> tuple[int, int, bool]:
    bits = _FLOAT8 if weights.steps.dtype == torch.float8_e4m3fn else weights.bits
    if weights.table is not None:
        span = weights.table.max() - weights.table.min()
        bits = (
            _TABLE
            if not (weights.fits_bytes and keeps_float32())
            else _SMALL_TABLE
            if span < 32
            else _WHOLE_TABLE
        )
    return bits, _KINDS[weights.scales.dtype], weights.group % _BLOCK == 0


class Native:
    """A matrix whose products `products.c` computes. `wide`: results are float32, else of the dtype of x.

    Results that are added to y have the dtype of y. Takes over what `takes` allows.

    Attributes:
        scratch: floats that a product takes for each row.
    """

    def __init__(
        self, weights: Weights, bias: torch.Tensor | None = None, wide: bool = False
    ) -> None:
        self._wide, self.shape = wide, torch.Size(weights.shape)
        outputs, inputs = weights.shape
        self._given = given = _Weights(outputs=outputs, inputs=inputs, bits=16, group=inputs)
        self._kept: list[torch.Tensor] = []
        self._order = None
        if isinstance(weights, QuantisedMatrix):
            if weights.bits == 8 and weights.zeros is not None:  # those of fewer bits are bytes
                weights = weights.in_bytes(weights.group)
            given.bits, given.kind, _ = _case(weights)
            given.group, given.offset, self._order = weights.group, weights.offset, weights.order
            for name in ("scales", "of_scales", "least", "of_least", "zeros"):
                if (found := getattr(weights, name)) is not None:
                    self._keep(name, panels(found, _LANES).transpose(1, 2))
            if weights.divisors is not None:
                self._keep("of_scales", panels(weights.divisors, _LANES).transpose(1, 2))
            if weights.table is not None:
                given.offset = -float(weights.table.min()) if given.bits == _SMALL_TABLE else 0
                self._keep("table", weights.table + given.offset)
            weights = weights.steps
        elif weights.dtype != torch.bfloat16:  # multiplied in float32
            narrow = weights.bfloat16()  # half the bytes for the same numbers
            weights = narrow if torch.equal(narrow.to(weights.dtype), weights) else weights
            given.bits, given.kind = 32, _KINDS[weights.dtype]
        rows = panels(weights, _LANES)
        if given.bits < 8 or given.bits in (_TABLE, _WHOLE_TABLE):
            self._keep(
                "steps",
                _words(rows, given.bits if given.bits < _SMALL_TABLE else 4, given.bits == _TABLE),
            )
        else:
            together = 1 if given.bits == 32 else 2
            self._keep("steps", rows.view(len(rows), _LANES, -1, together).transpose(1, 2))
        if bias is not None:
            self._keep("bias", bias.float())
        self.scratch = 3 * inputs + inputs // given.group
        self._at = ctypes.byref(given)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._kept.append(tensor.contiguous())
        setattr(self._given, name, self._kept[-1].data_ptr())

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(tensor.nbytes for tensor in self._kept)

    @property
    def address(self) -> int | None:
        """Of the `Weights` of `native.h`; None where their inputs have another order, or results another dtype."""
        return ctypes.addressof(self._given) if self._order is None and not self._wide else None

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert x.dtype in _DTYPES, x.dtype
        x = (x if self._order is None else x[:, self._order]).contiguous()
        y = y if y is None else y.contiguous()
        dtype = torch.float32 if self._wide else x.dtype if y is None else y.dtype
        rows = x.shape[0]
        out, room = torch.empty(rows, self.shape[0], dtype=dtype), torch.empty(rows * self.scratch)
        _loaded().pearl_multiply(
            self._at,
            x.data_ptr(),
            x.dtype is torch.float32,
            None if y is None else y.data_ptr(),
            y is not None and y.dtype is torch.float32,
            out.data_ptr(),
            dtype is torch.float32,
            self.shape[0],
            rows,
            room.data_ptr(),
            threads(),
        )
        return out


def _words(steps: torch.Tensor, bits: int, is_table: bool) -> torch.Tensor:
    """Panels of steps [panels, 16, in], those of several inputs in a word: see `pearl_pack`."""
    many, lanes, inputs = steps.shape
    words = torch.empty(many, inputs * bits // 32, lanes, dtype=torch.int32)
    _loaded().pearl_pack(
        steps.contiguous().data_ptr(), many, inputs, bits, is_table, words.data_ptr()
    )
    return words


def give_back() -> None:
    """Free memory to the system, which the C library would keep for later: laying weights out leaves gigabytes."""
    with suppress(AttributeError, OSError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None
    return loaded


def computes(*tensors: torch.Tensor) -> bool:
    """Whether `normalise`, `gated` and `attend` take tensors like these."""
    return library() is not None and all(each.is_cpu and each.dtype in _DTYPES for each in tensors)


def takes_model(device: torch.device, config: Mapping[str, Any]) -> bool:
    """Whether a model can be computed there: on a CPU by our C, if it is built and has room for its heads and sizes."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    inner = [config.get(name) or 0 for name in ("intermediate_size", "moe_intermediate_size")]
    has_room = width <= _WIDEST and heads // kv_heads <= _MOST_TOGETHER
    is_even = not any(size % _LEAST for size in (width, config["hidden_size"], *inner))
    return device.type != "cpu" or (library() is not None and has_room and is_even)


def normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """See `matrices.normalise`."""
    x, weight, width = x.contiguous(), weight.contiguous(), x.shape[-1]
    out, room = torch.empty(x.shape, dtype=dtype), torch.empty(width)
    _loaded().pearl_normalise(
        x.data_ptr(),
        x.dtype is torch.float32,
        weight.data_ptr(),
        weight.dtype is torch.float32,
        eps,
        x.numel() // width,
        width,
        room.data_ptr(),
        out.data_ptr(),
        dtype is torch.float32,
    )
    return out


def gated(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    """See `matrices.gated`."""
    gate_up = gate_up.contiguous()
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    is_wide = gate_up.dtype == torch.float32
    _loaded().pearl_gate(gate_up.data_ptr(), rows, inner, is_wide, is_gelu, out.data_ptr())
    return out


class Attention(ctypes.Structure):
    """See `attention.c`."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "heads", "kv_heads", "dim", "window", "norm_width")
        ),
        *((name, ctypes.c_int64) for name in ("slot_stride", "head_stride", "positions")),
        *(
            (name, ctypes.c_void_p)
            for name in ("table", "states", "q_norm", "k_norm", "sinks", "cos", "sin")
        ),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *(
            (name, ctypes.c_void_p)
            for name in ("queries", "new_keys", "new_values", "scores", "out")
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap", "eps")),
        *(
            (name, ctypes.c_int32)
            for name in ("is_float32", "norm_is_float32", "cache_is_float32", "threads")
        ),
    )


def attend(given: Attention) -> None:
    """Fills `out`, `new_keys` and `new_values`, and the cached positions of chains."""
    _loaded().pearl_attend(ctypes.byref(given))


def compute_layers(given: object) -> None:
    """See `layers.c`. `given`: a reference to its `Forward`."""
    _loaded().pearl_layers(given)
