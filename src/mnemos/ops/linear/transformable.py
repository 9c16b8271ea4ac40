"""Causal linear attention in PyTorch's own operations, for `torch.func` (grad, vjp, jvp, vmap) and forward-mode AD.

These transforms rewrite operations, which they cannot do to a compiled kernel or a hand-written backward: a kernel's
tangent would silently be zero. The formulas are the forward of chunked.py, in one segment. Autograd keeps
O(T·(C + D·M/C)) numbers per row and head, and may differentiate it any number of times.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .chunked import CHUNK_NARROW, CHUNK_WIDE, NARROW, masked_product
from .feature_maps import Pointwise, valid


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens.
    """
    (b, t, h, d), m, wide = q.shape, v.shape[-1], s.dtype
    c = CHUNK_NARROW if max(d, m) <= NARROW else CHUNK_WIDE
    n = -(-t // c)
    queries, keys, values = q.to(wide), valid(k.to(wide), mask), valid(v.to(wide), mask)
    if phi is not None:
        queries, keys = phi(queries), valid(phi(keys), mask)
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)

    def split(x: Tensor) -> Tensor:
        """[B, T, H, ·] as chunks [B·H·n, c, ·], padded with zeros."""
        return F.pad(x.transpose(1, 2), (0, 0, 0, n * c - t)).reshape(b * h * n, c, x.shape[-1])

    queries, keys, values = split(queries), split(keys), split(values)
    sums = torch.bmm(keys.mT, values).unflatten(0, (b, h, n)).cumsum(2)
    start = torch.cat([s, z[..., None]], -1)[:, :, None]
    before = torch.cat([start, start + sums[:, :, :-1]], 2).flatten(0, 2)
    num = masked_product(torch.bmm(queries, keys.mT).tril(), values) + torch.bmm(queries, before)
    num = num.unflatten(0, (b, h, n)).flatten(2, 3)[:, :, :t].transpose(1, 2)
    end = (start + sums[:, :, -1:]).squeeze(2)
    return (num[..., :m] / (num[..., m:] + eps)).to(v.dtype), end[..., :m], end[..., m]
