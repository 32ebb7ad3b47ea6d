"""`python -m pearl.worker`: one worker process, started by a launcher that holds its stdin (see lifeline.py).

The first line on stdin is the worker's `WorkerSettings`.
"""

import gc
import logging
import os
import sys

from pearl.device import has_gpu
from pearl.errors import PearlError
from pearl.models.cpu.meta_device import postpone_kernels
from pearl.printable import log_to_stderr
from pearl.steps import Steps
from pearl.worker.lifeline import Lifeline

log = logging.getLogger(__name__)


def main() -> int:
    steps = Steps(log)
    lifeline = Lifeline()
    settings = lifeline.settings
    log_to_stderr(settings.config.log_level, settings.role)
    lifeline.watch(settings.directory)
    # Our forward copies weights layer by layer, which would leave gigabytes of holes in blocks of
    # fixed sizes on a GPU.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its name before torch 2.9, still read
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gc.disable()  # during the imports, collections would find nothing and take a tenth of the time
    if not has_gpu():  # with a GPU, torch was not tested without these kernels
        postpone_kernels()
    from pearl.worker import (
        build,  # imports torch, so only now: the lifeline must hold from the first moment on
    )

    gc.freeze()
    gc.enable()
    steps.done("importing torch")
    run = build.run_draft if settings.role == "draft" else build.run_target
    try:
        run(settings, lifeline, steps)
    except PearlError as error:
        lifeline.tell("failed", kind=type(error).__name__, message=str(error))
        return error.exit_code
    except Exception as error:
        log.debug("worker failed", exc_info=True)
        lifeline.tell("failed", kind="StartError", message=f"{type(error).__name__}: {error}")
        return 1
    finally:
        lifeline.end()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # A thread that waits in NCCL would abort the process if it woke while the interpreter ends.
    os._exit(code)
