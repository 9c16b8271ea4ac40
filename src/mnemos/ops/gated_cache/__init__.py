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
    is multiplied once, not B times: 4·B·Tm·Dm² multiply-adds for it, 6 for a cache a row.
    """
    d = source.shape[-1]
    weights = torch.stack([update[0], reset[0], candidate[0]])  # [3, Dm, 2·Dm]
    bias = torch.cat([update[1], reset[1], candidate[1]])
    from_source = F.linear(source, weights[..., :d].reshape(3 * d, d), bias)
    from_cache = F.linear(cache, weights[:2, :, d:].reshape(2 * d, d))
    gates = torch.sigmoid(from_source[..., : 2 * d] + from_cache)
    g_u, g_r = gates.split(d, -1)
    new = from_source[..., 2 * d :] + F.linear(g_r * cache, weights[2, :, d:])
    if norm is not None:
        new = F.layer_norm(F.gelu(new), (d,), *norm)
    return torch.lerp(cache.expand_as(new), new, g_u), Gates(g_u, g_r)
