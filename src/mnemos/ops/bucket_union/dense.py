"""Bucket-union attention of few queries: compare the places of all, and mask PyTorch's fused attention."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.precision import full_precision
from mnemos.ops.rotation_hash import rotation_hash


def places(
    qk: Tensor, rotations: Tensor, chunk: int, mask: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The place of T tokens in every round, [B, T, H, R] int32, and the tokens per bucket so far, [B, H, R, buckets].

    A place is (bucket + 1)·S + chunk with S = 2³¹/(buckets + 2) and chunk = ⌊rank/c⌋. The ranks in a bucket continue
    from `counts` (None: zeros). So token i reads token j in a round exactly if place_i − place_j is 0 or 1, and j is
    before i if causal. An invalid token has place 0 and no rank, and no valid token reads it.

    qk [B, T, H, D], rotations [R, H or 1, D, buckets/2]. The hash is computed in float32 (float64 for float64), also
    under autocast, because lower precision would put similar tokens into different buckets. No gradient.
    Cost: O(T·H·R·D·buckets/2) multiply-adds, one round in memory at a time, and a sort.
    """
    with torch.no_grad(), full_precision(qk.device.type):
        bucket = rotation_hash(qk, rotations)  # [B, H, R, T]
        size = 2 * rotations.shape[-1]
        if mask is not None:
            bucket = bucket.masked_fill(~mask[:, None, None], size)  # an additional bucket, which no token reads
        order = bucket.argsort(dim=-1, stable=True)
        held = torch.zeros(*bucket.shape[:3], size + 1, dtype=torch.int64, device=qk.device)
        held.scatter_add_(-1, bucket, torch.ones_like(bucket))
        first = held.cumsum(-1) - held
        if counts is not None:
            first[..., :size] -= counts
        at = torch.arange(qk.shape[1], device=qk.device).expand(bucket.shape)
        rank = torch.empty_like(bucket).scatter_(-1, order, at - first.gather(-1, bucket.gather(-1, order)))
        place = (bucket + 1) * (2**31 // (size + 2)) + rank // chunk
        if mask is not None:
            place = place.masked_fill(bucket == size, 0)
        held = held[..., :size] if counts is None else held[..., :size] + counts
        return place.permute(0, 3, 1, 2).int(), held


def met(difference: Tensor) -> Tensor:
    """1 where a difference of places is 0 or 1, else 0, in place. Integers, because bool takes ten times as long."""
    return difference.bitwise_and_(-2).eq_(0)


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
