"""Tokens in blocks on an absolute grid: calls of any length, with rows anywhere in their blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.ops.padding import take


@exportable
class Unfinished(NamedTuple):
    """The tokens of each row's incomplete block: tokens [B, block, ..], valid [B, block] bool.

    A row at position p of its block has p tokens, followed by zeros.
    """

    tokens: Tensor
    valid: Tensor

    def with_more(self, tokens: Tensor, mask: Tensor | None, before: list[int]) -> "Unfinished":
        """With the next tokens [B, t, ..] of each row, which has `before` of its block; they must fit into its block.

        mask [B, t] bool: the tokens that are no padding; it is behind the others of its row.
        """
        t, block = tokens.shape[1], self.valid.shape[1]
        if mask is None and t == block:  # then these tokens are the whole block of every row
            return Unfinished(tokens, torch.ones_like(self.valid))
        index = torch.tensor(before, device=tokens.device)[:, None] + torch.arange(t, device=tokens.device)
        if mask is None:
            valid = self.valid.scatter(1, index, True)
        else:  # padding leaves what is there
            index = index.clamp(max=block - 1)
            old = take(self.tokens, index)
            tokens = torch.where(mask.view(*mask.shape, *[1] * (tokens.dim() - 2)), tokens, old)
            valid = self.valid.scatter(1, index, mask | take(self.valid, index))
        wide = index.view(*index.shape, *[1] * (tokens.dim() - 2)).expand_as(tokens)
        return Unfinished(self.tokens.scatter(1, wide, tokens), valid)

    def emptied(self, rows: Tensor) -> "Unfinished":
        """Without the tokens of the rows [B] bool, whose block is complete."""
        wide = rows.view(-1, *[1] * (self.tokens.dim() - 1))
        return Unfinished(self.tokens.masked_fill(wide, 0), self.valid & ~rows[:, None])


class Stretch(NamedTuple):
    """Tokens `start` to `stop` of a call, which lie within one block of each row."""

    start: int
    stop: int
    before: list[int]  # these tokens, how many each row has of its block
    after: list[int]  # and after them
    done: list[bool]  # which rows complete their block with them


def stretches(before: list[int], counts: list[int], block: int) -> list[Stretch]:
    """Tokens, cut wherever the block of some row ends: T/block stretches for each different number in `before` [B].

    counts [B]: the tokens of each row, which is padded behind them up to the longest, T.
    """
    stops = {stop for p, n in set(zip(before, counts, strict=True)) for stop in range(block - p, n + 1, block)}
    cut, start = [], 0
    for stop in sorted(stops | {max(counts, default=0)} - {0}):
        after = [p + max(0, min(n, stop) - start) for p, n in zip(before, counts, strict=True)]
        done = [p == block for p in after]
        after = [0 if d else p for p, d in zip(after, done, strict=True)]
        cut.append(Stretch(start, stop, before, after, done))
        before, start = after, stop
    return cut
