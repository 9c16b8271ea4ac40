"""The causal walk of a gated cache: tokens in blocks on an absolute grid, a cache a row, from any state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
    partial, filled = state.partial, state.valid
    valid = torch.ones(b, t, dtype=torch.bool, device=source.device) if mask is None else mask
    stops = sorted({stop for p in set(place) for stop in range(block - p, t, block)} | {t})
    written = torch.zeros(b, dtype=torch.bool, device=source.device)
    pieces, at = [], 0
    for stop in stops:
        if stop == at:  # an empty call
            continue
        pieces.append((stop - at, cache))
        tokens, ok = source[:, at:stop], valid[:, at:stop]
        if stop - at == block:  # then every row's block is this one
            partial, filled = tokens, ok
        else:
            index = torch.tensor(place, device=source.device)[:, None] + torch.arange(stop - at, device=source.device)
            partial = partial.scatter(1, index[..., None].expand_as(tokens), tokens)
            filled = filled.scatter(1, index, ok)
        place = [p + stop - at for p in place]
        done = [p == block for p in place]
        if any(done):
            new = advance(partial, cache, filled if padded or not all(done) else None)
            written = written | (filled.any(1) & torch.tensor(done, device=source.device))
            if all(done):
                cache, partial, filled = new, torch.zeros_like(partial), torch.zeros_like(filled)
            else:
                rows = torch.tensor(done, device=source.device)
                cache = torch.where(rows[:, None, None], new, cache)
                partial = partial.masked_fill(rows[:, None, None], 0)
                filled = filled & ~rows[:, None]
            place = [0 if d else p for p, d in zip(place, done, strict=True)]
        at = stop
    return pieces, Walk(cache, partial, filled, state.seen + t), written
