"""Few queries: every key is compared with them, and torch's fused kernel attends under the mask."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .hashing import met


def attend_to_all(q: Tensor, k: Tensor, v: Tensor, place: Tensor, causal: bool, scale: float, dropout: float) -> Tensor:
    """The last T of N tokens' outputs: q [B, T, H, D], k [B, N, H, D], v [B, N, H, M], place [B, N, H, R].

    Cost: O(T·N·(D + M + R)·H) time; T·N·H bytes for the mask.
    """
    t, n = q.shape[1], k.shape[1]
    place = place.permute(3, 0, 2, 1)  # [R, B, H, N]
    rounds = [met(one[..., n - t :, None] - one[..., None, :]) for one in place]
    visible = functools.reduce(Tensor.bitwise_or_, rounds).bool()
    query = torch.arange(n - t, n, device=q.device)[:, None]
    key = torch.arange(n, device=q.device)
    visible = visible & (key < query if causal else key != query)
    some = visible.any(-1, keepdim=True)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, visible | ~some, dropout, scale=scale)
    return torch.where(some, y, v[:, :, n - t :]).transpose(1, 2)
