"""Bucket-union attention of few queries: compare all places, and mask PyTorch's fused attention."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .hashing import met


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, place: Tensor, causal: bool, scale: float, dropout: float) -> Tensor:
    """Outputs of the last T of N tokens: q [B, T, H, D], k [B, N, H, D], v [B, N, H, M], place [B, N, H, R].

    Cost: O(T·N·(D + M + R)·H) time; T·N·H bytes for the mask.
    """
    t, n = q.shape[1], k.shape[1]
    place = place.permute(3, 0, 2, 1)  # [R, B, H, N]
    # One round at a time: each has T·N integers.
    rounds = (met(one[..., n - t :, None] - one[..., None, :]) for one in place)
    visible = functools.reduce(Tensor.bitwise_or_, rounds).bool()
    query = torch.arange(n - t, n, device=q.device)[:, None]
    key = torch.arange(n, device=q.device)
    visible = visible & (key < query if causal else key != query)
    some = visible.any(-1, keepdim=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, visible | ~some, dropout, scale=scale)
    return torch.where(some, y, v[:, :, n - t :]).transpose(1, 2)


PICKED_FROM = 16  # gathering the keys is faster if there are this many times as many as a query can read


def attend_from_one(q: Tensor, k: Tensor, v: Tensor, place: Tensor, scale: float, dropout: float, most: int) -> Tensor:
    """Causal output of the last token, which can read `most` keys at most: shapes as above, with T = 1.

    Cost: O(N·R·H) comparisons, and O(most·(D + M)·H) for attention if there are many more keys than `most`.
    """
    itself, k, before = v[:, -1:], k[:, :-1].transpose(1, 2), v[:, :-1].transpose(1, 2)
    if k.shape[2] == 0:
        return itself
    met_in = met(place[:, -1:] - place[:, :-1]).sum(-1, dtype=torch.int32).transpose(1, 2)  # rounds, [B, H, N − 1]
    if k.shape[2] > PICKED_FROM * most:
        met_in, at = met_in.topk(most, sorted=False)
        k, before = (x.gather(2, at[..., None].expand(*at.shape, x.shape[-1])) for x in (k, before))
    visible = (met_in > 0)[:, :, None]
    some = visible.any(-1, keepdim=True)
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k, before, visible | ~some, dropout, scale=scale)
    return torch.where(some, y, itself.transpose(1, 2)).transpose(1, 2)
