"""Our own forward on a CPU: loads the functions in C, and lays matrices out for them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pearl.models.cpu import huge_pages
from pearl.models.forward.quantised import (
    Embedding,
    QuantisedMatrix,
    StoredMatrix,
    Weights,
    panels,
)

log = logging.getLogger(__name__)

_VERSION = 7  # see `native.h`
_LEAST = 8  # the number of inputs is a multiple of this
_BLOCK = 32  # the number of inputs of quantised weights is a multiple of this: see `products.c`
# Values of `bits` that stand for other kinds of weights: see `products.c`.
_SMALL_TABLE = 7
_FLOAT8 = 9
_TABLE = 10
_WHOLE_TABLE = 11
_BYTES = (8, _FLOAT8)
_FIELDS = {"divisors": "of_scales"}  # tensors that have another name in C
_PIECE = 2048  # rows of a stored matrix that are laid out together: whole panels
ROWS_TOGETHER = 8  # rows whose scores a thread has room for: see `native.h`
# Limits of `native.h`: numbers in the queries of a row; query heads that share a key-value head.
_WIDEST = 16384
_MOST_TOGETHER = 64
BUILDS = (  # libraries in this folder: name, flags of /proc/cpuinfo that it needs
    ("_native_bf16", {"avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16"}),
    ("_native_vnni", {"avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
    ("_native_avxvnni", {"avx2", "fma", "f16c", "avx_vnni"}),
    ("_native_v3", {"avx2", "fma", "f16c"}),
    ("_native", set[str]()),
)
_DTYPES = (torch.float32, torch.bfloat16)  # dtypes of rows
_KINDS = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.float32: 4,
    torch.float8_e4m3fn: 5,
}
# Bits -> the kinds of scales that `products.c` takes: first if a group consists of whole blocks of
# inputs, then for other groups.
_WHOLE_BLOCKS = {
    4: (0, 1, 2),
    5: (0, 2),
    8: (0, 1, 4),
    _FLOAT8: (1, 4),
    _TABLE: (0, 1, 3, 4),
    _WHOLE_TABLE: (0, 1, 3),
    _SMALL_TABLE: (0, 1, 4),
}
_OTHER_GROUPS = {6: (3,), _TABLE: (5,), _SMALL_TABLE: (5,)}

# Arguments of the functions in C: pointers, ints, int64 numbers and floats.
_SIGNATURES = {
    "pearl_multiply": "ppipipinnpi",
    "pearl_layers": "p",
    "pearl_normalise": "pipifnnppi",
    "pearl_gate": "pnniip",
    "pearl_attend": "p",
    "pearl_helpers": "ip",
    "pearl_delay": "n",
    "pearl_pack": "pnniip",
    "pearl_rounds_rows": "p",
}

_threads = 0  # 0: as many as torch has


def fields_of(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields of a `ctypes.Structure`, all of type `kind`. Spaces separate the `names`."""
    return tuple((name, kind) for name in names.split())


class _Weights(ctypes.Structure):
    _fields_ = (
        fields_of(ctypes.c_int64, "outputs inputs bits group kind")
        + fields_of(ctypes.c_void_p, "steps scales of_scales least of_least zeros bias")
        + fields_of(ctypes.c_float, "offset")
        + fields_of(ctypes.c_void_p, "table")
        + fields_of(ctypes.c_int32, "rounds_rows")
    )


