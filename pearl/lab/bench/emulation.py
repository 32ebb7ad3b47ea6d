"""Simulate an emulated pair (forwards last a given time) in virtual time: an upper bound for its real run.

Run and simulation share models, seed and decisions; in the simulation messages and the runtime's own work take no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine.request import submission
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.replay import load_scripted
from pearl.models.tokenizers import load_tokenizer


def simulated(config: EngineConfig, decoding: DecodingConfig, prompt: Sequence[int], params: SamplingParams) -> Outcome:
    """Simulate the request in virtual time.

    Sets torch to one thread: with a vocabulary of a few tokens, several threads take five times as long.
    """
    torch.set_num_threads(1)
    target = load_scripted(config.target, "target", config.max_context)
    draft = load_scripted(config.draft, "draft")
    _, defaults = load_tokenizer(config.target)
    submit = submission(1, prompt, target.context, params, defaults, decoding)
    return simulate(submit, *paired_executors(target, draft), paced(config))


def paced(config: EngineConfig) -> Timing:
    """Forward times of an emulated pair, from its configuration."""
    assert config.target_pace is not None
    assert config.draft_pace is not None
    pace = config.target_pace
    return Timing(config.draft_pace, lambda fed: pace)
