"""PEARL: parallel speculative decoding. Two processes, one text.

from pearl import Engine, SamplingParams

with Engine() as engine:  # the embedded pair
    for piece in engine.stream("Explain gravity to a beginner.", SamplingParams(max_tokens=64)):
        print(piece.text, end="", flush=True)
"""

from typing import TYPE_CHECKING

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.version import __version__

if TYPE_CHECKING:
    from pearl.client.stream import Result
    from pearl.engine import Engine

__all__ = ["DecodingConfig", "Engine", "EngineConfig", "Result", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Engine and Result on first use: a worker, which imports this package too, has no use for them."""
    if name in ("Engine", "Result"):
        from pearl import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'pearl' has no attribute {name!r}")
