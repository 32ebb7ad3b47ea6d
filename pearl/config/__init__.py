"""All settings: those of an engine (checked by pydantic) and of a request (checked by msgspec).

A configuration file is one flat YAML mapping of these fields. Every field is also a flag of the
command line. An unknown key or a bad value is refused with a message that names it. This package
must not know models, sockets or processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pearl.config.engine import EngineConfig, ModelConfig, ModelRole
from pearl.config.option_names import OF_RULES, OPTION_NAMES, options_of
from pearl.config.options import OPTIONS, RequestOptions
from pearl.config.section import Section, refuse_unknown
from pearl.document import parse_yaml
from pearl.errors import ConfigError
from pearl.spec.methods import DRAFTLESS

__all__ = [
    "EngineConfig",
    "ModelConfig",
    "ModelRole",
    "RequestOptions",
    "SamplingParams",
    "Section",
    "Settings",
    "OPTION_NAMES",
    "SETTING_NAMES",
    "load_settings",
    "read_file",
]

SamplingParams = RequestOptions  # its public name
_NAMED_FILES = {"toy": Path(__file__).with_name("toy.yaml")}  # configurations of the package
SETTING_NAMES = (*EngineConfig.model_fields, *OPTION_NAMES)


@dataclass(frozen=True)
class Settings:
    """The settings of a whole run: those of the engine, and the options of its requests."""

    engine: EngineConfig
    options: RequestOptions


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Return the settings of a run, from a configuration file and the user's flags.

    Args:
        path: the configuration file; None if there is none.
        overrides: the flags, which replace settings of the file.

    Raises `ConfigError`. If the file's settings are wrong even without flags, the message names the
    file.
    """
    values = read_file(path) if path else {}
    merged = {**values, **overrides}
    try:
        settings = _settings(merged)
        # If a flag chooses the method, the file's settings may be meant for another method. So only
        # the flags are checked.
        _refuse_unread(overrides if "method" in overrides else merged)
    except ConfigError as error:
        if path is None or _is_valid(values):
            raise
        raise ConfigError(f"{path}: {error}") from None
    return settings


def _refuse_unread(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the method has no draft, but a setting is about drafts.

    Such a setting would have no effect.
    """
    method = values.get("method")
    if method not in DRAFTLESS:
        return
    for name in ("gamma", "window", "rule", *OF_RULES):
        default = OPTIONS[name].default if name in OPTIONS else None
        if values.get(name, default) != default:
            raise ConfigError(
                f"{name} is for methods with a draft, and {method} has none: leave it out"
            )


def _is_valid(values: Mapping[str, Any]) -> bool:
    try:
        _settings(values)
    except ConfigError:
        return False
    return True


def _settings(values: Mapping[str, Any]) -> Settings:
    refuse_unknown(values, dict.fromkeys(SETTING_NAMES))
    engine_values = {}
    option_values = {}
    for name, value in values.items():
        if name in EngineConfig.model_fields:
            engine_values[name] = value
        else:
            option_values[name] = value
    options = options_of(option_values)
    problem = options.guess_problem()
    if problem:
        raise ConfigError(problem)
    return Settings(EngineConfig(**engine_values), options)


def read_file(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    If there is no such file, `path` may be the name of one of the package's configurations, such as
    "toy". Raises `ConfigError` if the file cannot be read or is no mapping.
    """
    try:
        file = path if path.exists() else _NAMED_FILES.get(str(path), path)
        values = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not YAML that PEARL reads: it is no text in UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML that PEARL reads: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(values).__name__}")
    return {str(key): value for key, value in values.items()}
