"""What a worker does before it imports torch."""

from __future__ import annotations

from collections.abc import MutableMapping


def allow_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let torch's GPU memory grow in place, unless the user has set this. Call before torch is imported.

    Our own forward copies the weights to another layout, layer by layer; with memory in blocks of fixed sizes that
    leaves gigabytes of holes, too much for a model that nearly fills its GPU.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:  # its name before torch 2.9, read still
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
