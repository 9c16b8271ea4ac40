"""Which tokens can read each other: buckets of random rotations, and chunks counted within each bucket."""

import torch
from torch import Tensor

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
