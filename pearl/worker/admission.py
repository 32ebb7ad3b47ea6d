"""Which requests a target worker serves."""

from __future__ import annotations

from pearl.config.options import wide_window
from pearl.protocol.messages import Submit
from pearl.spec.methods import MAX_WINDOW
from pearl.spec.stops import STOPS
from pearl.worker.settings import TargetSettings


def problem(submit: Submit, settings: TargetSettings, is_head: bool) -> str | None:
    """Why a request cannot be served; None if it can. `is_head`: whether the draft is a head of the target."""
    if not submit.prompt:
        return "the prompt is empty: give at least one token"
    options = submit.options
    vocab = settings.vocab_size
    context = settings.context
    config = settings.config
    if STOPS[options.draft_stop].is_trained and config.disco is None:
        return f"draft_stop {options.draft_stop} needs a classifier, and this engine was started without --disco"
    if options.method_spec.drafts and not options.commits_draws and is_head:
        return f"a head as a draft serves no text by rule {options.rule}: give rule coupled, or temperature 0"
    if config.slots > 1 and (options.gamma or 0) > MAX_WINDOW:
        return wide_window(options.gamma)
    if max(submit.prompt) >= vocab:
        return f"prompt holds token id {max(submit.prompt)}, the model has ids up to {vocab - 1}"
    beyond = [token for token, _ in options.logit_bias if token >= vocab]
    if beyond:
        return f"logit_bias names token id {beyond[0]}, the model has ids up to {vocab - 1}"
    if submit.limit > context or submit.limit <= len(submit.prompt):
        return f"prompt of {len(submit.prompt)} tokens and limit {submit.limit} do not fit a context of {context}"
    return None
