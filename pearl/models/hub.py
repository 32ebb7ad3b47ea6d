"""One look-up of a name on the hub, within bounds: transformers asks for each file, and repeats each question for long.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from pearl.cache import Progress
from pearl.errors import ModelError

_SECONDS = 10.0  # to connect, and to answer


def found_on_hub(name: str, progress: Progress) -> str:
    """`name` itself where the hub has a model of that name; the directory of its files where only the cache has.

    Raises `ModelError` where neither has, telling which of the two is to blame.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=_SECONDS)
        return name
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"Model {name!r} could not be loaded: there is no such directory, and the hub has no model of that name "
            "that you may read. Check the name; a gated or private model needs `hf auth login`."
        ) from error
    except Exception as error:  # of the network, of a proxy, of a name that the hub cannot have: no common base
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
    try:
        directory = snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError) as error:
        raise ModelError(
            f"Model {name!r} could not be loaded: it is no directory, it is not in the hub's cache, and the hub cannot "
            f"be reached ({cause.rstrip('.')}). Check the name, the network or $HF_ENDPOINT, or give a local directory."
        ) from error
    progress(f"the hub cannot be reached: taking {name} as it is in the cache")
    return str(directory)


def in_cache(name: str) -> Path | None:
    """The directory of a model's files where the hub's cache has them; asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
