"""A copy with other fields, of a dataclass or of a record of the wire."""

import dataclasses
from typing import Any

import msgspec

from pearl.config import RequestOptions
from tests.options import drawing


def replace(value: Any, **changes: Any) -> Any:
    """Return a copy with these fields.

    `changes` may name fields of a message's options too. `sampling`: options that draw tokens as the copy is to;
    `decoding`: options that decode as the copy is to, while drawing, stop strings and log probabilities stay.
    """
    if not isinstance(value, msgspec.Struct):
        return dataclasses.replace(value, **changes)
    if (sampling := changes.pop("sampling", None)) is not None:
        changes |= drawing(sampling)
    if (decoding := changes.pop("decoding", None)) is not None:
        kept = {name: getattr(value.options, name) for name in ("stop", "logprobs")}  # type: ignore[attr-defined]
        changes["options"] = decoding.changed(**kept, **drawing(value.options))  # type: ignore[attr-defined]
    inner = {
        name: change for name, change in changes.items() if name not in value.__struct_fields__
    }
    if inner and not isinstance(value, RequestOptions):
        changes = {name: change for name, change in changes.items() if name not in inner}
        changes["options"] = replace(value.options, **inner)  # type: ignore[attr-defined]
    return msgspec.structs.replace(value, **changes)
