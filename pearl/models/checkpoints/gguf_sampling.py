"""Turns the sampling settings of a GGUF file into a generation_config.json.

The settings are the file's fields `general.sampling.*`.

llama-server takes twelve such fields as its defaults.  Five of them have the same meaning here.
Each of the others is reported as not supported if it would change the text.  A setting that the
file does not state is off, although llama-server would use a default of its own.
"""

from collections.abc import Mapping
from typing import Any

_PREFIX = "general.sampling."
_OPTIONS = {  # name in a file -> name in a generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
UNSUPPORTED = "general.sampling"  # key of the list of options that are not supported
_USUAL_XTC_THRESHOLD = 0.1  # llama.cpp's default
_LARGEST_XTC_THRESHOLD = 0.5  # above it XTC is off


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation_config.json of a GGUF file with these fields.

    It is empty if the fields have no sampling settings.

    As in llama.cpp, a temperature of 0 or less is greedy, and a `top_k` or `min_p` below 0 is off.
    """
    stated = _stated(fields)
    if not stated:
        return {}
    generation: dict[str, Any] = {"top_k": 0, "min_p": 0.0}  # transformers would take a top_k of 50
    for name, option in _OPTIONS.items():
        if name in stated:
            generation[option] = max(0, stated[name])
    if stated.get("penalty_last_n") == 0:
        generation.pop("repetition_penalty", None)
    generation["do_sample"] = generation.get("temperature", 0) > 0
    generation[UNSUPPORTED] = [f"{name} {stated[name]}" for name in _unsupported(stated)]
    return generation


def _stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's sampling options by name, such as "top_k".

    Options whose value has a wrong type are left out.
    """
    options = {}
    for name, value in fields.items():
        option = name.removeprefix(_PREFIX)
        types = str if option == "sequence" else (int, float)
        if option != name and isinstance(value, types):
            options[option] = _as_written(value)
    return options


def _as_written(value: float | str) -> float | str:
    """Return the shortest decimal that rounds to the float32 `value`: 0.95 for 0.949999988."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value


def _unsupported(stated: Mapping[str, Any]) -> list[str]:
    """Return the names of a file's options that llama-server would follow and PEARL does not."""
    names = [name for name in ("mirostat", "sequence") if stated.get(name)]
    threshold = stated.get("xtc_threshold", _USUAL_XTC_THRESHOLD)
    if stated.get("xtc_probability", 0) > 0 and threshold <= _LARGEST_XTC_THRESHOLD:
        names.append("xtc_probability")
    # The number of last tokens that the repetition penalty counts. PEARL always counts the whole
    # text: -1.
    if stated.get("penalty_last_n", -1) > 0 and stated.get("penalty_repeat", 1) != 1:
        names.append("penalty_last_n")
    return names
