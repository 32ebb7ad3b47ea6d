"""Reference texts for `pearl check`: the target alone, decoded without the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.decoding.shaping import make_shaper
from pearl.engine.request import Prompt, encode, submission
from pearl.lab.experiments.texts import answers
from pearl.models.checkpoints.checkpoint import is_toy
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner
from pearl.text.grammar import Guides

PROMPTS = (  # the second has a prefix of the first; the third repeats itself, so that many tokens are guessed
    "Explain gravity to a beginner.",
    "Explain gravity to a child of five.",
    "Go on: red green blue white black, red green blue white black, red green blue white black, red green",
)
_SECOND_TURN = "\n\nAnd now in one sentence:"
_SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.6},
    "grammar": {"regex": "([a-z]{1,6} ){3,6}end", "json_schema": None, "ignore_eos": False},
}


@dataclass(frozen=True)
class Reference:
    """The target's texts for some prompts, sampled with `params`. `name` begins with the rule: greedy or coupled."""

    name: str
    params: SamplingParams
    prompts: Sequence[Prompt]
    texts: list[list[int]]


class TargetAlone:
    """The target in this process, one token a forward, from an empty cache.

    Shares only the runner, the draw and the shaper with the engine, so other bugs change its texts in another way.
    `tick`: told of each text.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, tick: Callable[[str], None]) -> None:
        self._runner, self._is_toy, self._tick = runner, is_toy(config.target), tick
        self._tokenizer, self._defaults = load_tokenizer(config.target, trust_remote_code=config.trust_remote_code)

    def references(self, asked: Sequence[Prompt], params: SamplingParams) -> tuple[list[Reference], list[Reference]]:
        """Texts of prompts and of a second turn of the first, under each direct rule; and texts with shaped logits."""
        prompts = [encode(self._tokenizer, prompt) for prompt in asked]
        first = self._text(prompts[0], direct_rules(params)["greedy"])
        second = prompts[0] + first + self._tokenizer.encode(_SECOND_TURN, special=False)
        if len(second) + (params.max_tokens or 0) <= self._runner.context:
            prompts.insert(1, second)
        plain = [self._reference(rule, sampling, prompts) for rule, sampling in direct_rules(params).items()]
        shapes = dict(_SHAPES)
        if not self._defaults.eos or self._is_toy or not find_spec("llguidance"):  # a toy has no space
            del shapes["grammar"]
        shaped = [
            self._reference(f"{rule}, {name}", sampling.model_copy(update=shape), prompts[:2])
            for name, shape in shapes.items()
            for rule, sampling in direct_rules(params).items()
        ]
        return plain, shaped

    def _reference(self, name: str, params: SamplingParams, prompts: list[list[int]]) -> Reference:
        return Reference(name, params, prompts, [self._text(prompt, params) for prompt in prompts])

    def _text(self, prompt: list[int], params: SamplingParams) -> list[int]:
        submit = submission(1, prompt, self._runner.context, params, self._defaults, DecodingConfig(method="ar"))
        sampling, guides = submit.options.sampling, Guides(lambda: self._tokenizer, self._runner.vocab_size)
        shaper = make_shaper(sampling.shaping, prompt, guides)
        (text,) = answers(self._runner, [prompt], [sampling], submit.eos, submit.limit - len(prompt), shaper=shaper)
        self._tick("the target alone")
        return text


def direct_rules(params: SamplingParams) -> dict[str, SamplingParams]:
    """Rules that commit the target's own draw -> how to sample under them."""
    return {"greedy": params.model_copy(update={"temperature": 0.0}), "coupled": params}
