"""The check of a Chrome Trace Event document, of any program."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

_REQUIRED = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "M": ("name", "pid", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
    **dict.fromkeys("sf", ("name", "pid", "tid", "ts", "id", "cat")),
}
_SLACK_US = 0.002  # times are written to a thousandth


def problems(document: Any) -> list[str]:
    """What is wrong with a Chrome Trace Event document, for a viewer; empty if it is valid.

    Checks the fields of each event, that every track and process is named, that slices of a track nest, and that every
    flow has one start and one end, both within slices and in this order.
    """
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found = [] if "rank" in (document.get("distributedInfo") or {}) else ["no distributedInfo with a rank"]
    slices: dict[tuple[Any, Any], list[tuple[float, float]]] = {}  # process, track -> (start, -duration)
    named: set[tuple[str, Any, Any]] = set()
    flows: dict[Any, dict[str, list[dict[str, Any]]]] = {}
    for i, event in enumerate(document["traceEvents"]):
        if wrong := _wrong(event):
            found.append(f"event {i}: {wrong}")
        elif event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        elif event["ph"] == "M":
            named.add((event["name"], event["pid"], event.get("tid", 0) if event["name"].startswith("thread") else 0))
        elif event["ph"] in "sf":
            flows.setdefault(event["id"], {"s": [], "f": []})[event["ph"]].append(event)
    for (process, track), inside in slices.items():
        if ("process_name", process, 0) not in named or ("thread_name", process, track) not in named:
            found.append(f"process {process}, track {track}: without a name")
        inside.sort()  # an outer slice comes before those in it
        found += (f"process {process}, track {track}: {problem}" for problem in _not_nested(inside))
    for key, ends in flows.items():
        if len(ends["s"]) != 1 or len(ends["f"]) != 1:
            found.append(f"flow {key}: {len(ends['s'])} starts and {len(ends['f'])} ends")
        elif ends["f"][0]["ts"] < ends["s"][0]["ts"] - _SLACK_US:
            found.append(f"flow {key}: ends before it starts")
        else:
            found += (f"flow {key}: hangs in the air" for event in ends["s"] + ends["f"] if not _held(event, slices))
    return found


def _wrong(event: Any) -> str | None:
    if not isinstance(event, dict) or event.get("ph") not in _REQUIRED:
        return f"no event of a known kind: {event!r:.80}"
    missing = [name for name in _REQUIRED[event["ph"]] if name not in event]
    if missing:
        return f"{event['ph']} without {', '.join(missing)}"
    times = [event[name] for name in ("ts", "dur") if name in event]
    if not all(isinstance(t, int | float) and math.isfinite(t) and t >= 0 for t in times):
        return f"times must be numbers from 0 up: {times}"
    return None


def _not_nested(slices: Iterable[tuple[float, float]]) -> Iterator[str]:
    ends: list[float] = []
    for start, negative in slices:
        end = start - negative
        while ends and ends[-1] <= start + _SLACK_US:
            ends.pop()
        if ends and end > ends[-1] + _SLACK_US:
            yield f"slice {start:.3f} to {end:.3f} us overlaps one that ends at {ends[-1]:.3f}"
        ends.append(end)


def _held(event: dict[str, Any], slices: dict[tuple[Any, Any], list[tuple[float, float]]]) -> bool:
    inside = slices.get((event["pid"], event["tid"]), [])
    at = bisect_right(inside, (event["ts"] + _SLACK_US, 1.0))
    # inner slices begin last; the outermost, a request, may begin long before
    return any(start - negative >= event["ts"] - _SLACK_US for start, negative in reversed(inside[:at]))
