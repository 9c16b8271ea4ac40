"""The hash of the hashed attentions (Andoni et al. 2015): the nearest of random directions and their opposites."""

import torch
from torch import Tensor


def rotation_hash(x: Tensor, rotations: Tensor) -> Tensor:
    """argmax([xR; −xR]) in every round: x [B, T, H, D], rotations [R, H or 1, D, n/2] -> buckets [B, H, R, T] below n.

    Computed in float32 (float64 for float64), because lower precision would put similar tokens into different buckets.
    No gradient. Cost: O(T·H·R·D·n/2) multiply-adds, one round in memory at a time.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, found = x.detach().transpose(1, 2).to(wide), []
    for rotation in rotations.to(wide):
        turned = x @ rotation
        found.append(torch.cat([turned, -turned], -1).argmax(-1))
    return torch.stack(found, 2)
