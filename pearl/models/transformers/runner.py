"""Any Hugging Face causal language model as a `ModelRunner`, for one sequence at a time.

This module knows the conventions of transformers' caches and forwards.  It must not know where
models come from (`loading`), nor what their logits are used for.
"""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from pearl.errors import ForwardError, ModelError
from pearl.models.out_of_memory import is_of_memory
from pearl.models.runner import Capabilities, Feed, ModelRunner, Tokens, check_feeds, feed_chain
from pearl.models.transformers import SNAPSHOTS
from pearl.models.transformers.cache_layers import (
    FixedLayer,
    Snapshots,
    cache_name,
    layers_of,
    sizes_of,
)
from pearl.printable import cause_of

log = logging.getLogger(__name__)

_TRIED = 8  # tokens of the trial at construction
# Least cosine of logits that are equal up to rounding.
_ALIKE = {"float32": 0.99999, "float64": 0.99999}
# Least median of these cosines in half precision: in some rows rounding may choose other experts.
_ALIKE_IN_HALF = 0.97
# Settings that bound the number of logits. Inkling and Apertus 1.5 have logits of the first tokens
# only.
_NUM_LOGITS = ("vocab_size", "unpadded_vocab_size", "output_vocab_size")
# Most tokens of a forward of a model with recurrent state. The state is copied before each forward.
PIECE = 512


