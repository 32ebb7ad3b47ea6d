"""Makes Triton's interpreter faster in the process that imports this module.

The interpreter repeats work that is needed once. Here that work is done once or not at all:

- At every call of a function it puts its own functions into Triton's language, and after every
  launch it takes them out.
- It reaches each of these functions through two more calls.
- It computes the types of each operation, even if both operands have the same type.
- It makes a block of each constant that meets a block.
- It computes whether a sum overflows, which only its debugging mode needs.
- It checks the size of each number that it makes.
- At every launch it reads the kernel's signature again, and copies tensors to the host, where our
  tensors are already.

The functions replaced below are Triton's own. If a version of Triton lacks one of them, the tests
only take longer.
"""

from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy
import triton.language.core as language
from triton.language import semantic
from triton.runtime import interpreter


class BlockShape(NamedTuple):
    """What Triton derives from the sizes of a block.

    Attributes:
        sizes: the sizes as integers, for the block's type.
        constants: the sizes as Triton's constants, for tensors of this shape.
        count: the product of the sizes.
        constant_count: the product as Triton's constant.
    """

    sizes: Any
    constants: Any
    count: int
    constant_count: Any


_SHAPES: dict[int, BlockShape] = {}  # by `id` of their sizes


@cache
def block_shape(sizes: tuple[int, ...]) -> BlockShape:
    block = object.__new__(language.block_type)
    init_block_type(block, language.float32, list(sizes))
    tensor = object.__new__(language.tensor)
    init_tensor(tensor, None, block)
    shape = BlockShape(block.shape, tensor.shape, block.numel, tensor.numel)
    _SHAPES[id(shape.sizes)] = shape
    return shape


def init_block_type_fast(block: Any, element: Any, shape: Any) -> None:
    block_of_shape = _SHAPES.get(id(shape))
    if block_of_shape is None:
        sizes = [size.value if isinstance(size, language.constexpr) else size for size in shape]
        block_of_shape = block_shape(tuple(sizes))
    block.element_ty = element
    block.shape = block_of_shape.sizes
    block.numel = block_of_shape.count
    block.name = f"<{id(block.shape)}, {element.name}>"


def init_tensor_fast(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle = handle
    tensor.type = kind
    if kind.is_block():
        block = _SHAPES[id(kind.shape)]
        tensor.shape = block.constants
        tensor.numel = block.constant_count
        tensor.dtype = kind.element_ty
    else:
        tensor.shape = ()
        tensor.numel = ONE
        tensor.dtype = kind


def init_handle_fast(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    handle.data = data
    handle.dtype = dtype
    handle.attr = attr or {}


def broadcast_fast(types: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Return two tensors in a common shape. For two blocks, NumPy broadcasts as Triton does."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if not (lhs.shape and rhs.shape):  # a scalar
        return broadcast(types, lhs, rhs)  # type: ignore[no-any-return]
    sizes = broadcast_sizes(lhs.handle.data.shape, rhs.handle.data.shape)
    return broadcast_to(lhs, sizes), broadcast_to(rhs, sizes)


@cache
def broadcast_sizes(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Any:
    return block_shape(numpy.broadcast_shapes(lhs, rhs)).sizes


def broadcast_to(tensor: Any, sizes: Any) -> Any:
    if tensor.type.shape is sizes:
        return tensor
    data = numpy.broadcast_to(tensor.handle.data, sizes.values)
    handle = interpreter.TensorHandle(data, tensor.dtype.scalar)
    return language.tensor(handle, language.block_type(tensor.dtype, sizes))


def dtypes_by_name(find: Any) -> Any:
    """Return a version of `find` that remembers its results.

    `find`: returns NumPy's type for a type of Triton.
    """
    dtypes: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    return remembered


def put_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Put a function of Triton's language in its place, without its wrapper."""
    function = getattr(member, "__wrapped__", member)
    ours = interpreter.interpreter_semantic

    def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
        return function(*args, _semantic=ours, **options)

    scope.set_attr(owner, name, call)


NUMBERS = {"fp32", "int32", "int64", "int1"}  # two operands of one of these types are not converted
CONSTANTS: dict[tuple[object, ...], Any] = {}


def operands_fast(types: Any, lhs: Any, rhs: Any, *checks: Any, **more: Any) -> Any:
    """Return both in one type and shape. A constant is made once for each type, and never written to."""
    if type(lhs) is type(rhs) is language.tensor:
        if (
            lhs.dtype is rhs.dtype
            and lhs.shape is rhs.shape  # of `block_shape`
            and lhs.dtype.name in NUMBERS
        ):
            return lhs, rhs
    elif takes_constant(lhs, rhs):
        key = (lhs.type.name, repr(rhs), checks, *more.values())
        if key not in CONSTANTS:
            CONSTANTS[key] = operands(types, lhs, rhs, *checks, **more)[1]
        return lhs, CONSTANTS[key]
    elif takes_constant(rhs, lhs):
        key = (repr(lhs), rhs.type.name, checks, *more.values())
        if key not in CONSTANTS:
            CONSTANTS[key] = operands(types, lhs, rhs, *checks, **more)[0]
        return CONSTANTS[key], rhs
    return operands(types, lhs, rhs, *checks, **more)


def takes_constant(tensor: Any, value: Any) -> bool:
    """Return whether a constant gets the tensor's type, so that the tensor stays as it is."""
    if type(tensor) is not language.tensor:
        return False
    if type(value) is int:
        return tensor.dtype.name in ("fp32", "int32", "int64") and abs(value) < 1 << 31
    return type(value) is float and tensor.dtype.name == "fp32"


def unwrap_fast(value: Any) -> Any:
    if type(value) is language.constexpr:
        return value.value
    if type(value) in PLAIN:
        return value
    return unwrap(value)


@cache
def executor_of(kernel: Any) -> Any:
    return interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, None, kernel.pre_run_hooks)


def run_fast(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    if not warmup:
        executor = executor_of(kernel)
        executor.grid = grid
        executor(*args, **options)


ONE = language.constexpr(1)
PLAIN = {language.tensor, int, float, bool, str, type(None)}
unwrap = language._unwrap_if_constexpr
init_block_type = language.block_type.__init__
init_tensor = language.tensor.__init__
operands = semantic.TritonSemantic.binary_op_type_checking_impl
broadcast = semantic.TritonSemantic.broadcast_impl_value
with suppress(AttributeError):
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._patch_attr = put_builtin
    interpreter._get_np_dtype = dtypes_by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = init_handle_fast
    interpreter.GridExecutor._init_args_hst = lambda executor, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda executor, *arguments: None
    interpreter.InterpretedFunction.run = run_fast
    language.block_type.__init__ = init_block_type_fast
    language.tensor.__init__ = init_tensor_fast
    language._unwrap_if_constexpr = unwrap_fast
    semantic.TritonSemantic.binary_op_type_checking_impl = operands_fast
    semantic.TritonSemantic.broadcast_impl_value = broadcast_fast
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
