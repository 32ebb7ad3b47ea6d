"""What `model.generate(custom_generate=...)` of transformers loads: PEARL's decoding of the models it is given."""

from typing import Any

from pearl.engine import custom_generate


def generate(model: Any, **arguments: Any) -> Any:
    """See `pearl.engine.custom_generate.generate`."""
    return custom_generate.generate(model, **arguments)
