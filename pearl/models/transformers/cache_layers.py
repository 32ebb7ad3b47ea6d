"""Cache layers that can be rolled back, in place of transformers' layers.

What a layer of transformers keeps decides which layer replaces it:

* A layer that keeps keys and values is replaced by `FixedLayer`.  The layer of transformers may
  keep only the positions of a window or of a chunk; `FixedLayer` keeps all positions.  transformers
  sizes the model's own mask by the positions that the cache layer holds.  So the mask covers all
  positions, and hides those outside of the window.  Some models have an indexer, which chooses the
  positions to attend to; for these models, `FixedLayer` keeps the indexer's keys too.
* A layer that keeps the state of a recurrence or a convolution stays, and `Snapshots` copies its
  state.
* A layer that keeps both is replaced by `HybridLayer`.
* A layer that keeps anything else stays.  For a rollback `Snapshots` empties it, and the text is
  fed again.

This module must not know models or texts.
"""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from pearl.models.transformers import SNAPSHOTS

# Layers without a cache of their own: they attend to another layer's keys (Gemma 3n, Gemma 4) or to none. Not all
# versions of transformers have this class.
_NONE: tuple[Any, ...] = ()
if hasattr(cache_utils, "DummyLayer"):
    _NONE = (cache_utils.DummyLayer,)
_HYBRID = (
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
)


