"""The rows of a benchmark: decoding settings on devices, built in or named in a line as for `pearl compare`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.errors import ConfigError
from pearl.lab.bench.systems import Devices, devices_of
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.spec.methods import AS_PUBLISHED, METHODS

AR, SD, SSD, PEARL, FIXED = "ar", "sd", "ssd", "pearl", "pearl, fixed"
NGRAM, HEAD, AHEAD, AUTO = "ngram", "head", "pearl, ahead", "auto"
PAIR, ALL = "pair", "all devices"  # systems
AR_ON_ALL, NGRAM_ON_ALL = f"{AR}, {ALL}", f"{NGRAM}, {ALL}"
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
        system: name of the engine that decodes it.
        params: how this row samples, its seed excepted; None: as the plan says.
        base: name of the row that its speedup is over.
    """

    name: str
    system: str
    devices: Devices
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    params: SamplingParams | None = None
    base: str = AR


def rows_for(config: EngineConfig, rule: str = "ratio") -> list[Row]:
    """All rows that this pair can have.

    `ar` and `ngram` run on the target's devices; second rows run on all cores of the pair, if those are more; over more
    GPUs a target is spread layer by layer, which is no faster.
    """
    target, draft = devices_of(config)
    both = target | draft
    methods: dict[str, dict[str, Any]] = {
        AR: {"method": "ar"},
        SD: {"method": "sd"},
        SSD: {"method": "ssd"},
        "pearl-no-pre-verify": {"method": "pearl-no-pre-verify"},
        "pearl-no-post-verify": {"method": "pearl-no-post-verify"},
        FIXED: PUBLISHED | {"window": "fixed"},
        PEARL: PUBLISHED,
        NGRAM: {"method": "ngram"},
        **({HEAD: {"method": "head"}} if config.head is not None else {}),
        AHEAD: {"method": "pearl"},
        AUTO: {"method": "auto"},
    }
    # auto picks the rule under which its choices change no text
    decodings = {name: DecodingConfig(**s, **({} if name == AUTO else {"rule": rule})) for name, s in methods.items()}
    rows = [Row(name, PAIR, _devices(one, target, both), one) for name, one in decodings.items()]
    if both != target and not both.gpus and not is_emulated(config):
        rows += [Row(f"{name}, {ALL}", ALL, both, DecodingConfig(method=name)) for name in (AR, NGRAM)]
    return rows


def _devices(decoding: DecodingConfig, target: Devices, both: Devices) -> Devices:
    return both if METHODS[decoding.method].drafts else target


def named_rows(config: EngineConfig, names: Iterable[str]) -> list[Row]:
    """`ar`, and a row for each of `names`; see `parse_settings`. Raises `ConfigError` for a bad or repeated name."""
    target, draft = devices_of(config)
    rows = {AR: Row(AR, PAIR, target, DecodingConfig(method=AR))}
    for name in names:
        decoding = parse_settings(name)
        if name in rows and name != AR:
            raise ConfigError(f"{name!r} is named twice")
        rows.setdefault(name, Row(name, PAIR, _devices(decoding, target, target | draft), decoding))
    return list(rows.values())


def parse_settings(text: str) -> DecodingConfig:
    """Parse `METHOD,NAME=VALUE,...`: a method, or `published`, and fields of `DecodingConfig`. Raises `ConfigError`."""
    method, *settings = text.split(",")
    values: dict[str, Any] = dict(PUBLISHED) if method == "published" else {"method": method}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{text!r}: write METHOD,NAME=VALUE, such as pearl,rule=opt,epsilon=0.1")
        values[name.strip().replace("-", "_")] = _number(value)
    try:
        return DecodingConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def is_emulated(config: EngineConfig) -> bool:
    """Whether the pair is toys with given forward times, which can be simulated too."""
    return bool(is_toy(config.target) and is_toy(config.draft) and config.target_pace and config.draft_pace)
