"""The gated recurrent cache's update, eq. 4 and 5 of Cached Transformers, for a batch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .resample import resample

__all__ = ["Gates", "gated_update", "resample"]


class Gates(NamedTuple):
    """What an update opened: g_u and g_r [B, Tm, Dm]."""

    update: Tensor
    reset: Tensor


def gated_update(
    source: Tensor,
    cache: Tensor,
    update: tuple[Tensor, Tensor],
    reset: tuple[Tensor, Tensor],
    candidate: tuple[Tensor, Tensor],
    norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Gates]:
    """C_t = (1 − g_u) ⊙ C + g_u ⊙ C̃ for S̄ `source` [B, Tm, Dm] and `cache` [Tm, Dm] or [B, Tm, Dm].

        g_u = σ(W_u [S̄ ; C])    g_r = σ(W_r [S̄ ; C])    C̃ = W_c [S̄ ; g_r ⊙ C]

    update, reset, candidate: (weight [Dm, 2·Dm], bias [Dm]). With `norm`, a layer norm's (gain, shift), the
    candidate is LN(GELU(·)), whose size is bounded; without, the recurrence is linear in C and is not.

    Each weight is split in its two halves, so that [S̄ ; C] is never built and a cache that the batch shares
    is multiplied once, not B times: 4·B·Tm·Dm² multiply-adds for it, 6 for a cache a row. What comes out of a product
    is added to and squashed in place: the traffic of elementwise work is most of an update's time.
    """
    d = source.shape[-1]
    rows = source.flatten(0, 1)  # a matrix whose rows may stand apart is multiplied without a copy

    def product(weights: tuple[Tensor, Tensor]) -> Tensor:
        weight, bias = weights
        return F.linear(rows, weight[:, :d], bias).unflatten(0, source.shape[:2])

    def gate(weights: tuple[Tensor, Tensor]) -> Tensor:
        return product(weights).add_(F.linear(cache, weights[0][:, d:])).sigmoid_()

    g_u, g_r = gate(update), gate(reset)
    new = product(candidate).add_(F.linear(g_r * cache, candidate[0][:, d:]))
    if norm is not None:
        new = F.layer_norm(F.gelu(new), (d,), *norm)
    return torch.lerp(cache.expand_as(new), new, g_u), Gates(g_u, g_r)
