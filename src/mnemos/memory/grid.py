"""Tokens in blocks on an absolute grid: calls of any length, with rows at different places of their blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable


@exportable
class Unfinished(NamedTuple):
    """The tokens of each row's incomplete block: tokens [B, block, ..], valid [B, block] bool.

    A row at place p of its block has p tokens, followed by zeros.
    """

    tokens: Tensor
    valid: Tensor

    def with_more(self, tokens: Tensor, valid: Tensor, place: list[int]) -> "Unfinished":
        """With the next tokens [B, t, ..] of each row, which was at `place`; they must fit into its block."""
        t = tokens.shape[1]
        if t == self.valid.shape[1]:  # then these tokens are the whole block of every row
            return Unfinished(tokens, valid)
        index = torch.tensor(place, device=tokens.device)[:, None] + torch.arange(t, device=tokens.device)
        wide = index.view(*index.shape, *[1] * (tokens.dim() - 2)).expand_as(tokens)
        return Unfinished(self.tokens.scatter(1, wide, tokens), self.valid.scatter(1, index, valid))

    def emptied(self, done: list[bool]) -> "Unfinished":
        """Without the tokens of the rows whose block is `done`."""
        if all(done):
            return Unfinished(torch.zeros_like(self.tokens), torch.zeros_like(self.valid))
        rows = torch.tensor(done, device=self.valid.device)
        wide = rows.view(-1, *[1] * (self.tokens.dim() - 1))
        return Unfinished(self.tokens.masked_fill(wide, 0), self.valid & ~rows[:, None])


class Stretch(NamedTuple):
    """Tokens `start` to `stop` of a call, which lie within one block of each row."""

    start: int
    stop: int
    place: list[int]  # of each row in its block, before these tokens
    done: list[bool]  # which rows complete their block with them


def stretches(place: list[int], t: int, block: int) -> list[Stretch]:
    """T tokens, cut wherever the block of some row ends: T/block stretches for each different place in `place` [B]."""
    stops = sorted({stop for p in set(place) for stop in range(block - p, t, block)} | ({t} if t else set()))
    found, start = [], 0
    for stop in stops:
        after = [p + stop - start for p in place]
        done = [p == block for p in after]
        found.append(Stretch(start, stop, place, done))
        place = [0 if d else p for p, d in zip(after, done, strict=True)]
        start = stop
    return found
