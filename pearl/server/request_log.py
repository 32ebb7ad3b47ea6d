"""The log of requests: a line for each request that has ended, and a line for each refused request."""

import logging
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("pearl.requests")

DISCONNECTED = 499  # nginx's status of a request whose client did not wait for the answer


def show_requests(is_on: bool) -> None:
    """Turn the log of requests on or off; the level of all other log messages stays."""
    log.setLevel(logging.INFO if is_on else logging.CRITICAL)


def log_request(
    what: str, model: str, arrived: float, status: int, usage: Mapping[str, Any] | None = None
) -> None:
    """Log a request that has ended.

    The line is, for example: POST /v1/completions 200 model=m seconds=1.25 prompt=7 completion=40 tokens/s=36.4
    ttft=0.150 acceptance=0.81

    Args:
        what: the method and the path.
        arrived: when the request arrived, a time.monotonic().
        usage: the usage that the client gets; None if the request's texts did not end.
    """
    seconds = time.monotonic() - arrived
    line = f"{what} {status} model={model} seconds={seconds:.2f}"
    if usage:
        statistics = usage["pearl"]
        num_tokens = usage["completion_tokens"]
        queue_seconds = min(statistics["queue_seconds"])
        rate = num_tokens / max(1e-3, seconds - queue_seconds)
        line += f" prompt={usage['prompt_tokens']} completion={num_tokens} tokens/s={rate:.1f}"
        first_seconds = statistics["seconds_to_first_token"]
        if first_seconds is not None:
            line += f" ttft={queue_seconds + first_seconds:.3f}"
        acceptance_rate = statistics["draft_acceptance_rate"]
        if acceptance_rate is not None:
            line += f" acceptance={acceptance_rate:.2f}"
    log.info(line)


def log_refused(what: str, status: int, message: str) -> None:
    log.info("%s %s %s", _short(what), status, _short(message))


def _short(text: str) -> str:
    """Return `text` on one line, cut after 200 characters."""
    return " ".join(text.split())[:200]
