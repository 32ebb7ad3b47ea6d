"""The rows of a benchmark: each is a way to decode, with its settings and its devices.

`rows_for` has the built-in rows of a pair. Users can add rows by their settings (`parse_settings`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pearl.config import EngineConfig, RequestOptions
from pearl.config.option_names import options_of
from pearl.device import Device
from pearl.errors import ConfigError
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.spec.methods import AS_PUBLISHED, METHODS
from pearl.worker.placement import settled

AR = "ar"
SD = "sd"
SSD = "ssd"
PEARL = "pearl"
NGRAM = "ngram"
HEAD = "head"
AUTO = "auto"
PUBLISHED = "published"
FIXED = "published,window=fixed"
PAIR = "the pair"  # a system: the engine with both models
ALL = "all devices"  # a system: an engine with the target alone, on the devices of both models
AR_ON_ALL = f"{AR}, {ALL}"
NGRAM_ON_ALL = f"{NGRAM}, {ALL}"
# The rows of `pearl calibrate`.
CALIBRATED = (AR, NGRAM, HEAD, SD, SSD, PEARL, AUTO, AR_ON_ALL, NGRAM_ON_ALL)


@dataclass(frozen=True)
class Row:
    """One row of a benchmark.

    Attributes:
        options: options that replace those of the benchmark's `Plan`.
        base: name of the row that this row's speedup is relative to.
        system: which engine decodes the row: `PAIR`, the engine with both models, or `ALL`, an
            engine with the target alone, on the devices of both models.
    """

    name: str
    options: RequestOptions = field(default_factory=RequestOptions)
    base: str = AR
    system: str = PAIR


def devices_of(config: EngineConfig) -> tuple[Device, Device]:
    """Return (the target's device, the union of both models' devices).

    The configured devices are resolved to actual ones in the same way as in the workers.
    """
    target = settled(config, "target")
    if config.has_draft:
        return target, target | settled(config, "draft")
    return target, target


def device_of_row(row: Row, config: EngineConfig) -> Device:
    target, both = devices_of(config)
    uses_both = row.system == ALL or METHODS[row.options.method].drafts
    return both if uses_both else target


def rows_for(config: EngineConfig, rule: str = "ratio") -> list[Row]:
    """Return all rows that a pair can have; without a draft, only the rows that need none.

    `ar` and `ngram` run on the target's devices. If the draft has cores of its own, `ar` and
    `ngram` each have a second row, on the cores of both models. Emulated pairs and pairs on GPUs
    have no second rows: on more GPUs a target is no faster, because its layers still run one after
    the other.

    Args:
        rule: acceptance rule of the rows, as in `parse_settings`, such as "opt,epsilon=0.1"; `auto`
            chooses its own.
    """
    names = [AR, SD, SSD, "pearl-no-pre-verify", "pearl-no-post-verify", FIXED, PUBLISHED, NGRAM]
    if config.head is not None:
        names.append(HEAD)
    names.append(PEARL)
    rows = []
    for name in names:
        options = parse_settings(f"{name},rule={rule}")
        if config.has_draft or not METHODS[options.method].drafts:
            rows.append(Row(name, options))
    rows.append(Row(AUTO, parse_settings(AUTO)))  # auto chooses a rule that changes no text
    target, both = devices_of(config)
    if both != target and not both.gpus and not is_emulated(config):
        for name in (AR, NGRAM):
            rows.append(Row(f"{name}, {ALL}", RequestOptions(method=name), system=ALL))
    return rows


def named_rows(names: Iterable[str], defaults: Iterable[Row] = ()) -> list[Row]:
    """Return the row `ar`, and a row for each name.

    Each name is the name of a row in `defaults`, or settings for `parse_settings`. The names of the
    second rows, on the cores of both models (see `rows_for`), are skipped if `defaults` has no such
    rows. Raises `ConfigError` for wrong settings, and for a name that occurs twice.
    """
    by_name = {AR: Row(AR, RequestOptions(method=AR))}
    for row in defaults:
        by_name[row.name] = row
    rows = {AR: by_name[AR]}
    for name in names:
        if name in (AR_ON_ALL, NGRAM_ON_ALL) and name not in by_name:
            continue
        if name in rows and name != AR:
            raise ConfigError(f"{name!r} is named twice")
        rows[name] = by_name.get(name) or Row(name, parse_settings(name))
    return list(rows.values())


def parse_settings(text: str) -> RequestOptions:
    """Parse `METHOD,NAME=VALUE,...`: a method, and fields of `RequestOptions` with their values.

    For example, `pearl,rule=opt,epsilon=0.1`. In place of a method, `published` is `pearl` without
    guesses and branches, as in its paper. Raises `ConfigError` for an unknown method or field, and
    for a wrong value.
    """
    method, *settings = text.split(",")
    values: dict[str, Any] = {"method": method}
    if method == PUBLISHED:
        values = {"method": PEARL, **AS_PUBLISHED}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"{text!r}: write METHOD,NAME=VALUE, such as pearl,rule=opt,epsilon=0.1"
            )
        values[name.strip().replace("-", "_")] = value
    try:
        return options_of(values)
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from None


def is_emulated(config: EngineConfig) -> bool:
    """Return whether both models are toys with given forward times; such a pair can also be simulated."""
    return bool(
        is_toy(config.target) and is_toy(config.draft) and config.target_pace and config.draft_pace
    )
