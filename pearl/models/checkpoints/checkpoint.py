"""Finds the files of a named model: the embedded pair, a directory, a GGUF file or the hub's.

This module must not import torch, because the user's process, which holds no model, uses it to find
a tokenizer.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pearl.cache import Progress, silent
from pearl.config.engine import is_toy as is_toy  # toys are named models, too
from pearl.errors import ModelError
from pearl.models.checkpoints.embedded import embedded_draft, embedded_target
from pearl.models.checkpoints.gguf import directory_of
from pearl.models.checkpoints.hub import HubName, in_cache, pull
from pearl.models.heads.kinds import describes_head


class ToyOptions(NamedTuple):
    """The options of a toy model; see `pearl.models.toy`.

    Attributes:
        vocab: number of tokens.
        alpha: acceptance rate of a pair.
        context: the most tokens of a text.
        eos: id of the token that ends a text; below 0: there is none.
        coin: 1 for a pair that `coin_pair` makes, 0 for one that `alpha_pair` makes.
    """

    vocab: int = 32
    alpha: float = 0.8
    seed: int = 0
    context: int = 1 << 20
    eos: int = -1
    coin: int = 0


def toy_options(spec: str) -> ToyOptions:
    """Return the options of "toy" or "toy:KEY=VALUE,...". Raises `ModelError` for an unknown key or a bad value."""
    options = ToyOptions()
    for item in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in ToyOptions._fields:
            known = ", ".join(ToyOptions._fields)
            raise ModelError(f"toy model {spec!r}: unknown key {key!r}; known are {known}")
        kind = type(getattr(options, key))
        try:
            options = options._replace(**{key: kind(value)})
        except ValueError:
            raise ModelError(
                f"toy model {spec!r}: {key}={value!r} is not {kind.__name__}"
            ) from None
    if options.vocab < 2 or not 0 <= options.alpha <= 1:
        raise ModelError(f"toy model {spec!r}: vocab must be at least 2 and alpha between 0 and 1")
    return options


# Paths that this process has fetched: a hub that does not answer is asked only once.
fetched: dict[tuple[str, bool], Path] = {}


def resolve_checkpoint(spec: str, progress: Progress = silent, weights: bool = True) -> Path:
    """Return the directory of the model named `spec`.

    A name is "embedded", "embedded-draft", a directory, a .gguf file or a `HubName`.  The embedded
    models, and the directory that describes a .gguf file, are built if they are not in the cache.
    A model of the hub is fetched.  Raises `ModelError` if there is no such model, or it cannot be
    fetched or built.

    Args:
        weights: see `pull`.
    """
    if spec == "embedded":
        return embedded_target(progress)
    if spec == "embedded-draft":
        return embedded_draft(progress)
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return directory_of(path, progress)
    hub_name = HubName.parse(spec)
    if path.is_file() or path.suffix == ".gguf" or not hub_name:
        problem = "no such directory or .gguf file"
        if path.is_file():
            problem = "it is a file, but no .gguf file"
        raise ModelError(
            f"Model {spec!r}: {problem}. Give a directory with config.json, a .gguf "
            'file, a hub id such as "Qwen/Qwen3-0.6B", "embedded" or "embedded-draft".'
        )
    place = fetched.get((spec, weights))
    if place is None or not place.exists():
        cached = None
        if hub_name.file:
            cached = in_cache(spec)
        place = cached or pull(spec, progress, weights)
        fetched[spec, weights] = place
    if place.suffix == ".gguf":
        return directory_of(place, progress)
    return place


def is_head(spec: str) -> bool:
    """Return whether `spec` names a drafting head, which serves another model."""
    if is_toy(spec) or spec in ("none", "embedded", "embedded-draft") or Path(spec).is_file():
        return False
    directory: Path | None = Path(spec)
    if not Path(spec).is_dir():
        directory = in_cache(spec)
    return directory is not None and describes_head(config_in(directory))


def config_in(directory: Path) -> dict[str, Any]:
    """Return the config.json in a directory; an empty dict if there is none that can be read."""
    with suppress(OSError, ValueError):
        config = json.loads((directory / "config.json").read_text())
        if isinstance(config, dict):
            return config
    return {}
