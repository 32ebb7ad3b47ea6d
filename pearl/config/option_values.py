"""The values of request options: bounds, conversion of what callers pass, and error messages."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from msgspec import Meta

from pearl.config.records import LARGEST, Finite, Name, Position, Text
from pearl.config.section import shown
from pearl.document import parse_json
from pearl.errors import ConfigError
from pearl.spec import methods
from pearl.spec.methods import AS_PUBLISHED
from pearl.spec.rules import MAX_PARAMETERS

# Models compute in float32, in which much smaller values become 0 and much larger ones infinity.
LEAST_TEMPERATURE = 1e-4
MOST_TEMPERATURE = 1e30
LEAST_SHARE = 1e-30  # least top_p, and least min_p other than 0
LEAST_REPETITION_PENALTY = 0.01
MOST_REPETITION_PENALTY = 100.0
MOST_PENALTY = 2.0  # OpenAI's range
MOST_BIAS = 100.0  # OpenAI's range: makes a token certain or impossible
MAX_BIASES = 1024
MOST_STOPS = 64  # strings: each token is compared with all of them
LONGEST_STOP = 1000  # characters
MOST_EOS = 2048  # token ids that end a text: each token is compared with all of them
MAX_GRAMMAR = 1 << 16  # bytes of UTF-8 in a grammar, which contains a JSON schema or an expression
MOST_REASONING_ENDS = 8  # marks that end a reasoning part
MAX_PREDICTION = 1 << 21  # characters
MOST_PREDICTED = 1 << 17  # tokens
MAX_LOGPROBS = 20  # alternatives at each position, as OpenAI's
LEAST_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity

# Words that stand for a number of guesses in flags and files.
NUMBER_WORDS: dict[str, int | None] = {"auto": None, "off": 0}

Parameters = Annotated[tuple[tuple[Name, Finite], ...], Meta(max_length=MAX_PARAMETERS)]
Ends = Annotated[tuple[Position, ...], Meta(max_length=MOST_EOS)]

if TYPE_CHECKING:  # what a caller may pass; `RequestOptions.__post_init__` converts it
    _Kind = TypeVar("_Kind")
    Default = Annotated[_Kind, "None until `resolved` fills it in"]
    Stops = Sequence[str]
    Biases = Any  # a mapping, or pairs
    Schema = Any  # a mapping, or text
    Named = Any  # a mapping, or pairs
else:

    class Default:
        """`Default[T]` is T or None, where None stands for a default that `resolved` fills in."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None

    Stops = tuple[Text, ...]
    Biases = tuple[tuple[Position, Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]], ...]
    Schema = str | None
    Named = Parameters

GuessBound = Default[Annotated[int, Meta(ge=0, le=methods.MAX_LOOK_AHEAD)]]
UNSET: Any = None


# ---- conversion ----


def _number_or_word(value: Any) -> Any:
    """Convert a number of guesses, which may be text or a word such as "off", to an int.

    The value of a flag is text. `NUMBER_WORDS` in this file maps each word to its value. False
    means 0, because YAML reads the word `off` as False. Any other value is returned as it is.
    """
    if value is False:
        return 0
    if not isinstance(value, str):
        return value
    if value.isdecimal():
        return int(value)
    return NUMBER_WORDS.get(value, value)


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return _sequence(value)


def _sequence(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    return value


def _pairs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return _sequence(value)


def _schema_text(value: Any) -> Any:
    """Convert a JSON schema, which may be a mapping or text, to text.

    Raises `ConfigError` if it is not JSON, not an object or too long.
    """
    if value is None:
        return None
    schema = value
    try:
        if isinstance(value, str):
            schema = parse_json(value)
    except ValueError as error:
        raise ConfigError(f"json_schema: is not JSON: {error} (got {shown(value)})") from None
    if not isinstance(schema, Mapping):
        raise ConfigError(f"json_schema: must be a JSON object (got {shown(value)})")
    try:
        text = json.dumps(schema)
    except (RecursionError, TypeError) as error:
        raise ConfigError(f"json_schema: cannot be written as JSON: {error}") from None
    limit = MAX_GRAMMAR // 2
    if len(text) > limit:
        raise ConfigError(f"json_schema: has {len(text):,} characters, at most {limit:,} are read")
    return text


CONVERTERS = {
    **dict.fromkeys(AS_PUBLISHED, _number_or_word),
    "parameters": _pairs,
    "stop_parameters": _pairs,
    "stop": _strings,
    "stop_token_ids": _sequence,
    "logit_bias": _pairs,
    "json_schema": _schema_text,
}


# ---- refusal ----

# Bounds beyond which float32 cannot sample: (field, least value except 0, greatest value, message).
UNSAMPLED = (
    (
        "temperature",
        LEAST_TEMPERATURE,
        LARGEST,
        f"0 is greedy; the least temperature above it is {LEAST_TEMPERATURE}",
    ),
    (
        "temperature",
        0.0,
        MOST_TEMPERATURE,
        f"the greatest temperature is {MOST_TEMPERATURE:g}",
    ),
    (
        "top_p",
        LEAST_SHARE,
        1.0,
        f"the least top_p is {LEAST_SHARE:g}; top_k=1 keeps the likeliest token alone",
    ),
    ("min_p", LEAST_SHARE, 1.0, f"0 is off; the least min_p above it is {LEAST_SHARE:g}"),
)


def wide_window(gamma: int | None) -> str:
    """Return why an engine with several slots refuses a window of `gamma` tokens."""
    limit = methods.MAX_WINDOW
    return f"gamma {gamma} is more than {limit}: the other requests of an engine with several slots would wait"


def in_words(message: str) -> str:
    """Return msgspec's message in plain words.

    For example, "Expected `float` >= 0.0" becomes "takes a number >= 0.0".
    """
    words, _, place = message.partition(" - at ")
    for kind, noun in _NOUNS.items():
        words = words.replace(f"`{kind}`", noun).replace(f"`{kind} | null`", noun)
    words = words.replace("Expected", "takes")
    if place:
        return f"an item {words}"
    return words


TAKES_MANY = {
    "stop": f"at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters each end a text",
    "logit_bias": f"takes at most {MAX_BIASES} token ids, and numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}",
}
_NOUNS = {
    "float": "a number",
    "int": "a whole number",
    "str": "text",
    "bool": "true or false",
    "null": "null",
    "object": "a mapping",
    "array": "a list",
}
