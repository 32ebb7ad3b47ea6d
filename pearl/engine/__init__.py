"""The library's interface: launch an engine's workers and generate text with them."""

from pearl.cache import Progress
from pearl.engine.engine import Engine
from pearl.engine.stream import Piece, Result, Stream

__all__ = ["Engine", "Piece", "Progress", "Result", "Stream"]
