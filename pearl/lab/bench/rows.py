"""The rows of a benchmark: decoding settings, built in or named in a line as for `pearl bench`; their devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pearl.config import EngineConfig, RequestOptions
from pearl.config.options import options_of
from pearl.device import Device
from pearl.errors import ConfigError
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.spec.methods import AS_PUBLISHED, METHODS
from pearl.worker.placement import settled

AR, SD, SSD, PEARL, NGRAM, HEAD, AUTO = "ar", "sd", "ssd", "pearl", "ngram", "head", "auto"
PUBLISHED, FIXED = "published", "published,window=fixed"
PAIR, ALL = "pair", "all devices"  # systems
AR_ON_ALL, NGRAM_ON_ALL = f"{AR}, {ALL}", f"{NGRAM}, {ALL}"
CALIBRATED = (
    AR,
    NGRAM,
    HEAD,
    SD,
    SSD,
    PEARL,
    AUTO,
    AR_ON_ALL,
    NGRAM_ON_ALL,
)  # by `pearl calibrate`


@dataclass(frozen=True)
class Row:
    """One row of a benchmark.

    Attributes:
        options: those in which it differs from the plan's.
        base: name of the row that its speedup is over.
        system: name of the engine that decodes it.
    """

    name: str
    options: RequestOptions = field(default_factory=RequestOptions)
    base: str = AR
    system: str = PAIR


def devices_of(config: EngineConfig) -> tuple[Device, Device]:
    """(device of the target, device of both together), as the workers resolve them."""
    target = settled(config, "target")
    return target, target | settled(config, "draft") if config.has_draft else target


def device_of_row(row: Row, config: EngineConfig) -> Device:
    return devices_of(config)[row.system == ALL or METHODS[row.options.method].drafts]


def rows_for(config: EngineConfig, rule: str = "ratio") -> list[Row]:
    """All rows that this pair can have.

    `ar` and `ngram` run on the target's devices; second rows run on all cores of the pair, if those are more; over more
    GPUs a target is spread layer by layer, which is no faster.
    """
    names = [AR, SD, SSD, "pearl-no-pre-verify", "pearl-no-post-verify", FIXED, PUBLISHED, NGRAM]
    names += [HEAD, PEARL] if config.head is not None else [PEARL]
    rows = [Row(name, parse_settings(f"{name},rule={rule}")) for name in names]
    rows.append(
        Row(AUTO, parse_settings(AUTO))
    )  # it picks the rule under which its choices change no text
    target, both = devices_of(config)
    if both != target and not both.gpus and not is_emulated(config):
        rows += [
            Row(f"{name}, {ALL}", RequestOptions(method=name), system=ALL) for name in (AR, NGRAM)
        ]
    return rows


def named_rows(names: Iterable[str], known: Iterable[Row] = ()) -> list[Row]:
    """`ar`, and a row for each of `names`: a known one, else as `parse_settings`; on all devices if there are more.

    Raises `ConfigError` for a bad or repeated name.
    """
    named = {row.name: row for row in (Row(AR, RequestOptions(method=AR)), *known)}
    names = [name for name in names if name in named or name not in (AR_ON_ALL, NGRAM_ON_ALL)]
    rows = {AR: named[AR]}
    for name in names:
        if name in rows and name != AR:
            raise ConfigError(f"{name!r} is named twice")
        rows[name] = named.get(name) or Row(name, parse_settings(name))
    return list(rows.values())


def parse_settings(text: str) -> RequestOptions:
    """Parse `METHOD,NAME=VALUE,...`: a method, or `published`, and fields of `RequestOptions`. Raises `ConfigError`."""
    method, *settings = text.split(",")
    values: dict[str, Any] = (
        {"method": PEARL, **AS_PUBLISHED} if method == PUBLISHED else {"method": method}
    )
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"{text!r}: write METHOD,NAME=VALUE, such as pearl,rule=opt,epsilon=0.1"
            )
        name = name.strip().replace("-", "_")
        values[name] = value
    try:
        return options_of(values)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def is_emulated(config: EngineConfig) -> bool:
    """Whether the pair is toys with given forward times, which can be simulated too."""
    return bool(
        is_toy(config.target) and is_toy(config.draft) and config.target_pace and config.draft_pace
    )
