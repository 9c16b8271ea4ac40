"""What padding holds reaches nothing, and its tokens are not counted. Masks are [B, T] bool, True = valid.

Three things are dropped at three depths. Content: a layer begins with `zero_invalid`, because the gradient of a weight
is a product with its input, and 0·NaN is NaN. The token: a projection's bias and φ(0) = 1 make a key of zeros one that
counts, so the operators mask keys and values, or β and the decay, again; softmax hides them from its queries. Position:
positions.py counts valid tokens alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def zero_invalid(x: Tensor, mask: Tensor | None) -> Tensor:
    """x [B, T, ..] with zeros in the padding, also in its gradient. A product with the mask would keep a NaN."""
    return x if mask is None else x.masked_fill(~mask[(..., *[None] * (x.dim() - 2))], 0)


def valid_first(mask: Tensor) -> Tensor:
    """The order [B, T] of tokens that brings the padding of each row behind its valid tokens, for `take`."""
    return _with_first(mask)


def valid_last(mask: Tensor) -> Tensor:
    """The order [B, T] of tokens that brings the padding of each row before its valid tokens, for `take`."""
    return _with_first(~mask)


def _with_first(chosen: Tensor) -> Tensor:
    """The order [B, T] that brings the chosen tokens of each row before the others.

    ONNX has no stable sort, and no cumulated sum of bools.
    """
    before = chosen.long().cumsum(1)
    place = torch.where(chosen, before, before[:, -1:] + (~chosen).long().cumsum(1)) - 1
    tokens = torch.arange(chosen.shape[1], device=chosen.device).expand_as(place)
    return torch.empty_like(place).scatter(1, place, tokens)


def padding_first(before: int, mask: Tensor) -> Tensor:
    """The order [B, N + T] that brings the padding of T tokens in front of the N places `before` them, for `take`.

    mask [B, T]: the padding of a row is in front of its valid tokens. No token is then apart from those before it.
    """
    padding = (~mask).sum(1, keepdim=True)
    columns, moved = torch.arange(before + mask.shape[1], device=mask.device), (before + padding).clamp(min=1)
    return torch.where(columns < moved, (columns - padding) % moved, columns)


def take(x: Tensor, order: Tensor) -> Tensor:
    """x[b, order[b, i]] of x [B, T, ..], [B, N, ..]. The tokens are back in place after `order.argsort(1)`."""
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand(*order.shape, *x.shape[2:]))


class PackedRows(NamedTuple):
    """The valid tokens of each row without gaps, x [B, t, ..], padded behind to the longest, t at least 1.

    counts [B]: their numbers, as Python's; mask [B, t], None where all are valid; order [B, t]: where they stood.
    """

    x: Tensor
    counts: list[int]
    mask: Tensor | None
    order: Tensor | None

    @staticmethod
    def of(x: Tensor, mask: Tensor | None) -> "PackedRows":
        """The rows of x [B, T, ..]. Reads the mask, for which a device waits."""
        counts = [x.shape[1]] * len(x) if mask is None else mask.sum(1).tolist()
        if mask is None or min(counts) == x.shape[1]:
            return PackedRows(x, counts, None, None)
        order = valid_first(mask)[:, : max(1, *counts)]
        return PackedRows(take(x, order), counts, take(mask, order), order)

    def valid(self, span: slice) -> Tensor | None:
        """The mask of some columns; None where all of their tokens are valid."""
        return None if self.mask is None or span.stop <= min(self.counts) else self.mask[:, span]

    def in_place(self, y: Tensor, t: int) -> Tensor:
        """y [B, t', ..] of these tokens where they stood in [B, T, ..]; zeros in the padding."""
        if self.order is None or self.mask is None:
            return y
        y = zero_invalid(y, self.mask)
        index = self.order.view(*self.order.shape, *[1] * (y.dim() - 2)).expand(*self.order.shape, *y.shape[2:])
        return y.new_zeros(len(y), t, *y.shape[2:]).scatter(1, index, y)