def flags() -> set[str]:
    """Return the processor's features as Linux names them; none on other systems."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return set()
    line = info.read_text().partition("\nflags")[2].partition("\n")[0]
    return set(line.split())


@cache
def library() -> ctypes.CDLL | None:
    """Load the library built for this processor; return None if there is none, or none loads."""
    available = flags()
    for name, needed in BUILDS:
        if not needed <= available:
            continue
        for file in sorted(Path(__file__).parent.glob(f"{name}.*so")):
            try:
                return load(file)
            except (OSError, AttributeError) as problem:
                log.warning("%s does not load: %s", file, problem)
    log.warning(
        "our products for this processor are not built: models run through transformers, slower and larger"
    )
    return None


def load(file: Path) -> ctypes.CDLL:
    opened = ctypes.CDLL(str(file))
    if opened.pearl_version() != _VERSION:  # raises AttributeError in builds without a version
        raise OSError("it was built from other sources: run scripts/setup, or install PEARL again")
    types = {
        "p": ctypes.c_void_p,
        "i": ctypes.c_int,
        "n": ctypes.c_int64,
        "f": ctypes.c_float,
    }
    for name, arguments in _SIGNATURES.items():
        getattr(opened, name).argtypes = [types[letter] for letter in arguments]
    return opened


def use_threads(count: int) -> list[int]:
    """Compute with `count` threads from now on, including this one; return the others' native ids.

    The other threads are our own, and sleep while there is nothing to compute. torch is set to a
    single thread, because several threads of torch would spin while they wait for each other.
    """
    global _threads
    torch.set_num_threads(1)
    _threads = count
    ids = (ctypes.c_int32 * count)()
    helpers = _loaded().pearl_helpers(count, ids)
    return list(ids)[:helpers]


def threads() -> int:
    """Return how many threads compute: the number set by `use_threads`, or else torch's number."""
    return _threads or torch.get_num_threads()


def keeps_float32() -> bool:
    """Return whether products use float32 rows as they are, not rounded to bfloat16."""
    loaded = library()
    return loaded is not None and not loaded.pearl_rounds()


def takes(weights: Weights) -> bool:
    """Return whether `Native` can multiply by these weights on this machine."""
    if library() is None or weights.device.type != "cpu":
        return False
    if isinstance(weights, QuantisedMatrix):
        bits, kind = _case(weights)
        kinds = _OTHER_GROUPS if weights.group % _BLOCK else _WHOLE_BLOCKS
        return kind in kinds.get(bits, ()) and weights.shape[1] % _BLOCK == 0
    return weights.is_floating_point() and takes_inputs(weights.shape[1])


def takes_inputs(count: int) -> bool:
    """Return whether `Native` can multiply by a matrix with `count` inputs.

    `count` must be a multiple of 8, because the C code reads inputs in groups of 8. With another
    `count`, it would read past the end of a row.
    """
    return count % _LEAST == 0


def _case(weights: QuantisedMatrix) -> tuple[int, int]:
    """Return (`bits`, `kind`) of the struct `Weights` in `native.h`, for these weights.

    `bits` is the number of bits of a step; for float8 weights and for weights with a table, it is a
    constant such as `_FLOAT8`. `kind` is the constant for the dtype of the scales.
    """
    kind = _KINDS[weights.scales.dtype]
    if weights.table is not None:
        if not weights.fits_bytes or not keeps_float32():
            return _TABLE, kind
        if weights.table.max() - weights.table.min() < 32:
            return _SMALL_TABLE, kind
        return _WHOLE_TABLE, kind
    if weights.steps.dtype == torch.float8_e4m3fn:
        return _FLOAT8, kind
    return weights.bits, kind


