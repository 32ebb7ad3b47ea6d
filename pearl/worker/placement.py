"""Which device and cores each worker computes on.

A forward on several cores is hundreds of short parallel regions. If the kernel may choose, it lets two of the threads
take turns on one core as soon as any other process wants a core. So each thread has a core of its own. How the threads
wait for one another is up to the runner (`ModelRunner.use_threads`).
"""

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from pearl.config import EngineConfig, ModelRole
from pearl.device import Device, usable_cores
from pearl.errors import ModelError
from pearl.models.threads import use_torch_threads
from pearl.protocol.speeds import Cores

# A draft on the CPU, with the target on a GPU, leaves two cores: to the target's host thread and to
# the client. It has at most eight, unless the user names its cores.
_LEFT = 2
_MOST_CORES = 8


def occupy(
    cores: Sequence[int], use_threads: Callable[[int], Sequence[int]] = use_torch_threads
) -> None:
    """Compute on these cores from now on, one thread per core; the calling thread is on the first.

    Threads that the calling thread starts itself run on the first core, too.

    Args:
        use_threads: see `ModelRunner`; until there is a runner, torch's.
    """
    os.sched_setaffinity(0, cores[:1])
    threads = use_threads(len(cores))
    for thread, core in zip(threads, cores[1:], strict=False):
        os.sched_setaffinity(thread, (core,))


def place(config: EngineConfig, role: ModelRole) -> torch.device:
    """Return the (first) device of this worker. Raises `ModelError` if this machine does not have it."""
    device = settled(config, role)
    gpus = torch.cuda.device_count()
    if device.kind == "cpu":
        return torch.device("cpu")
    # Several GPUs: the launcher has made all others invisible.
    index = 0 if len(device.gpus) > 1 else device.gpus[0]
    if index >= gpus or len(device.gpus) > gpus:
        raise ModelError(f"device {config.model(role).device} is not there: torch sees {gpus} GPUs")
    # Pinned memory would otherwise open a context on the first GPU, which may be the other worker's.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def settled(config: EngineConfig, role: ModelRole) -> Device:
    """Return the worker's device on this host: resolves `auto`, and `cpu` for a draft whose target is on a GPU.

    With GPUs, `auto` gives the target the first GPU. The draft gets the first GPU that the target leaves, or the last
    GPU if it leaves none.  Without GPUs, the workers of this host share the cores equally.
    A draft on the CPU, with the target on a GPU, gets all cores but two, at most eight.
    """
    device = config.model(role).place
    is_cpu_draft = role == "draft" and device == Device("cpu") and config.one_host
    if is_cpu_draft and settled(config, "target").gpus:
        cores = sorted(usable_cores())[:-_LEFT][:_MOST_CORES]
        return Device("cpu", cores=tuple(cores) or None)
    if device.kind != "auto":
        return device
    if torch.cuda.device_count():
        return Device("cuda", gpus=(_settled_gpu(config, role),))
    roles = config.roles if config.one_host else (role,)
    return Device("cpu", cores=equal_part(sorted(usable_cores()), roles.index(role), len(roles)))


def _settled_gpu(config: EngineConfig, role: ModelRole) -> int:
    target_gpus = () if role == "target" else settled(config, "target").gpus
    last = torch.cuda.device_count() - 1
    for gpu in range(last):
        if gpu not in target_gpus:
            return gpu
    return last


def shared_gpus(config: EngineConfig) -> str:
    """Return a warning if target and draft have a GPU in common; empty if they have none."""
    if not config.has_draft or not config.one_host:
        return ""
    target_gpus = set(settled(config, "target").gpus)
    shared = sorted(target_gpus.intersection(settled(config, "draft").gpus))
    if not shared:
        return ""
    return (
        f"target and draft share cuda:{','.join(map(str, shared))}: two processes take turns on a GPU, so their "
        "forwards do not overlap, and pearl has little to gain. Methods ngram and sd lose nothing by it; "
        "pearl calibrate compares them"
    )


def pin(config: EngineConfig, role: ModelRole) -> None:
    """Pin this thread, and those it starts, to the cores of its device.

    The host threads of a GPU are pinned to the cores that the other worker leaves: if one shared a core with the other
    worker's forward, that forward would wait for it.

    Threads that are already running, such as those of the sockets, stay unpinned.
    """
    cores = settled(config, role).cores
    if cores is not None:
        occupy(cores)
    elif config.one_host and settled(config, role).gpus:
        cores_left = set(usable_cores())
        for worker_role in config.roles:
            cores_left -= set(settled(config, worker_role).cores or ())
        os.sched_setaffinity(0, cores_left or usable_cores())


def core_choices(config: EngineConfig) -> Mapping[Cores, tuple[int, ...]]:
    """Return the cores that the target can compute on; empty if there is only one choice.

    Call before the target is pinned: `auto` depends on the cores that this process may use.
    """
    target_cores = settled(config, "target").cores
    if target_cores is None:
        return {}
    all_cores = list(target_cores)
    if config.has_draft and config.one_host:
        draft_cores = settled(config, "draft").cores or ()
        all_cores += sorted(set(draft_cores) - set(target_cores))
    if len(all_cores) == 1:
        return {}
    return {Cores.ONE: target_cores[:1], Cores.OWN: target_cores, Cores.ALL: tuple(all_cores)}


def equal_part(cores: list[int], which: int, of: int) -> tuple[int, ...]:
    """Return part number `which` of `of` equal parts of the cores.

    If the cores cannot be divided equally, the first parts have one more. If there are too few, some parts have the
    same core.
    """
    start = -(-which * len(cores) // of)
    end = -(-(which + 1) * len(cores) // of)
    return tuple(cores[start:end]) or (cores[which % len(cores)],)
