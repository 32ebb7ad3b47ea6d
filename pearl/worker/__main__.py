"""`python -m pearl.worker`: one worker process, started by a launcher that holds its stdin (see lifeline.py).

The first line on stdin is its `WorkerSettings`.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import Any

from pearl.errors import PearlError
from pearl.printable import log_to_stderr
from pearl.worker.lifeline import Lifeline
from pearl.worker.startup import allow_expandable_segments


def main() -> int:
    lifeline = Lifeline()
    settings = lifeline.settings
    log_to_stderr(settings.config.log_level, settings.role)
    lifeline.watch(settings.directory)
    allow_expandable_segments(os.environ)
    gc.disable()  # collecting amid the imports finds nothing, and is a tenth of their time
    from pearl.worker import build  # torch only now: the lifeline must hold from the first moment on

    gc.freeze()
    gc.enable()
    run = build.run_draft if settings.role == "draft" else build.run_target
    try:
        run(settings, lifeline)
    except PearlError as error:
        lifeline.tell("failed", kind=type(error).__name__, message=str(error))
        return error.exit_code
    except Exception as error:
        logging.getLogger(__name__).debug("worker failed", exc_info=True)
        lifeline.tell("failed", kind="StartError", message=_described(error))
        return 1
    finally:
        lifeline.end()
    return 0


def _described(error: Exception) -> str:
    """An error nobody foresaw, with the place where it happened: one line to put into a bug report."""
    frames: list[Any] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    where = frames[-1].tb_frame.f_code
    return f"{type(error).__name__}: {error} ({Path(where.co_filename).name}:{frames[-1].tb_lineno} {where.co_name})"


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread that waits in gloo would abort the process if it woke while the interpreter ends
