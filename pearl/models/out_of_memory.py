"""Recognises errors that mean "out of memory", and explains them to users."""

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from pearl.errors import OutOfMemory

_WORDS = re.compile(
    r"(?i)can't allocate memory|not enough memory|CUDA error: out of memory|CUDA driver error: out of memory"
    r"|cudaErrorMemoryAllocation|CU(BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_of_memory(error: BaseException) -> bool:
    """Return whether an error means "out of memory".

    torch raises `OutOfMemoryError` only from its caching GPU allocator. Host and pinned memory, workspaces of cuBLAS
    and cuDNN, and launches of CUDA graphs fail with a plain `RuntimeError`, recognised by its message.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return _WORDS.search(str(error)) is not None


def memory_errors(execute: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `execute` so that it raises `OutOfMemory` in place of errors that mean "out of memory"."""

    @wraps(execute)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return execute(*args, **kwargs)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_of_memory(error):
                raise
            cause = str(error).partition("\n")[0].rstrip(".") or "no memory is left"
            raise OutOfMemory(
                f"{cause}. Shorten the prompt, lower max_context, or take a smaller model."
            ) from error

    return wrapped
