"""The rows of a benchmark: decoding settings, built in or named in a line as for `pearl compare`; their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pearl.config import DecodingConfig, EngineConfig
from pearl.device import Device
from pearl.errors import ConfigError
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.spec.methods import AS_PUBLISHED, METHODS
from pearl.worker.placement import settled

AR, SD, SSD, PEARL, FIXED = "ar", "sd", "ssd", "pearl", "pearl, fixed"
NGRAM, HEAD, AHEAD, AUTO = "ngram", "head", "pearl, ahead", "auto"
PAIR, ALL = "pair", "all devices"  # systems
AR_ON_ALL, NGRAM_ON_ALL = f"{AR}, {ALL}", f"{NGRAM}, {ALL}"
CALIBRATED = (AR, NGRAM, HEAD, SD, SSD, AHEAD, AUTO, AR_ON_ALL, NGRAM_ON_ALL)  # by `pearl calibrate`
PUBLISHED: dict[str, Any] = {"method": "pearl", **AS_PUBLISHED}
COMPARED = (  # by `pearl compare`, unless others are named
    "sd",
    "sd,rule=coupled",
    "sd,draft_stop=heuristic",
    "published",
    "published,rule=batch",
    "published,rule=spectr",
    *(f"published,rule={rule},epsilon={epsilon}" for rule in ("opt", "uno") for epsilon in (0.02, 0.1)),
    "sd,rule=bild,draft_stop=threshold",
    "published,rule=joint",
    "pearl",
    "pearl,rule=coupled",
    "ngram",
    "auto",
)


@dataclass(frozen=True)
class Row:
    """One row of a benchmark.

    Attributes:
        sampling: fields of `SamplingParams` in which it differs from the plan.
        base: name of the row that its speedup is over.
        system: name of the engine that decodes it.
    """

    name: str
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    base: str = AR
    system: str = PAIR


def devices_of(config: EngineConfig) -> tuple[Device, Device]:
    """(device of the target, device of both together), as the workers resolve them."""
    target = settled(config, "target")
    return target, target | settled(config, "draft") if config.has_draft else target


def device_of_row(row: Row, config: EngineConfig) -> Device:
    return devices_of(config)[row.system == ALL or METHODS[row.decoding.method].drafts]


def rows_for(config: EngineConfig, rule: str = "ratio") -> list[Row]:
    """All rows that this pair can have.

    `ar` and `ngram` run on the target's devices; second rows run on all cores of the pair, if those are more; over more
    GPUs a target is spread layer by layer, which is no faster.
    """
    settings = {name: name for name in (AR, SD, SSD, "pearl-no-pre-verify", "pearl-no-post-verify")}
    settings |= {FIXED: "published,window=fixed", PEARL: "published", NGRAM: NGRAM}
    settings |= {HEAD: HEAD} if config.head is not None else {}
    settings |= {AHEAD: "pearl"}
    rows = [Row(name, parse_settings(f"{text},rule={rule}")) for name, text in settings.items()]
    rows.append(Row(AUTO, parse_settings(AUTO)))  # it picks the rule under which its choices change no text
    target, both = devices_of(config)
    if both != target and not both.gpus and not is_emulated(config):
        rows += [Row(f"{name}, {ALL}", DecodingConfig(method=name), system=ALL) for name in (AR, NGRAM)]
    return rows


def named_rows(names: Iterable[str]) -> list[Row]:
    """`ar`, and a row for each of `names`; see `parse_settings`. Raises `ConfigError` for a bad or repeated name."""
    rows = {AR: Row(AR, DecodingConfig(method=AR))}
    for name in names:
        row = Row(name, parse_settings(name))
        if name in rows and name != AR:
            raise ConfigError(f"{name!r} is named twice")
        rows.setdefault(name, row)
    return list(rows.values())


def parse_settings(text: str) -> DecodingConfig:
    """Parse `METHOD,NAME=VALUE,...`: a method, or `published`, and fields of `DecodingConfig`. Raises `ConfigError`."""
    method, *settings = text.split(",")
    values: dict[str, Any] = dict(PUBLISHED) if method == "published" else {"method": method}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{text!r}: write METHOD,NAME=VALUE, such as pearl,rule=opt,epsilon=0.1")
        values[name.strip().replace("-", "_")] = value
    try:
        return DecodingConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def is_emulated(config: EngineConfig) -> bool:
    """Whether the pair is toys with given forward times, which can be simulated too."""
    return bool(is_toy(config.target) and is_toy(config.draft) and config.target_pace and config.draft_pace)
