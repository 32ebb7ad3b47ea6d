"""Our decoding behind `model.generate(custom_generate=...)` of transformers: models that the caller has loaded.

`launch/hub` is the folder that a hub repository holds; it calls `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from pearl.config import DecodingConfig, SamplingParams
from pearl.engine.request import submission
from pearl.errors import ConfigError
from pearl.execution.pair import decode
from pearl.models.checkpoints.loading import context_of
from pearl.models.hf import HFRunner
from pearl.protocol.messages import Submit
from pearl.text.tokenizer import GenerationDefaults, unsupported_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

METHODS = ("ar", "ngram", "sd")
_TAKEN = {"inputs", "input_ids", "attention_mask", "generation_config", "stopping_criteria", *vars(GenerationConfig())}
_OF_LOADING = ("revision", "token", "cache_dir", "local_files_only")  # of this code, for transformers
_REFUSED = (
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "prompt_lookup_num_tokens"),
    *("cache_implementation", "renormalize_logits", "remove_invalid_values"),
)
_tried: WeakSet[PreTrainedModel] = WeakSet()


def generate(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    method: str | None = None,
    rule: str = "coupled",
    gamma: int | None = None,
    seed: int | None = None,
    **given: Any,
) -> Any:
    """What `model.generate` calls with its own arguments; returns what it would.

    Args:
        method: ar, ngram, or sd, which needs an assistant; default: sd where there is one, else ngram.
        rule: how drafts are accepted under sampling; coupled, the default, gives one text a seed whatever the method.
        gamma: draft tokens a step; default: chosen by the measured speeds.
        seed: of sampled texts; default: drawn from torch's generator. Rows of a batch are its samples 0, 1, ...
        given: those of `generate`, which transformers prepares.

    Raises:
        ConfigError: an argument is not supported.
        ModelError: a model cannot be rolled back, or its context is too short.
    """
    given = {name: value for name, value in given.items() if value is not None and name not in _OF_LOADING}
    if refused := [*sorted(given.keys() - _TAKEN), *unsupported_options(given, True)]:
        raise ConfigError(f"pearl's custom_generate does not take {', '.join(refused)}")
    method = method or ("ngram" if assistant_model is None else "sd")
    if method not in METHODS or (method == "sd" and assistant_model is None):
        raise ConfigError(f"method {method!r} is not one of {', '.join(METHODS)}, or sd without an assistant_model")
    decoding = DecodingConfig(method=method, rule=rule, gamma=gamma)
    models = [model] if method != "sd" or assistant_model is None else [model, assistant_model]
    modes = [each.training for each in models]
    try:
        run: Any = model.generate
        return run(custom_generate=_Call(models, decoding, streamer, seed).decode, streamer=streamer, **given)
    finally:
        for each, is_training in zip(models, modes, strict=True):
            each.train(is_training)


def _params(config: GenerationConfig, seed: int | None) -> SamplingParams:
    """Raises `ConfigError` for options that are not supported."""
    samples = bool(config.do_sample)
    refused = [name for name in _REFUSED if getattr(config, name, None)]
    if refused := [*unsupported_options(config.to_dict(), samples), *refused]:
        raise ConfigError(f"pearl's custom_generate does not take {', '.join(refused)}")
    filters = {name: getattr(config, name) for name in ("top_k", "top_p", "min_p")} if samples else {}
    return SamplingParams(
        temperature=(1.0 if config.temperature is None else config.temperature) if samples else 0.0,
        repetition_penalty=config.repetition_penalty,
        seed=int(torch.randint(2**53, ())) if seed is None else seed,
        **filters,
    )


@dataclass(frozen=True)
class _Call:
    """One call of `generate`."""

    models: Sequence[PreTrainedModel]
    decoding: DecodingConfig
    streamer: BaseStreamer | None
    seed: int | None

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **prepared: Any,
    ) -> Any:
        """The decoding loop that transformers calls: input_ids [batch, n], its rows one after the other."""
        if self.streamer is not None and len(input_ids) > 1:
            raise ConfigError("a streamer takes one text, not a batch")
        params, limit = _params(generation_config, self.seed), int(generation_config.max_length)
        contexts = [context_of(type(model).__name__, model, limit)]
        contexts += [min(limit, context_of(type(each).__name__, each, None)) for each in self.models[1:]]
        runners = [_runner(*each) for each in zip(self.models, contexts, strict=True)]
        eos, pad = (getattr(generation_config, f"_{name}_token_tensor", None) for name in ("eos", "pad"))
        defaults = GenerationDefaults(eos=() if eos is None else tuple(eos.flatten().tolist()))
        ours = MaxLengthCriteria, EosTokenCriteria
        criteria = StoppingCriteriaList(each for each in stopping_criteria if not isinstance(each, ours))
        mask, rows = prepared.get("attention_mask"), []
        for sample, ids in enumerate(input_ids):
            given = {"sample": sample, "max_tokens": limit - len(ids)}
            prompt = (ids if mask is None else ids[mask[sample] != 0]).tolist()
            submit = submission(1, prompt, limit, params.model_copy(update=given), defaults, self.decoding)
            rows.append(self._text(ids, submit, runners, criteria))
        found: Any = pad_sequence(rows, batch_first=True, padding_value=0 if pad is None else int(pad))
        return GenerateDecoderOnlyOutput(sequences=found) if generation_config.return_dict_in_generate else found

    def _text(
        self, ids: torch.Tensor, submit: Submit, runners: Sequence[HFRunner], criteria: StoppingCriteriaList
    ) -> torch.Tensor:
        """`ids` [n], and what is generated behind them."""
        for runner in runners:
            runner.rollback(0)
        for token in (token for committed in decode(submit, *runners) for token in committed.tokens):
            ids = torch.cat((ids, ids.new_tensor([token])))
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if criteria and bool(criteria(ids[None], None).all()):
                break
        if self.streamer is not None:
            self.streamer.end()
        return ids


def _runner(model: PreTrainedModel, context: int) -> HFRunner:
    """Tries each model once: each `generate` makes a runner, whose trial takes several forwards."""
    runner = HFRunner(model, context, is_tried=model in _tried)
    _tried.add(model)
    return runner