class HFRunner(ModelRunner):
    """Runs a loaded model, which stays where it was loaded, on one device or several.

    The constructor tries the model on a short text. It raises `ModelError` if that fails, or if the
    logits depend on how the text is cut into forwards.

    Args:
        is_tried: whether an earlier runner has tried this model. A model with recurrent layers is
            tried again anyway.
        keeps_states: whether to keep the last hidden states of the tokens fed, for a head that is a
            layer for multi-token prediction.
    """

    capabilities = Capabilities()  # one chain; not row invariant, as kernels depend on its length

    def __init__(
        self,
        model: PreTrainedModel,
        context: int,
        is_tried: bool = False,
        keeps_states: bool = False,
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config(decoder=True)
        layers = _layers(model, context)
        self.snapshots = Snapshots(layers)
        self._cache = Cache(layers=layers)
        self._length = 0
        self.context = context
        sizes = [getattr(config, name, None) for name in _NUM_LOGITS]
        self.vocab_size: int = min(filter(None, sizes))
        # With a device map the outermost hook moves the logits back to the input's device.
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        self.weights = str(model.dtype).removeprefix("torch.")
        self._positions = torch.arange(context, device=self.device)[None]  # [1, context]
        # [1, context], ids of the tokens fed: after a rollback some of them are fed again.
        self._fed = torch.zeros_like(self._positions)
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model)
        self._takes_positions = "position_ids" in parameters
        self._takes_rows = "logits_to_keep" in parameters
        # Bytes of keys and values for the whole context, and of recurrent states with their copies.
        self.cache_bytes = 0
        self._is_single = False  # whether tokens that follow others must be fed one by one
        # Last hidden states of the last feed, [n, hidden] for each piece.
        self._hidden: list[torch.Tensor] = []
        if keeps_states:
            self.capabilities = Capabilities(features=config.hidden_size)
            model.get_decoder().register_forward_hook(self._keep_hidden)
        if self.snapshots or not is_tried:
            self._try()
        if self.snapshots.unknown:
            kinds = sorted({type(layer).__name__ for layer in self.snapshots.unknown})
            log.warning(
                "%s cannot roll its cache back (%s): after a rejected token all tokens are fed again. Use --method ar",
                type(model).__name__,
                ", ".join(kinds),
            )

    def _keep_hidden(self, module: object, inputs: object, outputs: Any) -> None:
        self._hidden.append(outputs[0][0])

    @property
    def _layers(self) -> list[FixedLayer]:
        """The cache's layers of keys and values.

        They are read anew each time, because the first forward of some models appends further
        layers to the cache.  Dory, for example, runs some of its layers several times, and appends
        cache layers for each further time.
        """
        return [layer for layer in self._cache.layers if isinstance(layer, FixedLayer)]

    def length(self, slot: int = 0) -> int:
        return self._length

    def forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        check_feeds(feeds, self, "the general path through transformers")
        (feed,) = feeds
        end = self._length + len(feed.tokens)
        self._fed[:, self._length : end] = self._ids(feed.tokens)
        start = self.snapshots.length
        self._hidden.clear()
        # `features` returns only this feed's tokens. After a rollback to a copy of the state, the
        # forward also feeds earlier tokens again.
        self._num_fed = len(feed.tokens)
        pieces = []
        try:
            for stop in self._pieces(start, end):
                # A piece's rows are those of the last `feed.rows` tokens that are in it.
                pieces.append(self._extend(stop, max(0, feed.rows - (end - stop))))
        except BaseException as error:
            self.snapshots.rollback(start)  # a state may have changed in part
            self.rollback(self._length)
            is_of_model = isinstance(error, (IndexError, RuntimeError)) and not is_of_memory(error)
            if is_of_model and self.device.type == "cpu":
                # Its cause may be a limit that the configuration does not name. After such an error a GPU
                # computes nothing more.
                raise ForwardError(
                    f"{type(self.model).__name__}'s forward failed: {cause_of(error)}."
                ) from error
            raise
        self._length = end
        # Copied outside of inference mode: the caller's rows are ordinary tensors, and writable.
        logits = pieces[0]
        if len(pieces) > 1:
            logits = torch.cat(pieces)
        return [logits.to(self.device, torch.float32, copy=True)]

    def features(self, slot: int = 0) -> torch.Tensor:
        """Return the model's final hidden states [n, capabilities.features] of the tokens of the last feed."""
        return torch.cat(self._hidden)[-self._num_fed :]

    def _pieces(self, start: int, end: int) -> list[int]:
        """Return the ends of the forwards that together feed the tokens from `start` to `end`."""
        if not self.snapshots:
            return [end]
        step = PIECE
        if self._is_single:
            step = 1
        piece_end = start + step
        if not start:
            piece_end = PIECE
        pieces = list(range(piece_end, end, step))
        pieces.append(end)
        return pieces

    @torch.inference_mode()
    def _extend(self, end: int, rows: int) -> torch.Tensor:
        """Feed the tokens after those in the cache, up to `end`.

        Return the logits [n, vocab] of the last n of these tokens, with n at most `rows`.
        """
        start = self.snapshots.length
        self.snapshots.advance(end)
        rows = min(rows, end - start)
        # No mask: each model derives its own from the cache, in under 0.1 ms.
        inputs: dict[str, Any] = {
            "input_ids": self._fed[:, start:end],
            self.cache_name: self._cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = self._positions[:, start:end]
        if self._takes_rows:
            inputs["logits_to_keep"] = max(rows, 1)  # 0 would mean all
        logits: torch.Tensor = self.model(**inputs).logits
        for layer in self._layers:
            if layer.filled != end:
                name = type(self.model).__name__
                raise ModelError(
                    f"{name} does not keep its state in the cache it is given. Use another model."
                )
        return logits[0, logits.shape[1] - rows :]

    def rollback(self, length: int, slot: int = 0) -> None:
        assert 0 <= length <= self._length
        self._length = length
        state_length = self.snapshots.rollback(length)
        for layer in self._layers:
            layer.rollback(state_length)

    def _try(self) -> None:
        """Feed a text in three ways: at once, in pieces after a rollback, and without a cache.

        Raises `ModelError` if a forward fails, or if the logits differ.
        """
        name = type(self.model).__name__
        count = min(_TRIED, self.context)
        tokens = [self.vocab_size * (place + 1) // (count + 2) for place in range(count)]
        half = count // 2
        try:
            if self.snapshots and half > 1:
                self._is_single = not self._continues(tokens[: half + 2])
            rows = feed_chain(self, tokens, count)
            sizes = sizes_of(self._cache.layers)
            self.cache_bytes = self.context * sizes.position + (1 + SNAPSHOTS) * sizes.states
            self.rollback(half)
            pieces = [rows[:half]]
            for part in (tokens[half : half + 1], tokens[half + 1 : half + 2], tokens[half + 2 :]):
                if part:
                    pieces.append(feed_chain(self, part, len(part)))
            with torch.inference_mode():
                outputs = self.model(input_ids=self._ids(tokens), use_cache=False)
            uncached = outputs.logits[0].to(self.device, torch.float32)
        except Exception as error:
            if isinstance(error, ModelError) or is_of_memory(error):
                raise
            cause = cause_of(error.__cause__ or error)
            raise ModelError(
                f"{name} cannot be used here: a trial forward failed: {cause}. Use another model."
            ) from error
        finally:
            self.rollback(0)
        if self._differ(rows, torch.cat(pieces), half):
            raise ModelError(
                f"{name} cannot be used here: a token's logits depend on which tokens are fed with it. Use another "
                "model."
            )
        if self._differ(rows, uncached):
            raise ModelError(
                f"{name} cannot be used here: its own forward counts positions otherwise than generate, from 0: "
                "models of RoBERTa's kind begin behind their padding index. Use another model."
            )

    def _continues(self, tokens: list[int]) -> bool:
        """Return whether a forward of two tokens reads all of the recurrent state before them.

        Mamba's forward does not. To find out, each kind of state is changed in turn; if a change
        leaves the logits as they are, the forward did not read that state.
        """
        rows: list[torch.Tensor] = []
        kinds = [""]  # the kind of state that each trial disturbs; "": none
        while len(rows) < len(kinds):
            self.rollback(0)
            feed_chain(self, tokens[:-2], 0)
            kinds = [""]
            kinds += self.snapshots.kinds()
            kind = kinds[len(rows)]
            if kind:
                self.snapshots.disturb(kind)
            rows.append(feed_chain(self, tokens[-2:], 1))
        self.rollback(0)
        return not any(torch.equal(rows[0], disturbed) for disturbed in rows[1:])

    def _differ(self, rows: torch.Tensor, expected: torch.Tensor, start: int = 0) -> bool:
        """Return whether logits differ by more than rounding, from the row `start` on."""
        alike = _cosines(rows, expected)[start:]
        if self.weights in _ALIKE:
            return bool((alike < _ALIKE[self.weights]).any())
        return bool(alike.median() < _ALIKE_IN_HALF)

    def _ids(self, tokens: Tokens) -> torch.Tensor:
        """Return token ids [1, n] on the device, without waiting until they are there."""
        if isinstance(tokens, torch.Tensor):
            return tokens[None]
        on_gpu = self.device.type == "cuda"
        ids = torch.tensor([list(tokens)], dtype=torch.long, pin_memory=on_gpu)
        return ids.to(self.device, non_blocking=True)


def _cosines(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarity [n] of each row of `rows` and the same row of `expected`, both [n, vocab].

    The mean of each row is subtracted first.  Rows that are nearly equal get 1.  Two sorts of
    columns are left out: those with an infinite logit, and those whose logits are all the same.
    A model may set the logits of some tokens to -1e9, which would outweigh all other logits.
    """
    pair = torch.stack((rows, expected)).double()
    fixed = (pair == pair[0, 0]).flatten(0, 1).all(0) | ~pair.isfinite().all(0)
    counts = (~fixed).double()
    pair = pair.masked_fill(fixed, 0.0)
    means = pair.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)
    ours, theirs = (pair - means) * counts
    close = (ours - theirs).abs().amax(-1) <= 1e-5 * pair[0].abs().amax(-1)
    return torch.where(close, 1.0, torch.nn.functional.cosine_similarity(ours, theirs, dim=-1))


def _layers(model: PreTrainedModel, context: int) -> list[Any]:
    """Return the model's cache layers for `context` tokens. Raises `ModelError` for a model that cannot be used."""
    name = type(model).__name__
    config = model.config
    text = config.get_text_config(decoder=True)
    doubtful = (
        getattr(config, "is_decoder", None) is False
        or not getattr(config, "is_causal", True)
        or not getattr(text, "is_causal", True)
        # Gemmas that embed texts. In other Gemmas only tokens of a picture attend to later ones.
        or getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision")
    )
    if config.is_encoder_decoder or (doubtful and not _is_causal(model)):
        raise ModelError(f"{name} is not a decoder-only language model. Use a causal one.")
    if text.model_type == "doge":
        raise ModelError(
            f"{name} cannot be used here: which tokens it attends to, or which experts it takes, depends on the tokens "
            "that are fed with it. Use a model of another family."
        )
    return layers_of(config, context)


def _is_causal(model: PreTrainedModel) -> bool:
    """Return whether a model is causal: a token's logits do not depend on later tokens.

    The model is run to find out, because a configuration can be wrong: GPT-NeoX is causal, but its
    configuration says `is_decoder=False`.
    """
    device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
    with torch.inference_mode():
        rows = []
        for tokens in ([0, 1, 1, 1], [0, 2, 3, 4]):
            ids = torch.tensor([tokens], device=device)
            rows.append(model(input_ids=ids, use_cache=False).logits[0, 0])
    return torch.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-4 * float(rows[0].abs().max()))
