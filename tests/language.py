"""A small language, and toy models that are constrained to it.

The language is given twice: as a grammar, and as the set of all its texts, written down without a
parser.
"""

from functools import cache
from itertools import product

import torch

from pearl.config import RequestOptions
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Submit
from pearl.text.grammar import Guides, grammar_of
from tests.options import resolved, shaped
from tests.replace import replace

VOCAB = 6
PROMPT = (1, 2, 3, 1)
END = 5  # "5" in a text, were it not what ends one
REGEX = "(0|12){2,4}3?"
# The whole language, written down without any parser.
LANGUAGE = {
    "".join(parts) + last
    for n in (2, 3, 4)
    for parts in product(("0", "12"), repeat=n)
    for last in ("", "3")
}


@cache
def toy_guides(size: int = VOCAB) -> Guides:
    return Guides(lambda: ToyTokenizer(VOCAB), size)


def shaping(**others: float) -> RequestOptions:
    return shaped(len(PROMPT), grammar=grammar_of(None, REGEX), grammar_ends=(END,), **others)


def allowed(text: str) -> set[int]:
    """Return the tokens that may follow `text`; empty if no text of the language begins so."""
    following = {
        int(word[len(text)]) for word in LANGUAGE if word.startswith(text) and len(word) > len(text)
    }
    return following | ({END} if text in LANGUAGE else set())


def written(tokens: list[int]) -> str:
    return "".join(map(str, tokens))


def masked(text: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the toy's logits, with the tokens that the language does not allow set to -inf.

    The toy gives half of all tokens no probability. If all allowed tokens are among these, the
    allowed tokens get equal logits.
    """
    may = allowed(written(text[len(PROMPT) :]))
    possible = any(logits[token] > -torch.inf for token in may)
    values = [float(value) if possible else 0.0 for value in logits]
    return torch.tensor(
        [value if token in may else -torch.inf for token, value in enumerate(values)]
    )


def decoded(
    method: str, rule: str, sampling: RequestOptions, timing: Timing, extras: int = 4
) -> list[int]:
    target, draft = (ToyRunner(VOCAB, each) for each in alpha_pair(VOCAB, 0.6))
    decoding = resolved(method, "stream", None, rule, (), extras, extras, extras)
    submit = Submit(1, PROMPT, 100, replace(decoding, sampling=sampling), eos=(END,))
    return list(
        simulate(submit, *paired_executors(target, draft, guides=toy_guides()), timing).tokens
    )
