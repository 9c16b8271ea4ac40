"""The caches of a decoder's rows on the layers of the host's own cache: `RowState` has the `CacheState` of one.

transformers changes a layer's keys and values through methods of the layer: beams reorder its rows. The class of a
layer that carries a state is therefore replaced by a subclass that does the same to the state. No function or class of
transformers is changed.
"""

from collections.abc import Callable
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from mnemos.memory.row_blocks import CacheState
from mnemos.ops.precision import autocasts
from mnemos.types import InputError

GIVE = "give a new transformers.DynamicCache, or none"
_EXPECTED = "expected a cache with a layer for each attention"


class RowState:
    """What a layer of a host's cache carries for one gated cache: its state, and how many tokens it has read."""

    def __init__(self) -> None:
        self.length = 0  # with padding
        self.state: CacheState | None = None  # None: new rows
        self._projected: tuple[Tensor, ...] = ()  # a cache, and what was computed of it
        self._precision: torch.dtype | None = None  # autocast's, when that was computed

    @property
    def rows(self) -> int | None:
        """The number of rows; None before the first token."""
        return None if self.state is None else len(self.state.seen)

    def current(self) -> CacheState | None:
        """The state; None: the rows are new."""
        return self.state

    def extend(self, t: int, state: CacheState) -> None:
        """Go on to the state after a call of t tokens."""
        self.length += t
        self.state = state

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache), kept until the cache or autocast's type changes: keys and values change once per block."""
        device = cache.device.type
        precision = torch.get_autocast_dtype(device) if autocasts(device) else None
        if not self._projected or self._projected[0] is not cache or self._precision != precision:
            self._projected, self._precision = (cache, *compute(cache)), precision
        return self._projected[1:]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to each tensor, as to select rows."""
        if self.state is None:
            return
        before, self.state = self.state.cache, self.state.map(fn)
        same = bool(self._projected) and self._projected[0] is before
        self._projected = (self.state.cache, *map(fn, self._projected[1:])) if same else ()


@once
def _make_carrying(layer: type) -> Any:
    """The subclass of a class of cache layers that carries the state of a gated cache."""

    class Carrying(layer):
        _layer_type = None  # transformers registers each subclass that has one, in place of its parent
        is_croppable = False  # else generate reads a token too many on some devices, and takes it back
        mnemos_gated: RowState | None = None

        def reorder_cache(self, beam_idx: Tensor) -> None:
            super().reorder_cache(beam_idx)
            self._map_gated(lambda x: x.index_select(0, beam_idx.to(x.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._map_gated(lambda x: x.repeat_interleave(repeats, 0))

        def batch_select_indices(self, indices: Any) -> None:
            super().batch_select_indices(indices)
            self._map_gated(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

        def crop(self, tokens_to_remove: int) -> None:
            """Raises InputError for tokens that a gated cache has read: its updates do not go back."""
            if self.mnemos_gated is not None and tokens_to_remove:
                raise InputError(
                    f"crop: expected no tokens to take back from gated caches, found {abs(tokens_to_remove)}; generate "
                    "without drafts and assistants, or go on from a copy.deepcopy of the cache"
                )
            super().crop(tokens_to_remove)

        def reset(self) -> None:
            super().reset()
            self.mnemos_gated = None

        # `LinearisedLayer`, which `layer` may be, has a `_map` for the rest.
        def _map_gated(self, fn: Callable[[Tensor], Tensor]) -> None:
            if self.mnemos_gated is not None:
                self.mnemos_gated.map(fn)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Pickle finds a class by its name, and this class is made when it is needed.
            return make_empty, (_make_carrying, layer), self.__getstate__()

    Carrying.__name__, Carrying.__qualname__ = layer.__name__, layer.__qualname__
    return Carrying


def make_empty(make: Callable[[type], Any], cls: type) -> Any:
    """An instance of the class that `make` makes of a class, without a call of its constructor."""
    made = make(cls)
    return made.__new__(made)


def list_layers(past: Any) -> tuple[Any, list[Any]]:
    """The decoder's own cache and its layers. Raises InputError for what is no cache with layers."""
    past = getattr(past, "self_attention_cache", past)  # of an encoder and a decoder
    layers = getattr(past, "layers", None)
    if not isinstance(layers, list):
        raise InputError(f"{_EXPECTED}, found a {type(past).__name__}; {GIVE}")
    return past, layers


def find_row_state(past: Any, number: int, batch: int, t: int) -> RowState:
    """What layer `number` of a host's cache carries, in the call that has just added t tokens of `batch` rows to it.

    Raises InputError if `past` is no cache with layers, or if its tokens are not those that the gated cache has read.
    """
    _, layers = list_layers(past)
    if len(layers) <= number:
        raise InputError(f"{_EXPECTED}, found {len(layers)} layers; {GIVE}")
    layer = layers[number]
    if not hasattr(layer, "mnemos_gated"):
        cls: Any = type(layer)
        layer.__class__ = _make_carrying(cls)
    carried = layer.mnemos_gated or RowState()
    before = int(layer.get_seq_length()) - t
    if carried.length != before or carried.rows not in (None, batch):
        raise InputError(
            f"expected a cache whose {before} tokens this model's gated caches have read, found "
            f"{carried.length} read tokens{'' if carried.rows in (None, batch) else f' of {carried.rows} rows'}; "
            "start with an empty cache"
        )
    layer.mnemos_gated = carried
    return carried
