"""Relative attention by its equations (Dai et al. 2019, section 3.3): score by score, in float64.

Tests compare the fast paths with it, so it shares no code with them: there is no shift, and the vector of a distance
is found by i − j. Gradients are autograd's.
"""

import math

import torch
from torch import Tensor


def reference_sinusoid(distance: int, dim: int) -> Tensor:
    """R_{i−j} [dim]: sin(d·w_c) and cos(d·w_c) side by side for w_c = 10000^(−2c/dim), c = 0 … dim/2 − 1."""
    numbers = []
    for channel in range(dim):
        angle = distance / 10000 ** (2 * (channel // 2) / dim)
        numbers.append(math.sin(angle) if channel % 2 == 0 else math.cos(angle))
    return torch.tensor(numbers, dtype=torch.float64)


def reference_relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: dict[int, Tensor],
    content_bias: Tensor,
    position_bias: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """y_i = Σ_j softmax_j([(q_i + u)·k_j + (q_i + v)·r_{i−j}]/√d)·v_j.

    q [B, T, H, d] at positions N − T … N − 1; k [B, N, H, d], v [B, N, H, M]; r: the projected vectors [H, d] by
    distance i − j; content_bias u, position_bias v [H, d]. A query reads the valid keys (mask [B, N]) that are not
    after it (causal) and fewer than `window` positions before it, and always its own. An invalid token
    is zeros. Returns [B, T, H, M].
    """
    q, k, v = q.double(), k.double(), v.double()
    b, t, h, d = q.shape
    n = k.shape[1]
    if mask is not None:
        zero = ~mask[..., None, None]
        q, k, v = q.masked_fill(zero[:, n - t :], 0), k.masked_fill(zero, 0), v.masked_fill(zero, 0)
    rows = []
    for row in range(b):
        for i in range(n - t, n):
            query = q[row, i - (n - t)]
            keys = []
            for j in range(n):
                seen = mask is None or bool(mask[row, j])
                seen = seen and not (causal and j > i) and not (window is not None and i - j >= window)
                if seen or j == i:
                    keys.append(j)
            for head in range(h):
                scores = []
                for j in keys:
                    content = ((query[head] + content_bias[head].double()) * k[row, j, head]).sum()
                    place = ((query[head] + position_bias[head].double()) * r[i - j][head].double()).sum()
                    scores.append((content + place) / math.sqrt(d))
                weights = torch.softmax(torch.stack(scores), 0)
                rows.append((weights[:, None] * v[row, keys, head]).sum(0))
    return torch.stack(rows).view(b, t, h, -1) if rows else v.new_zeros(b, t, h, v.shape[-1])
