"""The causal walk of a gated cache: tokens in blocks on an absolute grid, a cache a row, from any state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos.memory.grid import Unfinished, stretches


class Walk(NamedTuple):
    """Where each row of a walk stands. A row of zeros is fresh and starts from the stored cache.

    cache [B, Tm, Dm]: what the row reads now. partial [B, block, Dm], valid [B, block] bool: the tokens of the
    unfinished block. seen [B] int64: tokens since the row was fresh; its place in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    valid: Tensor
    seen: Tensor

    @staticmethod
    def fresh(batch: int, slots: int, width: int, block: int, device: Any, dtype: Any) -> "Walk":
        """`batch` rows that have seen nothing."""
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
    """Walk tokens `source` [B, T, Dm] through blocks: pieces (tokens, cache [B, Tm, Dm] they read), the new
    state, and which rows [B] bool were written, by at least one valid token.

    A row that has seen nothing (all of them where `state` is None) starts from `start` [Tm, Dm];
    `advance(block tokens, cache, valid)` makes the next cache. Rows may stand at different places of their blocks:
    the walk stops wherever some row's block ends, so it takes T/block steps for each different place. Padding
    takes up its place in a block and writes nothing.
    """
    b, t, width = source.shape
    if state is None:  # known without looking at a tensor, which compiling and devices are grateful for
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
