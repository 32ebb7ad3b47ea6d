"""An emulated pair (toys whose every forward lasts a given time) under the virtual clock: what its run could reach.

Run and simulation share models, seed and decisions; messages and the runtime's own work cost the simulation nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.client.request import submission
from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.tokenizer import load_tokenizer
from pearl.models.toy import load_toy


def simulated(config: EngineConfig, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Outcome:
    """The same request in virtual time.

    On one thread: over a few tokens of vocabulary several would only wait for each other, five times as long.
    """
    torch.set_num_threads(1)
    target, draft = load_toy(config.target, "target", config.max_context), load_toy(config.draft, "draft", None)
    _, defaults = load_tokenizer(config.target)
    submit = submission(1, prompt, target.context, params, defaults, decoding)
    return simulate(submit, *paired_executors(target, draft), paced(config))


def paced(config: EngineConfig) -> Timing:
    """The times that an emulated pair's forwards last."""
    assert config.target_pace is not None
    assert config.draft_pace is not None
    pace = config.target_pace
    return Timing(config.draft_pace, lambda fed: pace)
