"""One lookup of a name on the hub, in bounded time: transformers asks for each file, and retries each for long.

Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from pearl.cache import Progress
from pearl.errors import ModelError

_SECONDS = 10.0  # to connect, and to answer


def found_on_hub(name: str, progress: Progress) -> str:
    """`name` where the hub has a model of that name; the directory of its files where only the hub's cache has.

    Raises `ModelError` where neither has, with the cause.
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
    except Exception as error:  # the network, a proxy, an impossible name: no common base
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
    """The directory of a model's files in the hub's cache, without the network; None where they are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
