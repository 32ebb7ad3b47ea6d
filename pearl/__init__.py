"""PEARL: parallel speculative decoding with a draft and a target model in two processes.

from pearl import Engine, SamplingParams

with Engine() as engine:  # target and draft are the small models that PEARL contains
    for piece in engine.stream("Explain gravity to a beginner.", SamplingParams(max_tokens=64)):
        print(piece.text, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pearl.version import __version__

if TYPE_CHECKING:
    from pearl.config import EngineConfig, RequestOptions, SamplingParams
    from pearl.engine import Engine
    from pearl.engine.asynchronous import AsyncEngine
    from pearl.engine.stream import Result

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineConfig",
    "RequestOptions",
    "Result",
    "SamplingParams",
    "__version__",
]

_ROOMS = {
    "AsyncEngine": "pearl.engine.asynchronous",
    "Engine": "pearl.engine",
    "EngineConfig": "pearl.config",
    "RequestOptions": "pearl.config",
    "Result": "pearl.engine.stream",
    "SamplingParams": "pearl.config",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use.

    So workers and `--help`, which need no engine, do not import it.
    """
    if name in _ROOMS:
        return getattr(import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'pearl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
