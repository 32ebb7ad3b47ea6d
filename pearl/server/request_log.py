"""The log of requests: a line for each, and one for each refusal."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("pearl.requests")

DISCONNECTED = 499  # nginx's status of a request whose client did not wait for the answer


def show_requests(is_on: bool) -> None:
    """Log requests whatever level other messages need, or not at all."""
    log.setLevel(logging.INFO if is_on else logging.CRITICAL)


def log_request(
    what: str, model: str, arrived: float, status: int, usage: Mapping[str, Any] | None = None
) -> None:
    """`arrived`: a time.monotonic(); `usage`: as the client gets it, if the texts came to their end."""
    seconds = time.monotonic() - arrived
    line = f"{what} {status} model={model} seconds={seconds:.2f}"
    if usage:
        ours, made = usage["pearl"], usage["completion_tokens"]
        queued = min(ours["queue_seconds"])
        line += f" prompt={usage['prompt_tokens']} completion={made} tokens/s={made / max(1e-3, seconds - queued):.1f}"
        if (first := ours["seconds_to_first_token"]) is not None:
            line += f" ttft={queued + first:.3f}"
        if (rate := ours["draft_acceptance_rate"]) is not None:
            line += f" acceptance={rate:.2f}"
    log.info(line)


def log_refused(what: str, status: int, message: str) -> None:
    log.info("%s %s %s", *(" ".join(text.split())[:200] for text in (what, str(status), message)))
