"""Makes Triton's interpreter faster in the process that imports this module.

At every call of a function the interpreter puts its own functions into Triton's language, and after every launch it
takes them out: once is enough. It computes the types of each operation anew. It computes whether a sum overflows, and
asks only in a mode for debugging. These names are Triton's own: without one of them the tests take longer.
"""

from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import triton.language.core as language
from triton.runtime import interpreter


class BlockShape(NamedTuple):
    """What Triton derives from the sizes of a block.

    Attributes:
        sizes: the integers, for its type.
        constants: the same as Triton's constants, for its tensors.
        count: their product.
    """

    sizes: Any
    constants: Any
    count: int


@cache
def block_shape(sizes: tuple[int, ...]) -> BlockShape:
    block = object.__new__(language.block_type)
    init_block_type(block, language.float32, list(sizes))
    tensor = object.__new__(language.tensor)
    init_tensor(tensor, None, block)
    return BlockShape(block.shape, tensor.shape, block.numel)


def init_block_type_fast(block: Any, element: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, language.constexpr) else size for size in shape]
    block_of_shape = block_shape(tuple(sizes))
    block.element_ty = element
    block.shape = block_of_shape.sizes
    block.numel = block_of_shape.count
    block.name = f"<{block.shape}, {element}>"


def init_tensor_fast(tensor: Any, handle: Any, kind: Any) -> None:
    if not kind.is_block():
        init_tensor(tensor, handle, kind)
        return
    block = block_shape(tuple(kind.shape))
    tensor.handle = handle
    tensor.shape = block.constants
    tensor.numel = language.constexpr(block.count)
    tensor.type = kind
    tensor.dtype = kind.scalar


def dtypes_by_name(find: Any) -> Any:
    """Return `find`, from Triton's types to NumPy's, with a memory."""
    dtypes: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    return remembered


init_block_type = language.block_type.__init__
init_tensor = language.tensor.__init__
with suppress(AttributeError):
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._get_np_dtype = dtypes_by_name(interpreter._get_np_dtype)
    language.block_type.__init__ = init_block_type_fast
    language.tensor.__init__ = init_tensor_fast
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
