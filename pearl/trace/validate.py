"""The check of a Chrome Trace Event document, of any program."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]

_REQUIRED = {"X": ("name", "pid", "tid", "ts", "dur"), "C": ("name", "pid", "ts", "args"), "M": ("name", "pid", "args")}
_REQUIRED |= {"i": ("name", "pid", "tid", "ts", "s")}
_REQUIRED |= dict.fromkeys("sf", ("name", "pid", "tid", "ts", "id", "cat"))
_SLACK_US = 0.002  # times are written to a thousandth


def problems(document: Any) -> list[str]:
    """What is wrong with a Chrome Trace Event document, for a viewer; empty where it is sound.

    Checks the fields of each event, that every track and process is named, that slices of a track nest, and that every
    flow has one start and one end, both within slices and in this order.
    """
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found: list[str] = []
    if "rank" not in (document.get("distributedInfo") or {}):
        found.append("no distributedInfo with a rank")
    slices: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    named: set[tuple[str, Any, Any]] = set()
    flows: dict[Any, dict[str, list[Event]]] = {}
    for i, event in enumerate(document["traceEvents"]):
        wrong = _wrong(event)
        if wrong:
            found.append(f"event {i}: {wrong}")
            continue
        place = event["pid"], event.get("tid", 0)
        match event["ph"]:
            case "X":
                slices.setdefault(place, []).append((event["ts"], -event["dur"]))
            case "M":
                named.add((event["name"], event["pid"], place[1] if event["name"].startswith("thread") else 0))
            case "s" | "f":
                flows.setdefault(event["id"], {"s": [], "f": []})[event["ph"]].append(event)
    for (process, track), found_slices in slices.items():
        if ("process_name", process, 0) not in named or ("thread_name", process, track) not in named:
            found.append(f"process {process}, track {track}: without a name")
        found_slices.sort()
        found += (f"process {process}, track {track}: {p}" for p in _not_nested(found_slices))
    for key, ends in flows.items():
        if len(ends["s"]) != 1 or len(ends["f"]) != 1:
            found.append(f"flow {key}: {len(ends['s'])} starts and {len(ends['f'])} ends")
        elif ends["f"][0]["ts"] < ends["s"][0]["ts"] - _SLACK_US:
            found.append(f"flow {key}: ends before it starts")
        else:
            found += (f"flow {key}: hangs in the air" for e in (*ends["s"], *ends["f"]) if not _held(e, slices))
    return found


def _wrong(event: Any) -> str | None:
    if not isinstance(event, dict) or event.get("ph") not in _REQUIRED:
        return f"no event of a kind that is known: {event!r:.80}"
    missing = [name for name in _REQUIRED[event["ph"]] if name not in event]
    if missing:
        return f"{event['ph']} without {', '.join(missing)}"
    times = [event[name] for name in ("ts", "dur") if name in event]
    if not all(isinstance(t, int | float) and math.isfinite(t) and t >= 0 for t in times):
        return f"times must be numbers from 0 up: {times}"
    return None


def _not_nested(slices: Iterable[tuple[float, float]]) -> Iterator[str]:
    """slices: (start, -duration), sorted, so an outer slice comes before those in it."""
    ends: list[float] = []
    for start, negative in slices:
        end = start - negative
        while ends and ends[-1] <= start + _SLACK_US:
            ends.pop()
        if ends and end > ends[-1] + _SLACK_US:
            yield f"slice {start:.3f} to {end:.3f} us overlaps one that ends at {ends[-1]:.3f}"
        ends.append(end)


def _held(event: Event, slices: dict[tuple[Any, Any], list[tuple[float, float]]]) -> bool:
    inside = slices.get((event["pid"], event["tid"]), [])
    at = bisect_right(inside, (event["ts"] + _SLACK_US, 1.0))
    # inner slices begin last; the outermost, a request, may begin long before
    return any(start - negative >= event["ts"] - _SLACK_US for start, negative in reversed(inside[:at]))
