"""A copy with other fields, of a dataclass or of a record of the wire."""

import dataclasses
from typing import Any

import msgspec

from pearl.protocol.options import RequestOptions


def replace(value: Any, **changes: Any) -> Any:
    """`changes` may name fields of a message's options too; `decoding`: options whose sampling and ends stay."""
    if not isinstance(value, msgspec.Struct):
        return dataclasses.replace(value, **changes)
    if (decoding := changes.pop("decoding", None)) is not None:
        kept = {name: getattr(value.options, name) for name in ("sampling", "stops", "logprobs")}  # type: ignore[attr-defined]
        changes["options"] = decoding.changed(**kept)
    inner = {name: change for name, change in changes.items() if name not in value.__struct_fields__}
    if inner and not isinstance(value, RequestOptions):
        changes = {name: change for name, change in changes.items() if name not in inner}
        changes["options"] = replace(value.options, **inner)  # type: ignore[attr-defined]
    return msgspec.structs.replace(value, **changes)
