"""What `model.generate(custom_generate=...)` of transformers loads."""

from pearl.engine.custom_generate import generate

__all__ = ["generate"]
