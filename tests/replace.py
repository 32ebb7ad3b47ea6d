"""Copies a dataclass or a message with some fields changed."""

import dataclasses
from typing import Any

import msgspec

from pearl.config import RequestOptions
from tests.options import drawing


def replace(value: Any, **changes: Any) -> Any:
    """Return a copy with these fields changed.

    `changes` may also name fields of a message's options. `sampling`: options from which the
    settings for drawing tokens are taken. `decoding`: options from which all other settings are
    taken, except stop strings and log probabilities.
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
