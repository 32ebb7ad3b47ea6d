"""Options as a worker gets them, in which nothing is left to a default.

Options that make PEARL guess are off unless a test turns them on.
"""

from typing import Any

from msgspec import structs

from pearl.config import RequestOptions

#: The options that say how tokens are drawn; the others say how they are decoded.
DRAWING = (
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "sample",
        "repetition_penalty",
        "presence_penalty",
    ),
    *("frequency_penalty", "logit_bias", "prompt_length", "grammar", "grammar_ends", "reasoning"),
)


SHAPING = DRAWING[
    DRAWING.index("repetition_penalty") :
]  #: those by which the text before a token changes its logits


def shaped(
    prompt_length: int,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: tuple[tuple[int, float], ...] = (),
    **more: Any,
) -> RequestOptions:
    """Return options with which a text changes the logits of its next token."""
    return resolved(
        prompt_length=prompt_length,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        **more,
    )


def drawn_by(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample: int = 0,
    shaping: RequestOptions | None = None,
) -> RequestOptions:
    """Return options that draw tokens with these settings.

    `shaping`: options from which penalties, biases and grammar are taken.
    """
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    shapes = {} if shaping is None else {name: getattr(shaping, name) for name in SHAPING}
    return resolved(seed=seed, sample=sample, **filters, **shapes)


def drawing(options: RequestOptions) -> dict[str, Any]:
    """Return the fields that say how these options draw tokens, for `RequestOptions.changed`."""
    return {name: getattr(options, name) for name in DRAWING}


def unchecked(options: RequestOptions, **values: Any) -> RequestOptions:
    """Return a copy with values that `RequestOptions` refuses, such as a faulty peer may send."""
    copy = options.changed()
    for name, value in values.items():
        structs.force_setattr(copy, name, value)
    return copy


def resolved(
    method: str = "pearl",
    window: str = "stream",
    gamma: int | None = None,
    rule: str = "ratio",
    parameters: tuple[tuple[str, float], ...] = (),
    look_ahead: int = 0,
    draft_lookup: int = 0,
    branches: int = 0,
    siblings: int = 0,
    draft_stop: str = "fixed",
    stop_parameters: tuple[tuple[str, float], ...] = (),
    sampling: RequestOptions | None = None,
    **more: Any,
) -> RequestOptions:
    """Return options that leave nothing to a default.

    `sampling`: options from which the settings for drawing tokens are taken.
    """
    guesses = look_ahead, draft_lookup, branches, siblings
    drawn = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
    }
    if sampling is not None:
        drawn = drawing(sampling)
    options = RequestOptions(
        method, window, gamma, rule, parameters, *guesses, draft_stop, stop_parameters
    )
    return options.changed(**(drawn | more))
