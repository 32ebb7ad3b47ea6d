"""Decoding for `model.generate(custom_generate=...)` of transformers, with models of the caller.

`launch/hub` is the content of a hub repository for custom_generate. The code there calls
`generate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
} | set(vars(GenerationConfig()))
_REFUSED = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "prompt_lookup_num_tokens",
    "cache_implementation",
    "renormalize_logits",
    "remove_invalid_values",
)
_tried: WeakSet[PreTrainedModel] = WeakSet()  # models whose runners need not try them again


def generate(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    streamer: Any = None,
    method: str | None = None,
    gamma: int | None = None,
    seed: int | None = None,
    **arguments: Any,
) -> Any:
    """Decode for `model.generate`, which passes its own `arguments`; return what `model.generate` would return.

    Args:
        model: the target.
        assistant_model: the draft; None for methods ar and ngram.
        streamer: a streamer of transformers; None if there is none.
        method: ar, ngram or sd. The default is sd with an assistant model, and ngram without one.
        gamma: draft tokens per step; by default chosen by measured speeds.
        seed: the seed of random draws, by default drawn from torch's generator. A seed gives the
            same text with every method. Rows of a batch are different samples of the seed.

    Raises `ConfigError` for an argument that is not supported, and `ModelError` for a model or a
    length that is not supported.
    """
    arguments = {name: value for name, value in arguments.items() if value is not None}
    _refuse(sorted(arguments.keys() - _TAKEN) + list(unsupported_options(arguments, True)))
    models = [model]
    if assistant_model is not None and method not in ("ar", "ngram"):
        models.append(assistant_model)
    method = method or _METHODS[len(models)]
    if method not in _METHODS[: len(models) + 1]:
        raise ConfigError(f"method {method!r} is not ar, ngram, or sd; sd needs an assistant_model")
    decoding = RequestOptions(method=method, rule="coupled", gamma=gamma)
    modes = [model.training for model in models]
    try:
        run: Any = model.generate
        return run(
            custom_generate=_Call(models, decoding, streamer, seed).decode,
            streamer=streamer,
            **arguments,
        )
    finally:
        for model, is_training in zip(models, modes, strict=True):
            model.train(is_training)


def _refuse(names: list[str]) -> None:
    if names:
        raise ConfigError(f"pearl's custom_generate does not take {', '.join(names)}")


def _params(config: GenerationConfig, seed: int | None) -> RequestOptions:
    """Return transformers' options as ours. Raises `ConfigError` for options that are not supported."""
    samples = bool(config.do_sample)
    refused = [name for name in _REFUSED if getattr(config, name, None)]
    _refuse(list(unsupported_options(config.to_dict(), samples)) + refused)
    if seed is None:
        seed = int(torch.randint(2**53, ()))
    options = RequestOptions(
        temperature=0.0, repetition_penalty=config.repetition_penalty, seed=seed
    )
    if not samples:
        return options
    return options.changed(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
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
        """Decode the rows of input_ids [batch, n] one after the other.

        transformers calls this instead of its own decoding loop.
        """
        if self.streamer is not None and len(input_ids) > 1:
            raise ConfigError("a streamer takes one text, not a batch")
        params = _params(generation_config, self.seed)
        limit = int(generation_config.max_length)
        runners = self._runners(model, limit)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        defaults = GenerationDefaults(eos=() if eos is None else tuple(eos.flatten().tolist()))
        replaced = generation.MaxLengthCriteria, generation.EosTokenCriteria
        criteria = generation.StoppingCriteriaList()
        for criterion in stopping_criteria:
            if not isinstance(criterion, replaced):
                criteria.append(criterion)
        mask = prepared.get("attention_mask")
        rows = []
        for sample, ids in enumerate(input_ids):
            prompt = ids if mask is None else ids[mask[sample] != 0]
            options = params.changed(sample=sample, max_tokens=limit - len(ids))
            options = options.overridden_by(self.decoding)
            submit = submission(1, prompt.tolist(), limit, options, defaults)
            rows.append(self._text(ids, submit, runners, criteria))
        padding = 0 if pad is None else int(pad)
        texts: Any = pad_sequence(rows, batch_first=True, padding_value=padding)
        if generation_config.return_dict_in_generate:
            return generation.GenerateDecoderOnlyOutput(sequences=texts)
        return texts

    def _runners(self, target: PreTrainedModel, limit: int) -> list[HFRunner]:
        """Return a runner for each model.

        Raises `ModelError` if the target's context is shorter than `limit` tokens.
        """
        runners = []
        for model in self.models:
            if model is self.models[0]:
                context = context_of(type(target).__name__, target, limit)
            else:
                context = min(limit, context_of(type(model).__name__, model, None))
            runners.append(HFRunner(model, context, is_tried=model in _tried))
        _tried.update(self.models)
        return runners

    def _text(
        self,
        ids: torch.Tensor,
        submit: Submit,
        runners: Sequence[HFRunner],
        criteria: generation.StoppingCriteriaList,
    ) -> torch.Tensor:
        """Generate one text; return `ids` [n] with the generated tokens appended."""
        for runner in runners:
            runner.rollback(0)
        tokens = chain.from_iterable(committed.tokens for committed in decode(submit, *runners))
        for token in tokens:
            ids = torch.cat((ids, ids.new_tensor([token])))
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if criteria and bool(criteria(ids[None], None).all()):
                break
        if self.streamer is not None:
            self.streamer.end()
        return ids
