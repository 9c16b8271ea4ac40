"""The caches of a decoder's rows: a cache per row and the tokens since its last update, and where calls keep them.

`BlockState` is what a row reads and the tokens of its unfinished block; `RowBlocks` the blocks of one call; `RowState`
the same on a layer of the host's own cache. transformers changes a layer's keys and values through methods of the
layer: beams reorder its rows. The class of a layer that carries a state is therefore replaced by a subclass that does
the same to the state. No function or class of transformers is changed.
"""

from collections.abc import Callable
from functools import cache as once
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.types import InputError

Update = Callable[[Tensor, Tensor], Tensor]  # (tokens [B, block, Dm], cache [B, Tm, Dm]) -> the next cache
Read = Callable[[Tensor, Tensor], Tensor]  # (inputs [B, T, ...], cache [B or 1, Tm, Dm]) -> o_mem [B, T, H, M]


class BlockState(NamedTuple):
    """Where each row is in its sequence of updates.

    cache [B, Tm, Dm]: the cache that the row reads now. partial [B, block, Dm]: the tokens of its unfinished block,
    then zeros. seen [B] int64: its valid tokens so far; its position in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    seen: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> "BlockState":
        """The same with `fn` of each tensor, as to select rows."""
        return BlockState(*(fn(tensor) for tensor in self))


class RowBlocks:
    """The tokens of one call in blocks, each row on a grid of its own valid tokens, and the caches before each block.

    source [B, T, Dm]; valid [B, T] bool or None; state None: new rows, which start from `start` [Tm, Dm]. A row's grid
    counts its valid tokens only, so padding changes nothing, at any position and in any amount. caches[i] [B, Tm, Dm]
    is what the tokens of block i read. It is computed from the blocks before; block 0 begins with the tokens that the
    row's state holds.

    Rows at one position without padding are cut into blocks without an index; else the tokens are scattered to their
    positions, a copy of O(B·T·Dm). Under torch.compile no value of new rows is read: all blocks are updated, and the
    result is kept for the rows that have completed them.
    """

    def __init__(
        self,
        source: Tensor,
        valid: Tensor | None,
        state: BlockState | None,
        start: Tensor,
        block: int,
        update: Update,
    ) -> None:
        b, t, width = source.shape
        compiling = torch.compiler.is_compiling()
        # --- where rows begin and end in their grids ---
        begins = [0] * b
        if state is not None:
            begins = (state.seen % block).tolist()
        else:
            seen = torch.zeros(b, dtype=torch.int64, device=source.device)
            state = BlockState(start.expand(b, -1, -1), source.new_zeros(b, block, width), seen)
        if valid is not None and not compiling and bool(valid.all()):
            valid = None
        self.block, self.state = block, state
        self.first = state.seen % block  # the position of each row's first token
        rank = None if valid is None else valid.cumsum(1)
        self.taken: int | Tensor = t if rank is None else rank[:, -1:].sum(1)  # valid tokens of each row
        ends = [begin + t for begin in begins]
        if isinstance(self.taken, Tensor) and not compiling:
            ends = (self.first + self.taken).tolist()
        self.count = max(1, -(-max(ends, default=0) // block))  # blocks that tokens of this call are in
        self.begin = begins[0] if begins else 0
        self.index: Tensor | None = None  # the position of each token; None: consecutive from `begin`
        if valid is not None and rank is not None:
            self.index = (self.first[:, None] + rank - 1).masked_fill(~valid, self.count * block)
        elif any(begin != self.begin for begin in begins):
            self.index = self.first[:, None] + torch.arange(t, device=source.device)

        # --- the tokens of the state and of the call at their positions, [B, count·block, Dm], then zeros ---
        if self.index is None:
            rest = source.new_zeros(b, self.count * block - self.begin - t, width)
            self.tokens = torch.cat([state.partial[:, : self.begin], source, rest], 1)
        else:
            tokens = self._on_grid(source)
            self.tokens = torch.cat([tokens[:, :block] + state.partial, tokens[:, block:]], 1)

        # --- an update for each block, of the rows that complete it ---
        self.caches = [state.cache]
        for number in range(self.count):
            cache, end = self.caches[-1], (number + 1) * block
            tokens = self.tokens[:, number * block : end]
            if compiling and rank is not None:  # which rows do is not known
                done = (self.first + self.taken >= end)[:, None, None]
                self.caches.append(torch.where(done, update(tokens, cache), cache))
                continue
            rows = [row for row, last in enumerate(ends) if last >= end]
            if not rows:
                break
            if len(rows) == b:
                self.caches.append(update(tokens, cache))
            else:
                some = torch.tensor(rows, device=cache.device)
                self.caches.append(cache.index_copy(0, some, update(tokens[some], cache[some])))

    def read(self, x: Tensor, read: Read, caches: list[Tensor] | None = None) -> Tensor:
        """o_mem [B, T, H, M] of inputs x [B, T, ...]: each token reads the cache before its block.

        caches: what to read in place of the rows' own caches, such as their batch means [1, Tm, Dm]. The output of
        padding has no meaning.
        """
        caches = self.caches if caches is None else caches
        if self.count == 1:
            return read(x, caches[0])
        b = x.shape[0]
        before = [caches[min(number, len(caches) - 1)] for number in range(self.count)]
        inputs = self._on_grid(x).unflatten(1, (self.count, self.block))
        if before[0].shape[0] < b:  # one cache for all rows: their inputs are one row per block
            o_mem = read(inputs.transpose(0, 1).flatten(1, 2), torch.cat(before))
            o_mem = o_mem.unflatten(1, (b, self.block)).transpose(0, 1)
        else:
            o_mem = read(inputs.flatten(0, 1), torch.stack(before, 1).flatten(0, 1)).unflatten(0, (b, self.count))
        o_mem = o_mem.flatten(1, 2)
        if self.index is None:
            return o_mem[:, self.begin : self.begin + x.shape[1]]
        return o_mem.gather(1, _widen(self.index.clamp(max=o_mem.shape[1] - 1), o_mem))

    def after(self) -> BlockState:
        """The state after the call."""
        seen = self.state.seen + self.taken
        if self.count == len(self.caches) == 1:  # no row completed a block
            return BlockState(self.caches[0], self.tokens, seen)
        ends = self.first + self.taken
        position = torch.arange(self.block, device=ends.device)
        at = (ends // self.block)[:, None] * self.block + position
        room = F.pad(self.tokens, (0, 0, 0, self.block))  # a row may have completed the last block
        partial = room.gather(1, _widen(at, room)) * (position < (ends % self.block)[:, None])[..., None]
        return BlockState(self.caches[-1], partial, seen)

    @property
    def written(self) -> Tensor:
        """The rows [B] bool that completed at least one block."""
        return self.first + self.taken >= self.block

    def _on_grid(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] at their positions, [B, count·block, ...]; zeros elsewhere. Those of padding drop out."""
        size, (b, t) = self.count * self.block, values.shape[:2]
        if self.index is None:
            return F.pad(values, (0, 0) * (values.dim() - 2) + (self.begin, size - self.begin - t))
        empty = values.new_zeros(b, size + 1, *values.shape[2:])
        return empty.scatter(1, _widen(self.index, values), values)[:, :size]