class Native:
    """Multiplies by a matrix with `products.c`.

    A call returns the product of x with the weights, plus y if y is given. The result is float32 if
    `wide`; otherwise it has the dtype of y, or that of x if there is no y.

    If the argument `rounds_rows` is true, x is rounded to 8 bits, with a scale for each 16 inputs.
    This is done only for weights of 4 to 6 bits, and only on a processor with AVX2.

    Args:
        weights: weights for which `takes` returns true.

    Attributes:
        scratch: size of the working memory that a product needs for each row, in floats.
        rounds_rows: whether rows really are rounded to 8 bits.
    """

    def __init__(
        self,
        weights: Weights | StoredMatrix,
        bias: torch.Tensor | None = None,
        wide: bool = False,
        rounds_rows: bool = False,
    ) -> None:
        outputs, inputs = weights.shape
        self.shape = torch.Size(weights.shape)
        self._wide = wide
        self._given = _Weights(
            outputs=outputs, inputs=inputs, bits=16, group=inputs, rounds_rows=rounds_rows
        )
        self._kept: dict[str, torch.Tensor] = {}
        self._order: torch.Tensor | None = None
        self._lanes = _loaded().pearl_lanes()
        if isinstance(weights, torch.Tensor):
            self._keep_plain(weights)
        elif isinstance(weights, QuantisedMatrix):
            self._keep_quantised([weights])
        else:
            self._keep_quantised(weights.pieces(_PIECE))
        if bias is not None:
            self._keep("bias", bias.float())
        self.scratch = 3 * inputs + inputs // self._given.group
        self._reference = ctypes.byref(self._given)
        self.rounds_rows = bool(_loaded().pearl_rounds_rows(self._reference))

    def _keep_plain(self, weights: torch.Tensor) -> None:
        together = 2
        if weights.dtype != torch.bfloat16:  # multiplied in float32
            narrow = weights.bfloat16()  # half the bytes for the same numbers
            if torch.equal(narrow.to(weights.dtype), weights):
                weights = narrow
            self._given.bits = 32
            self._given.kind = _KINDS[weights.dtype]
            together = 1
        steps = _grouped(panels(weights, self._lanes), together)
        self._keep("steps", huge_pages.copied(steps))

    def _keep_quantised(self, pieces: Iterable[QuantisedMatrix]) -> None:
        """Keep a matrix that comes in pieces of rows, cut into panels; see `panels`.

        The rows of each piece but the last one fill whole panels.
        """
        start = 0
        for piece in pieces:
            weights = piece
            if piece.bits == 8 and piece.zeros is not None:  # zeros of fewer bits are bytes
                weights = piece.in_bytes(piece.group)
            self._describe(weights)
            tensors = weights.of_rows()
            steps = panels(tensors.pop("steps"), self._lanes)
            stop = start + len(steps)
            self._lay_out_steps(steps, start, stop)
            for name, tensor in tensors.items():
                columns = panels(tensor, self._lanes).transpose(1, 2)
                room = self._room(_FIELDS.get(name, name), columns.shape[1:], columns.dtype)
                room[start:stop] = columns
            start = stop

    def _describe(self, weights: QuantisedMatrix) -> None:
        """Set the fields of the struct `Weights` that say how the weights are stored."""
        fields = self._given
        fields.bits, fields.kind = _case(weights)
        fields.group = weights.group
        fields.offset = weights.offset
        self._order = weights.order
        if weights.table is not None:
            fields.offset = 0
            if fields.bits == _SMALL_TABLE:
                fields.offset = -float(weights.table.min())
            self._keep("table", weights.table + fields.offset)

    def _lay_out_steps(self, steps: torch.Tensor, start: int, stop: int) -> None:
        """Write the steps [panels, lanes, in] of the panels from `start` to `stop` - 1.

        Steps of less than a byte are packed into words, as `pearl_pack` in `products.c` describes.
        """
        bits = self._given.bits
        count, lanes, inputs = steps.shape
        if bits in _BYTES:
            pairs = _grouped(steps, 2)
            self._room("steps", pairs.shape[1:], pairs.dtype)[start:stop] = pairs
            return
        step_bits = bits if bits < _SMALL_TABLE else 4
        room = self._room("steps", (inputs * step_bits // 32, lanes), torch.int32)
        steps = steps.contiguous()
        is_table = bits == _TABLE
        words = room[start:stop].data_ptr()
        _loaded().pearl_pack(steps.data_ptr(), count, inputs, step_bits, is_table, words)

    def _room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory [panels, *shape] of one of the tensors that C reads."""
        if name not in self._kept:
            count = -(-self.shape[0] // self._lanes)
            self._keep(name, huge_pages.empty((count, *shape), dtype))
        return self._kept[name]

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        self._kept[name] = tensor.contiguous()
        setattr(self._given, name, self._kept[name].data_ptr())

    @property
    def nbytes(self) -> int:
        """Number of bytes that a product reads."""
        return sum(tensor.nbytes for tensor in self._kept.values())

    @property
    def address(self) -> int | None:
        """Address of the matrix as a struct `Weights` of `native.h`.

        It is None if the struct does not describe the whole product, because inputs must be
        reordered or results are `wide`.
        """
        if self._order is None and not self._wide:
            return ctypes.addressof(self._given)
        return None

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        assert x.dtype in _DTYPES, x.dtype
        if self._order is not None:
            x = x[:, self._order]
        x = x.contiguous()
        dtype = x.dtype
        if y is not None:
            y = y.contiguous()
            dtype = y.dtype
        if self._wide:
            dtype = torch.float32
        rows = x.shape[0]
        out = torch.empty(rows, self.shape[0], dtype=dtype)
        room = torch.empty(rows * self.scratch)
        _loaded().pearl_multiply(
            self._reference,
            x.data_ptr(),
            x.dtype is torch.float32,
            address_of(y),
            y is not None and y.dtype is torch.float32,
            out.data_ptr(),
            dtype is torch.float32,
            self.shape[0],
            rows,
            room.data_ptr(),
            threads(),
        )
        return out


def _grouped(rows: torch.Tensor, together: int) -> torch.Tensor:
    """Reorder the numbers of panels, so that `together` inputs of each row are neighbours.

    [panels, lanes, in] -> [panels, in / together, lanes, together], where the lanes are the rows
    of a panel.
    """
    count, lanes, _ = rows.shape
    return rows.view(count, lanes, -1, together).transpose(1, 2)


def address_of(tensor: torch.Tensor | None) -> int | None:
    """Return a tensor's address; for None return None, which is C's null pointer."""
    if tensor is None:
        return None
    return tensor.data_ptr()


def give_back() -> None:
    """Return freed memory to the system.

    Laying weights out frees gigabytes, which the C library would otherwise keep for this process.
    """
    with suppress(AttributeError, OSError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None
    return loaded


def computes(*tensors: Embedding) -> bool:
    """Return whether `normalise`, `gated` and `attend` can compute with all of these tensors.

    Their devices and dtypes decide.
    """
    if library() is None:
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype in _DTYPES for tensor in tensors)


def takes_model(device: torch.device, config: Mapping[str, Any]) -> bool:
    """Return whether a model of these sizes can be computed on `device`.

    On a CPU our C must be built, and the model's heads and sizes must be within its limits. On a
    GPU Triton must be installed for our kernels.

    Args:
        config: the model's settings, as in config.json.
    """
    if device.type != "cpu":
        return find_spec("triton") is not None
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    sizes = [width, config["hidden_size"]]
    for name in ("intermediate_size", "moe_intermediate_size"):
        sizes.append(config.get(name) or 0)
    if library() is None or any(size % _LEAST for size in sizes):
        return False
    return width <= _WIDEST and heads // config["num_key_value_heads"] <= _MOST_TOGETHER


def normalise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `linear_layers.normalise` in C."""
    x = x.contiguous()
    weight = weight.contiguous()
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype)
    room = torch.empty(width)
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
    """Compute `linear_layers.gated` in C."""
    gate_up = gate_up.contiguous()
    rows = gate_up.shape[0]
    inner = gate_up.shape[1] // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype)
    is_wide = gate_up.dtype == torch.float32
    _loaded().pearl_gate(gate_up.data_ptr(), rows, inner, is_wide, is_gelu, out.data_ptr())
    return out


class Attention(ctypes.Structure):
    """The arguments of `attend`: see `attention.c`."""

    _fields_ = (
        fields_of(
            ctypes.c_int64,
            "rows heads kv_heads dim window norm_width slot_stride head_stride positions",
        )
        + fields_of(
            ctypes.c_void_p,
            "table states q_norm k_norm sinks cos sin keys values queries new_keys new_values"
            " scores out",
        )
        + fields_of(ctypes.c_float, "scale cap eps")
        + fields_of(ctypes.c_int32, "is_float32 norm_is_float32 cache_is_float32 threads")
    )


def attend(arguments: Attention) -> None:
    """Compute the attention of rows.

    The result, and the rows' keys and values, go to the addresses `out`, `new_keys` and
    `new_values` in the arguments. Keys and values of chains are also written to the cache.
    """
    _loaded().pearl_attend(ctypes.byref(arguments))


def compute_layers(forward: object) -> None:
    """Compute decoder layers. `forward` is a reference to a `Forward` of `layers.c`."""
    _loaded().pearl_layers(forward)
