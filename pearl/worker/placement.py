"""Decides on which device and on which cores each worker computes.

A forward on several cores consists of hundreds of short parallel regions. If the kernel chooses the
cores, it lets two of the threads take turns on one core as soon as another process wants a core. So
each thread is pinned to a core of its own. How the threads wait for one another is up to the runner
(`ModelRunner.use_threads`).
"""

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from pearl.config import EngineConfig, ModelRole
from pearl.device import Device, usable_cores
from pearl.errors import ModelError
from pearl.models.threads import use_torch_threads
from pearl.protocol.speeds import Cores

# If the draft runs on the CPU and the target on a GPU, the draft leaves two cores: one to the
# target's host thread, one to the client. It takes at most eight, unless the user names its cores.
_LEFT = 2
_MOST_CORES = 8


def occupy(
    cores: Sequence[int], use_threads: Callable[[int], Sequence[int]] = use_torch_threads
) -> None:
    """Pin the calling thread to the first of these cores, and its helpers to the others.

    The helpers are the threads that compute together with the calling thread, one on each core.
    Other threads that the calling thread starts later run on the first core, too.

    Args:
        use_threads: sets the number of computing threads, as `ModelRunner.use_threads` does.
    """
    os.sched_setaffinity(0, cores[:1])
    threads = use_threads(len(cores))
    for thread, core in zip(threads, cores[1:], strict=False):
        os.sched_setaffinity(thread, (core,))


def place(config: EngineConfig, role: ModelRole) -> torch.device:
    """Return the torch device of this worker; of several GPUs, the first.

    Raises `ModelError` if this machine does not have the device.
    """
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
    """Return the worker's device on this host, with `auto` resolved.

    If there are GPUs, `auto` gives the target the first GPU. The draft gets the first GPU that the
    target leaves, or the last GPU if the target leaves none.  If there are no GPUs, the workers of
    this host share the cores equally.  A draft on `cpu` whose target is on a GPU gets all cores but
    two, and at most eight.
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
    """Pin this thread, and the threads that it will start, to the cores of the worker's device.

    If the worker's device is a GPU, the threads are pinned to the cores that the other worker
    leaves. If a thread shared a core with the other worker's forward, the forward would have to
    wait for the thread. Threads that are already running, such as those of the sockets, stay
    unpinned.
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
    """Return the sets of cores that the target can choose from; empty if it has no choice.

    The target has no choice if there is only one core, or if its device names no cores. A GPU, for
    example, names none.

    Call this before the target is pinned, because `auto` depends on the cores that this process may
    use.
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
    """Divide the cores into `of` equal parts; return part number `which`, counted from 0.

    If the cores cannot be divided equally, the first parts have one core more. If there are fewer
    cores than parts, some parts have the same core.
    """
    start = -(-which * len(cores) // of)
    end = -(-(which + 1) * len(cores) // of)
    return tuple(cores[start:end]) or (cores[which % len(cores)],)
