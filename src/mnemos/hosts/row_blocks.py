"""The blocks in which a causal decoder's tokens update a gated cache: each row on a grid of its own valid tokens."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Update = Callable[[Tensor, Tensor], Tensor]  # (tokens [B, block, Dm], cache [B, Tm, Dm]) -> the next cache
Read = Callable[[Tensor, Tensor], Tensor]  # (inputs [B, T, ...], cache [B or 1, Tm, Dm]) -> o_mem [B, T, H, M]


class BlockState(NamedTuple):
    """Where each row is in its sequence of updates.

    cache [B, Tm, Dm]: the cache that the row reads now. partial [B, block, Dm]: the tokens of its unfinished block,
    then zeros. seen [B] int64: its valid tokens so far; its place in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    seen: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> "BlockState":
        """The same with `fn` of each tensor, as to select rows."""
        return BlockState(*(fn(tensor) for tensor in self))


class RowBlocks:
    """The tokens of one call in blocks, and the caches before each block.

    source [B, T, Dm]; valid [B, T] bool or None; state None: new rows, which start from `start` [Tm, Dm]. A row's grid
    counts its valid tokens only, so padding changes nothing, at any position and in any amount. caches[i] [B, Tm, Dm]
    is what the tokens of block i read. It is computed from the blocks before; block 0 begins with the tokens that the
    row's state holds.

    Rows at one place without padding are cut into blocks without an index; else the tokens are scattered to their
    places, a copy of O(B·T·Dm). Under torch.compile no value of new rows is read: all blocks are updated, and the
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
        places = [0] * b
        if state is not None:
            places = (state.seen % block).tolist()
        else:
            seen = torch.zeros(b, dtype=torch.int64, device=source.device)
            state = BlockState(start.expand(b, -1, -1), source.new_zeros(b, block, width), seen)
        compiling = torch.compiler.is_compiling()
        if valid is not None and not compiling and bool(valid.all()):
            valid = None
        self.block, self.state, self.valid = block, state, valid
        self.first = state.seen % block  # the place of each row's first token
        rank = None if valid is None else valid.cumsum(1)
        self.taken: int | Tensor = t if rank is None else rank[:, -1:].sum(1)  # valid tokens of each row
        ends = [place + t for place in places]
        if isinstance(self.taken, Tensor) and not compiling:
            ends = (self.first + self.taken).tolist()
        known = rank is None or not compiling
        self.count = max(1, -(-max(ends, default=0) // block))  # blocks that tokens of this call are in
        self.begin = places[0] if places else 0
        self.index: Tensor | None = None  # the place of each token; None: consecutive from `begin`
        if valid is not None and rank is not None:
            self.index = (self.first[:, None] + rank - 1).masked_fill(~valid, self.count * block)
        elif any(place != self.begin for place in places):
            self.index = self.first[:, None] + torch.arange(t, device=source.device)
        self.tokens = self._with_partial(source, state.partial)
        self.caches = [state.cache]
        for number in range(self.count):
            done = [end >= (number + 1) * block for end in ends] if known else None
            if done is not None and not any(done):
                break
            self.caches.append(self._update_block(number, done, update))

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
        inputs = self._place(x).unflatten(1, (self.count, self.block))
        if before[0].shape[0] < b:  # one cache for all rows: their inputs are one row per block
            found = read(inputs.transpose(0, 1).flatten(1, 2), torch.cat(before))
            found = found.unflatten(1, (b, self.block)).transpose(0, 1)
        else:
            found = read(inputs.flatten(0, 1), torch.stack(before, 1).flatten(0, 1)).unflatten(0, (b, self.count))
        found = found.flatten(1, 2)
        if self.index is None:
            return found[:, self.begin : self.begin + x.shape[1]]
        return found.gather(1, _widen(self.index.clamp(max=found.shape[1] - 1), found))

    def after(self, t: int | None = None) -> BlockState:
        """The state after the first t tokens of the call; None: after all."""
        if t is None and self.count == len(self.caches) == 1:  # no row completed a block
            return BlockState(self.caches[0], self.tokens, self.state.seen + self.taken)
        taken = self.taken
        if t is not None:
            taken = t if self.valid is None else self.valid[:, :t].sum(1)
        ends = self.first + taken
        place = torch.arange(self.block, device=ends.device)
        at = (ends // self.block)[:, None] * self.block + place
        room = F.pad(self.tokens, (0, 0, 0, self.block))  # a row may have completed the last block
        partial = room.gather(1, _widen(at, room)) * (place < (ends % self.block)[:, None])[..., None]
        cache = self.caches[-1]
        if t is not None and len(self.caches) > 1:
            cache = torch.stack(self.caches, 1)[torch.arange(len(ends), device=ends.device), ends // self.block]
        return BlockState(cache, partial, self.state.seen + taken)

    @property
    def written(self) -> Tensor:
        """The rows [B] bool that completed at least one block."""
        return self.first + self.taken >= self.block

    def _with_partial(self, source: Tensor, partial: Tensor) -> Tensor:
        """The tokens of the state and of the call at their places, [B, count·block, Dm], then zeros."""
        if self.index is None:
            rest = self.count * self.block - self.begin - source.shape[1]
            return torch.cat(
                [partial[:, : self.begin], source, source.new_zeros(len(source), rest, source.shape[2])], 1
            )
        tokens = self._place(source)
        return torch.cat([tokens[:, : self.block] + partial, tokens[:, self.block :]], 1)

    def _place(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] at their places, [B, count·block, ...]; zeros elsewhere. Those of padding drop out."""
        size, (b, t) = self.count * self.block, values.shape[:2]
        if self.index is None:
            return F.pad(values, (0, 0) * (values.dim() - 2) + (self.begin, size - self.begin - t))
        empty = values.new_zeros(b, size + 1, *values.shape[2:])
        return empty.scatter(1, _widen(self.index, values), values)[:, :size]

    def _update_block(self, number: int, done: list[bool] | None, update: Update) -> Tensor:
        """The caches after a block; done: the rows that completed it, None if they are not known."""
        tokens, cache = self.tokens[:, number * self.block : (number + 1) * self.block], self.caches[-1]
        if done is None:
            finished = (self.first + self.taken >= (number + 1) * self.block)[:, None, None]
            return torch.where(finished, update(tokens, cache), cache)
        if all(done):
            return update(tokens, cache)
        rows = torch.tensor([row for row, is_done in enumerate(done) if is_done], device=cache.device)
        return cache.index_copy(0, rows, update(tokens[rows], cache[rows]))


def _widen(index: Tensor, values: Tensor) -> Tensor:
    """An index [B, T] with the further dimensions of `values` [B, ., ...]."""
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand(-1, -1, *values.shape[2:])
