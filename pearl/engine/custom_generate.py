"""Our decoding behind `model.generate(custom_generate=...)` of transformers: models that the caller has loaded.

`launch/hub` is the folder that a hub repository holds; it calls `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, generation

from pearl.config import RequestOptions
from pearl.engine.request import submission
from pearl.errors import ConfigError
from pearl.execution.pair import decode
from pearl.models.checkpoints.loading import context_of
from pearl.models.transformers.runner import HFRunner
from pearl.protocol.messages import Submit
from pearl.text.tokenizer import GenerationDefaults, unsupported_options

_METHODS = ("ar", "ngram", "sd")
_TAKEN = {
    "inputs",
    "input_ids",
    "attention_mask",
    "generation_config",
    "stopping_criteria",
    *vars(GenerationConfig()),
}
_REFUSED = (
    *(
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
        "prompt_lookup_num_tokens",
    ),
    *("cache_implementation", "renormalize_logits", "remove_invalid_values"),
)
_tried: WeakSet[PreTrainedModel] = WeakSet()  # a trial takes several forwards


def generate(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    streamer: Any = None,
    method: str | None = None,
    gamma: int | None = None,
    seed: int | None = None,
    **given: Any,
) -> Any:
    """What `model.generate` calls with its own arguments, `given`; returns what it would.

    Args:
        method: ar, ngram (the default without an assistant), or sd.
        gamma: draft tokens a step; default: by the measured speeds.
        seed: one sampled text a seed, whatever the method; default: torch's generator. Rows of a batch are its samples.

    Raises `ConfigError` for an argument that is not supported, `ModelError` for a model or a length.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if refused := [*sorted(given.keys() - _TAKEN), *unsupported_options(given, True)]:
        raise ConfigError(f"pearl's custom_generate does not take {', '.join(refused)}")
    models = (
        [model]
        if assistant_model is None or method in ("ar", "ngram")
        else [model, assistant_model]
    )
    method = method or _METHODS[len(models)]
    if method not in _METHODS[: len(models) + 1]:
        raise ConfigError(f"method {method!r} is not ar, ngram, or sd; sd needs an assistant_model")
    decoding = RequestOptions(method=method, rule="coupled", gamma=gamma)
    modes = [each.training for each in models]
    try:
        run: Any = model.generate
        return run(
            custom_generate=_Call(models, decoding, streamer, seed).decode,
            streamer=streamer,
            **given,
        )
    finally:
        for each, is_training in zip(models, modes, strict=True):
            each.train(is_training)


def _params(config: GenerationConfig, seed: int | None) -> RequestOptions:
    """Raises `ConfigError` for options that are not supported."""
    samples = bool(config.do_sample)
    refused = [name for name in _REFUSED if getattr(config, name, None)]
    if refused := [*unsupported_options(config.to_dict(), samples), *refused]:
        raise ConfigError(f"pearl's custom_generate does not take {', '.join(refused)}")
    filters = (
        {name: getattr(config, name) for name in ("top_k", "top_p", "min_p")} if samples else {}
    )
    return RequestOptions(
        temperature=(1.0 if config.temperature is None else config.temperature) if samples else 0.0,
        repetition_penalty=config.repetition_penalty,
        seed=int(torch.randint(2**53, ())) if seed is None else seed,
        **filters,
    )


@dataclass(frozen=True)
class _Call:
    """One call of `generate`."""

    models: Sequence[PreTrainedModel]
    decoding: RequestOptions
    streamer: Any
    seed: int | None

    def decode(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        stopping_criteria: generation.StoppingCriteriaList,
        generation_config: GenerationConfig,
        **prepared: Any,
    ) -> Any:
        """The decoding loop that transformers calls: input_ids [batch, n], its rows one after the other."""
        if self.streamer is not None and len(input_ids) > 1:
            raise ConfigError("a streamer takes one text, not a batch")
        params, limit = _params(generation_config, self.seed), int(generation_config.max_length)
        contexts = [context_of(type(model).__name__, model, limit)]
        contexts += [
            min(limit, context_of(type(each).__name__, each, None)) for each in self.models[1:]
        ]
        pairs = zip(self.models, contexts, strict=True)
        runners = [HFRunner(each, context, is_tried=each in _tried) for each, context in pairs]
        _tried.update(self.models)
        eos, pad = (
            getattr(generation_config, f"_{name}_token_tensor", None) for name in ("eos", "pad")
        )
        defaults = GenerationDefaults(eos=() if eos is None else tuple(eos.flatten().tolist()))
        ours = generation.MaxLengthCriteria, generation.EosTokenCriteria
        criteria = generation.StoppingCriteriaList(
            each for each in stopping_criteria if not isinstance(each, ours)
        )
        mask, rows = prepared.get("attention_mask"), []
        for sample, ids in enumerate(input_ids):
            given = {"sample": sample, "max_tokens": limit - len(ids)}
            prompt = (ids if mask is None else ids[mask[sample] != 0]).tolist()
            submit = submission(
                1, prompt, limit, params.changed(**given).overridden_by(self.decoding), defaults
            )
            rows.append(self._text(ids, submit, runners, criteria))
        found: Any = pad_sequence(
            rows, batch_first=True, padding_value=0 if pad is None else int(pad)
        )
        return (
            generation.GenerateDecoderOnlyOutput(sequences=found)
            if generation_config.return_dict_in_generate
            else found
        )

    def _text(
        self,
        ids: torch.Tensor,
        submit: Submit,
        runners: Sequence[HFRunner],
        criteria: generation.StoppingCriteriaList,
    ) -> torch.Tensor:
        """`ids` [n], and what is generated behind them."""
        for runner in runners:
            runner.rollback(0)
        for token in (
            token for committed in decode(submit, *runners) for token in committed.tokens
        ):
            ids = torch.cat((ids, ids.new_tensor([token])))
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if criteria and bool(criteria(ids[None], None).all()):
                break
        if self.streamer is not None:
            self.streamer.end()
        return ids
