"""The library's interface: launches an engine's worker processes, and generates text with them."""

from pearl.cache import Progress
from pearl.engine.engine import Engine
from pearl.engine.stream import Piece, Result, Stream

__all__ = ["Engine", "Piece", "Progress", "Result", "Stream"]
