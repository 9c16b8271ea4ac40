"""The causal updates of a gated cache: tokens in blocks on an absolute grid, a cache per row, from any state."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.memory.exported import changed_if_any, token_by_token
from mnemos.memory.grid import Unfinished, stretches
from mnemos.types import Device


@exportable
class Walk(NamedTuple):
    """The place of each row in its sequence of updates. A row of zeros is new and starts from the stored cache.

    cache [B, Tm, Dm]: the cache that the row reads now. partial [B, block, Dm], valid [B, block] bool: the tokens of
    the unfinished block. seen [B] int64: tokens since the row began; its place in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    valid: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "cache"

    @staticmethod
    def fresh(batch: int, slots: int, width: int, block: int, device: Device, dtype: torch.dtype | None) -> "Walk":
        """`batch` new rows."""
        return Walk(
            torch.zeros(batch, slots, width, device=device, dtype=dtype),
            torch.zeros(batch, block, width, device=device, dtype=dtype),
            torch.zeros(batch, block, device=device, dtype=torch.bool),
            torch.zeros(batch, device=device, dtype=torch.int64),
        )


def walk(
    source: Tensor,
    mask: Tensor | None,
    state: Walk | None,
    start: Tensor,
    block: int,
    advance: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> tuple[list[tuple[int, Tensor]], Walk, Tensor]:
    """Process tokens `source` [B, T, Dm] in blocks.

    Returns pieces (number of tokens, the cache [B, Tm, Dm] that they read), the new state, and which rows [B] bool
    were written, by at least one valid token. A new row (every row, if `state` is None) starts from `start` [Tm, Dm];
    `advance(block tokens, cache, valid)` computes the next cache. Rows may be at different places of their blocks: a
    piece ends wherever the block of some row ends, so there are T/block pieces for each different place. Padding
    occupies its place in a block and writes nothing.
    """
    b, t, width = source.shape
    if state is None:  # known without reading a tensor: a read makes a device wait and breaks a compiled graph
        state = Walk.fresh(b, start.shape[0], width, block, source.device, source.dtype)
        place, padded = [0] * b, mask is not None
    else:
        place = (state.seen % block).tolist()
        padded = mask is not None or [sum(row[:p]) for row, p in zip(state.valid.tolist(), place, strict=True)] != place
    cache = torch.where((state.seen == 0)[:, None, None], start, state.cache)
    unfinished = Unfinished(state.partial, state.valid)
    valid = torch.ones(b, t, dtype=torch.bool, device=source.device) if mask is None else mask
    written = torch.zeros(b, dtype=torch.bool, device=source.device)
    pieces = []
    for begin, stop, at, done in stretches(place, t, block):
        pieces.append((stop - begin, cache))
        unfinished = unfinished.with_more(source[:, begin:stop], valid[:, begin:stop], at)
        if any(done):
            partial, filled = unfinished
            new = advance(partial, cache, filled if padded or not all(done) else None)
            rows = torch.tensor(done, device=source.device)
            written = written | (filled.any(1) & rows)
            cache = new if all(done) else torch.where(rows[:, None, None], new, cache)
            unfinished = unfinished.emptied(done)
    return pieces, Walk(cache, *unfinished, state.seen + t), written


def exported_walk(
    source: Tensor,
    inputs: Sequence[Tensor],
    state: Walk,
    start: Tensor,
    block: int,
    advance: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    read: Callable[..., Tensor],
) -> tuple[Tensor, Walk]:
    """`walk` and what its tokens read, in operators that an exported program can have: any T, rows at any places.

    `read(cache, *inputs)` computes y [B, 1, ..] for a token of each row, from inputs [B, 1, ..]. Cost: that of T steps.
    """

    def token(before: Walk, given: tuple[Tensor, ...]) -> tuple[Tensor, Walk]:
        new, *rest = given
        place = before.seen % block
        at = place[:, None] == torch.arange(block, device=place.device)
        cache = torch.where((before.seen == 0)[:, None, None], start, before.cache)
        y = read(cache, *rest)
        partial, valid = torch.where(at[..., None], new, before.partial), before.valid | at
        done = place == block - 1

        def updated(cache: Tensor, partial: Tensor, valid: Tensor, done: Tensor) -> Tensor:
            # The other rows are updated too, and that is dropped: all of their block counts, so that none is empty.
            after = advance(partial, cache, valid | ~done[:, None])
            return torch.where(done[:, None, None], after, cache)

        cache = changed_if_any(done, updated, cache, partial, valid, done)
        partial, valid = partial.masked_fill(done[:, None, None], 0), valid & ~done[:, None]
        return y, Walk(cache, partial, valid, before.seen + 1)

    return token_by_token(token, state, (source, *inputs))