def _widen(index: Tensor, values: Tensor) -> Tensor:
    """An index [B, T] with the further dimensions of `values` [B, ., ...]."""
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])


# --- on a cache of transformers ---


class RowState:
    """What a layer of a host's cache carries for one gated cache: its state, and how many tokens it has read."""

    def __init__(self) -> None:
        self.length = 0  # with padding
        self.state: BlockState | None = None  # None: new rows
        self._projected: tuple[Tensor, ...] = ()  # a cache, and what was computed of it

    @property
    def rows(self) -> int | None:
        """The number of rows; None before the first token."""
        return None if self.state is None else len(self.state.seen)

    def current(self) -> BlockState | None:
        """The state; None: the rows are new."""
        return self.state

    def extend(self, t: int, state: BlockState) -> None:
        """Go on to the state after a call of t tokens."""
        self.length += t
        self.state = state

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache), kept until another cache is given: keys and values change once per block."""
        if not self._projected or self._projected[0] is not cache:
            self._projected = cache, *compute(cache)
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
            self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            super().batch_repeat_interleave(repeats)
            self._map(lambda x: x.repeat_interleave(repeats, 0))

        def batch_select_indices(self, indices: Any) -> None:
            super().batch_select_indices(indices)
            self._map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

        def crop(self, tokens_to_remove: int) -> None:
            """Raises InputError for tokens that a gated cache has read: its updates do not go back."""
            if self.mnemos_gated is not None and tokens_to_remove:
                raise InputError(
                    "crop: expected a cache without the state of gated caches, which cannot take tokens back, found "
                    f"{abs(tokens_to_remove)} to take back; generate without drafts and assistants, or go on from a "
                    "copy.deepcopy of the cache"
                )
            super().crop(tokens_to_remove)

        def reset(self) -> None:
            super().reset()
            self.mnemos_gated = None

        def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
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
        raise InputError(
            f"expected a cache with a layer for each attention, found a {type(past).__name__}; "
            "give a transformers.DynamicCache, or none"
        )
    return past, layers


def find_row_state(past: Any, number: int, batch: int, t: int) -> RowState:
    """What layer `number` of a host's cache carries, in the call that has just added t tokens of `batch` rows to it.

    Raises InputError if `past` is no cache with layers, or if its tokens are not those that the gated cache has read.
    """
    _, layers = list_layers(past)
    if len(layers) <= number:
        raise InputError(
            f"expected a cache with a layer for each attention, found {len(layers)} layers; give a "
            "transformers.DynamicCache, or none"
        )
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
