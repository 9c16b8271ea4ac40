"""Rows of tokens in blocks, for gated caches that are updated once a block: a cache for each row, and its place."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.modes import reads_without_waiting
from mnemos.ops.padding import take
from mnemos.types import Device


@exportable
class CacheState(NamedTuple):
    """Where each row is in its sequence of updates. A row of zeros is new, and starts from a cache of its layer's.

    cache [B, Tm, Dm]: the cache that the row reads now. partial [B, block, Dm]: the tokens of its unfinished block,
    then zeros. seen [B] int64: its valid tokens so far; its position in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        return "cache"

    @staticmethod
    def fresh(batch: int, block: int, like: Tensor, device: Device = None) -> "CacheState":
        """`batch` new rows; like: a cache [Tm, Dm]."""
        device = like.device if device is None else device
        return CacheState(
            like.new_zeros(batch, *like.shape, device=device),
            like.new_zeros(batch, block, like.shape[1], device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def started(self, start: Tensor) -> "CacheState":
        """The same with the cache `start` [Tm, Dm] in new rows."""
        return self._replace(cache=torch.where((self.seen == 0)[:, None, None], start, self.cache))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "CacheState":
        """The same with `fn` of each tensor, as to select rows."""
        return CacheState(*(fn(tensor) for tensor in self))


class RowBlocks:
    """The tokens of one call in blocks, each row on a grid of its own valid tokens, and the caches before each block.

    source [B, T, Dm]; valid [B, T] bool or None; state None: new rows, which start from `start` [Tm, Dm];
    update(tokens [B, block, Dm], cache [B, Tm, Dm]): the next cache. A row's grid counts its valid tokens only, so
    padding changes nothing, at any position and in any amount. caches[i] [B, Tm, Dm] is what the tokens of block i
    read. It is computed from the blocks before; block 0 begins with the tokens that the row's state holds.

    Rows at one position without padding are cut into blocks without an index; else the tokens are scattered to their
    positions, a copy of O(B·T·Dm). Where a mask's values are not read (a device would wait, a compiled graph break) all
    blocks are updated, and the result is kept for the rows that have completed them.
    """

    def __init__(
        self,
        source: Tensor,
        valid: Tensor | None,
        state: CacheState | None,
        start: Tensor,
        block: int,
        update: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        b, t, width = source.shape
        # --- where rows begin and end in their grids ---
        begins = [0] * b
        if state is not None:
            begins = (state.seen % block).tolist()
        else:  # known without reading a tensor
            state = CacheState.fresh(b, block, start)._replace(cache=start.expand(b, -1, -1))
        known = valid is None or reads_without_waiting(valid)
        if valid is not None and known and bool(valid.all()):
            valid = None
        self.block, self.state = block, state
        self.first = state.seen % block  # the position of each row's first token
        self.taken: int | Tensor = t if valid is None else valid.sum(1)  # valid tokens of each row
        ends = (self.first + self.taken).tolist() if valid is not None and known else [n + t for n in begins]
        self.count = max(1, -(-(max(begins, default=0) + t) // block))  # blocks, however many of the tokens are valid
        self.index: Tensor | None = None  # the positions of tokens; None: consecutive from `begin`
        if valid is not None:
            self.index = (self.first[:, None] + valid.cumsum(1) - 1).masked_fill(~valid, self.count * block)
        elif len({*begins}) > 1:
            self.index = self.first[:, None] + torch.arange(t, device=source.device)
        self.begin = begins[0] if begins and self.index is None else 0

        # --- the tokens of the state and of the call at their positions, [B, count·block, Dm], then zeros ---
        if self.index is None:
            rest = source.new_zeros(b, self.count * block - self.begin - t, width)
            self.tokens = torch.cat([state.partial[:, : self.begin], source, rest], 1)
        else:
            self.tokens = self._on_grid(source)
            self.tokens = torch.cat([self.tokens[:, :block] + state.partial, self.tokens[:, block:]], 1)

        # --- an update for each block, of the rows that complete it ---
        self.caches, self.last = [state.cache], state.cache
        for number, tokens in enumerate(self.tokens.split(block, 1)):
            end = (number + 1) * block
            rows = [row for row, last in enumerate(ends) if last >= end]
            if not known:
                done = (self.first + self.taken >= end)[:, None, None]
                self.last = torch.where(done, update(tokens, self.last), self.last)
            elif rows and len(rows) == b:
                self.last = update(tokens, self.last)
            elif rows:
                some = torch.tensor(rows, device=source.device)
                self.last = self.last.index_copy(0, some, update(tokens[some], self.last[some]))
            self.caches.append(self.last)
        self.caches.pop()

    def read(self, read: Callable[..., Tensor], caches: list[Tensor], x: Tensor, own: Tensor | None) -> Tensor:
        """What read(x, cache, own) gives [B, T, H, M], where each token's cache is that before its block.

        caches: the rows' own, or their batch means [1, Tm, Dm]. x and own [B, T, ...]. Padding gets zeros.
        """
        cuts = [n * self.block - self.begin for n in range(1, self.count)]

        def by_block(values: Tensor) -> tuple[Tensor, ...]:
            return (values if self.index is None else self._on_grid(values)).tensor_split(cuts, 1)

        beside = [None] * self.count if own is None else by_block(own)
        y = torch.cat([read(*part) for part in zip(by_block(x), caches, beside, strict=True)], 1)
        return y if self.index is None else take(F.pad(y, (0, 0, 0, 0, 0, 1)), self.index)

    def after(self) -> CacheState:
        """The state after the call."""
        seen = self.state.seen + self.taken
        if self.count == 1 and self.last is self.state.cache:  # no row completed a block
            return CacheState(self.last, self.tokens, seen)
        ends = self.first + self.taken
        position = torch.arange(self.block, device=ends.device)
        at = (ends // self.block)[:, None] * self.block + position
        room = F.pad(self.tokens, (0, 0, 0, self.block))  # a row may have completed the last block
        partial = take(room, at) * (position < (ends % self.block)[:, None])[..., None]
        return CacheState(self.last, partial, seen)

    @property
    def written(self) -> Tensor:
        """The rows [B] bool that completed at least one block."""
        return self.first + self.taken >= self.block

    def _on_grid(self, values: Tensor) -> Tensor:
        """Values [B, T, ...] at their positions, [B, count·block, ...]; zeros elsewhere. Those of padding drop out."""
        assert self.index is not None
        size = self.count * self.block
        index = self.index.view(*self.index.shape, *[1] * (values.dim() - 2)).expand_as(values)
        return values.new_zeros(len(values), size + 1, *values.shape[2:]).scatter(1, index, values)[:, :size]