class FixedLayer(DynamicLayer):
    """Keys and values of one layer, in buffers [1, heads, capacity, head_dim].

    The first `filled` positions of the buffers are valid.  An update copies only the new rows,
    while `DynamicLayer` copies all rows.  A rollback copies nothing.

    Attributes:
        keys, values: views of the valid positions. Some models read these attributes directly (Dory).
        indexer_position_ids: [.., filled], the positions of the indexer's keys; the model itself
            appends to them (Qwen4-Exp).
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.filled = 0
        self.indexed = 0
        self.buffers: tuple[torch.Tensor, torch.Tensor] | None = None  # of keys and of values
        self.indexer_keys: torch.Tensor | None = None  # [1, capacity, width]
        self.indexer_position_ids: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate at the first update: only then are head counts, dtypes and devices known."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.buffers = (self._buffer_for(key_states), self._buffer_for(value_states))
        self.is_initialized = True

    def _buffer_for(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        # empty, not zeros: on a CPU the pages of an unused context are then never touched.
        return states.new_empty(batch, heads, self.capacity, width)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [1, heads, n, head_dim]; return views of all valid ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.filled
        self._resize(start + key_states.shape[2])
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys [1, n, width]; return a view of all valid ones."""
        _, count, width = indexer_key_states.shape
        if self.indexer_keys is None:
            self.indexer_keys = indexer_key_states.new_empty(1, self.capacity, width)
        start = self.indexed
        self.indexed += count
        self.indexer_keys[:, start : self.indexed] = indexer_key_states
        return self.indexer_keys[:, : self.indexed]

    def get_seq_length(self) -> int:
        return self.filled

    def rollback(self, length: int) -> None:
        """Forget all but the first `length` positions."""
        self._resize(length)
        self.indexed = length
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these entries of the batch."""
        if self.buffers is not None:
            keys, values = self.buffers
            self.buffers = (keys[indices], values[indices])
            self._resize(self.filled)

    def _resize(self, length: int) -> None:
        """Let `keys` and `values` show the first `length` positions."""
        self.filled = length
        if self.buffers is not None:
            keys, values = self.buffers
            self.keys = keys[:, :, :length]
            self.values = values[:, :, :length]


_FIXED = frozenset(vars(FixedLayer(0)))


class HybridLayer(LinearAttentionLayer, FixedLayer):  # type: ignore[misc,override]
    """A layer with both a recurrent state, and keys and values."""

    def __init__(self, capacity: int, number_of_states: int) -> None:
        FixedLayer.__init__(self, capacity)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *states: Any, **named: Any) -> None:
        """Initialise keys and values, or the recurrent state.

        transformers passes keys and values as positional arguments, and recurrent states by name.
        """
        layer_type = FixedLayer if states else LinearAttentionLayer
        layer_type.lazy_initialization(self, *states, **named)


def layer_for(theirs: object, context: int) -> Any:
    """Return the cache layer that replaces `theirs`, a layer of transformers.

    The new layer has room for `context` tokens.  Return `theirs` itself if it is purely recurrent,
    has no cache, or is of an unknown type.
    """
    if isinstance(theirs, _NONE) or type(theirs) is LinearAttentionLayer:
        return theirs
    if isinstance(theirs, _HYBRID):
        return HybridLayer(context, theirs.number_of_states)
    if type(theirs) in (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer):
        return FixedLayer(context)
    return theirs


def layers_of(config: Any, context: int) -> list[Any]:
    """Return the cache layers of a model for `context` tokens."""
    return [layer_for(layer, context) for layer in DynamicCache(config=config).layers]


class _Snapshot(NamedTuple):
    """The state of each recurrent layer after `length` tokens."""

    length: int
    states: list[dict[str, Any]]


class Snapshots:
    """Copies of the recurrent layers' state at a few earlier lengths, for rollbacks.

    After a rollback to a length without a copy, the next forward feeds some earlier tokens again,
    and can take twice as long.  So a copy is made before each forward: it takes a few milliseconds
    at most.  At most `SNAPSHOTS` copies are kept.  They are closer together at later lengths, so
    that after a rollback by n tokens, fewer than n tokens are fed again.

    Attributes:
        kept: the copies, by ascending length.
        length: number of tokens that the state has seen.
        unknown: layers of unknown types. If there are any, no copies are made, and each rollback
            goes back to length 0.
    """

    def __init__(self, layers: Sequence[object]) -> None:
        self.unknown: list[object] = []
        self._layers: list[object] = []
        for layer in layers:
            if isinstance(layer, LinearAttentionLayer):
                self._layers.append(layer)
            elif not isinstance(layer, (FixedLayer, *_NONE)):
                self._layers.append(layer)
                self.unknown.append(layer)
        self._empty = deepcopy(list(map(_state, self._layers)))
        self.kept: list[_Snapshot] = []
        self.length = 0

    def __bool__(self) -> bool:
        """Return whether any layer has recurrent or unknown state."""
        return bool(self._layers)

    def advance(self, end: int) -> None:
        """Copy the state if it has changed, and record that the next forward ends at `end`."""
        newest = self.kept[-1].length if self.kept else 0
        if self and not self.unknown and newest < self.length:
            states = [_copy(_state(layer)) for layer in self._layers]
            self.kept.append(_Snapshot(self.length, states))
            if len(self.kept) > SNAPSHOTS:
                self._thin()
        self.length = end

    def rollback(self, length: int) -> int:
        """Roll the state back to `length` tokens, or to fewer if there is no copy of that length.

        Return the number of tokens that the state has seen then. The tokens after these must be fed
        again.
        """
        if length >= self.length:
            return self.length
        if not self:
            self.length = length
            return length
        while self.kept and self.kept[-1].length > length:
            self.kept.pop()
        if self.kept:
            # The copy becomes the state, and the next forward makes a new copy.
            snapshot = self.kept.pop()
        else:
            snapshot = _Snapshot(0, deepcopy(self._empty))
        self.length = snapshot.length
        for layer, state in zip(self._layers, snapshot.states, strict=True):
            vars(layer).update(state)
        return self.length

    def kinds(self) -> list[str]:
        """Return the names of the attributes in which the recurrent layers now hold tensors."""
        names = set()
        for layer in self._layers:
            if layer in self.unknown:
                continue
            for name, value in _state(layer).items():
                if _tensors(value):
                    names.add(name)
        return sorted(names)

    @torch.inference_mode()
    def disturb(self, kind: str) -> None:
        """Change all state of one of the `kinds`, to see whether the next forward depends on it."""
        for layer in self._layers:
            for state in _tensors(vars(layer).get(kind)):
                state += 1

    def _thin(self) -> None:
        """Drop the copy with the least quotient gap / age.

        The gap is the number of tokens between the copy's two neighbours.  The age is the number of
        tokens that the state has seen since the copy was made.
        """
        losses = []
        gap_start = 0
        for snapshot, following in pairwise(self.kept):
            gap = following.length - gap_start
            age = self.length - snapshot.length
            losses.append(gap / age)
            gap_start = snapshot.length
        del self.kept[losses.index(min(losses))]


def _state(layer: object) -> dict[str, Any]:
    """Return all attributes of a layer; for a `HybridLayer`, only those of its recurrent part."""
    state = dict(vars(layer))
    if isinstance(layer, LinearAttentionLayer):
        for name in _FIXED:
            state.pop(name, None)
    return state


def _copy(value: Any) -> Any:
    """Return a copy of a layer's attribute, with copies of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if not isinstance(value, dict):
        return value
    return {name: _copy(item) for name, item in value.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a layer's attribute."""
    items = [value]
    if isinstance(value, dict):
        items = list(value.values())
    tensors = []
    for item in items:
        if isinstance(item, torch.Tensor) and item.is_floating_point():
            tensors.append(item)
    return tensors


class CacheSizes(NamedTuple):
    """The bytes of keys and values for each position, and the bytes of all recurrent state."""

    position: int
    states: int


def cache_sizes(model: PreTrainedModel, item: int) -> CacheSizes:
    """Return the sizes of a model's cache, as `sizes_of` measures them after one token was fed.

    The model may be on the device "meta".  `item` is as in `sizes_of`.
    """
    layers = layers_of(model.config, 1)
    with torch.inference_mode():
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, **{cache_name(model): Cache(layers=layers)})
    return sizes_of(layers, item)


def sizes_of(layers: Sequence[object], item: int = 0) -> CacheSizes:
    """Return the sizes of cache layers, which must have been fed some tokens.

    Args:
        item: the least number of bytes that is counted for each element of a tensor.
    """
    position = 0
    states = 0
    for layer in layers:
        if isinstance(layer, FixedLayer):
            buffers = [layer.indexer_keys]
            if layer.buffers is not None:
                buffers += layer.buffers
            size = 0
            for buffer in buffers:
                if buffer is not None:
                    size += _nbytes(buffer, item)
            position += size // layer.capacity
        if isinstance(layer, LinearAttentionLayer):
            for value in _state(layer).values():
                for tensor in _tensors(value):
                    states += _nbytes(tensor, item)
    return CacheSizes(position, states)


def _nbytes(states: torch.Tensor, item: int) -> int:
    return states.numel() * max(item, states.itemsize)


def cache_name(model: torch.nn.Module) -> str:
    """Return the name of the forward's parameter for the cache. It was renamed in transformers 5.24."""
    if "cache" in inspect.signature(model.forward).parameters:
        return "cache"
    return "past_key_values"
