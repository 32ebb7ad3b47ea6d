"""Simulate an emulated pair (forwards last a given time) in virtual time: an upper bound for its real run.

Run and simulation share models, seed and decisions; in the simulation messages and the runtime's own work take no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pearl.config import DecodingConfig, EngineConfig, SamplingParams
from pearl.engine.request import submission
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.metrics import Statistics
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


WAITS, DRAWS, BETWEEN = "waiting for the draft", "judging and draws", "between forwards"


def lost(real: Statistics, virtual: Outcome) -> dict[str, float]:
    """Where the target's loop spent the time that the same request does not take under the virtual clock.

    Returns:
        Shares of the real time, from the start of the prefill to the last commit: `WAITS`, for draft tokens that come
        later than after the paced forwards alone; `DRAWS`, in judging and sampling; `BETWEEN`, in messages and the
        loop's own work. They add up to 1 - the share of the simulated speed.
    """
    seconds = real.seconds - real.queue_seconds
    waits = sum(real.target_wait_seconds.values()) - sum(virtual.watch.waits.values())
    draws = real.target_busy_seconds - virtual.watch.busy
    rest = seconds - virtual.seconds - waits - draws
    return {name: share / seconds for name, share in ((WAITS, waits), (DRAWS, draws), (BETWEEN, rest))}
