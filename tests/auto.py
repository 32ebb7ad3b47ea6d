"""Texts that the method auto writes, at given speeds or in virtual time."""

import random

from pearl.lab.studies.simulate import Outcome, Timing
from pearl.models.toy import alpha_pair
from pearl.protocol.messages import Submit
from pearl.protocol.method_choice import Auto
from pearl.spec.methods import METHODS
from tests.options import drawn_by, resolved
from tests.virtual import decoded

VOCAB = 32
PROMPT = (1, 2, 3)


def write(
    auto: Auto,
    rates: dict[str, float],
    tokens: int,
    noise: float = 0.0,
    seed: int = 1,
    predicted: dict[str, float] | None = None,
) -> tuple[float, dict]:
    """Write a text with the methods that `auto` chooses; return its seconds and tokens by method.

    Args:
        rates: the speed of each method, in tokens per second.
        noise: standard deviation of the duration of a step, as a share of it.
        predicted: the speeds that `auto` predicts from forward times for methods with a draft; by
            default those in `rates`.
    """
    drafting = {way: rates[way] for way in ("pearl", "sd", "ssd")}
    chance, at, left, ways = random.Random(seed), 1.0, tokens, dict.fromkeys(auto.ways, 0)
    alone = 0.9 * rates["ngram"]
    way = auto.begin(left, alone, rates.get("ar", 0.0), predicted=predicted or drafting)
    auto.step(at, 0, left, False)
    while left > 0:
        at, left = at + 2 / rates[way] * max(0.2, chance.gauss(1, noise)), left - 2
        ways[way] += 2
        way = auto.step(at, 2, left, METHODS[way].drafts) or way
    auto.end()
    return at - 1.0, ways


def asked(
    method: str, tokens: int, rule: str = "coupled", temperature: float = 0.0, seed: int = 5
) -> Submit:
    look_ahead = 8 if METHODS[method].look_ahead else 0
    lookup, branches = (8, 7) if method in ("auto", "pearl") else (0, 0)
    sampling = drawn_by(temperature, seed=seed)
    options = resolved(
        method, "stream", None, rule, (), look_ahead, lookup, branches, sampling=sampling
    )
    return Submit(1, PROMPT, len(PROMPT) + tokens, options)


def decode(method: str, timing: Timing, tokens: int, **given: object) -> Outcome:
    submit = asked(method, tokens, **given)  # type: ignore[arg-type]
    pair = alpha_pair(VOCAB, 0.7, order=2)
    return decoded(pair, VOCAB, submit.options, submit.options, tokens, timing, PROMPT)
