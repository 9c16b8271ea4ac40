"""Softmax attention by its equation, query after query in float64.

    y_i = Σ_j e^{scale·q_i·k_j − m} v_j / Σ_j e^{scale·q_i·k_j − m}      m the largest of those scores

over the keys j that query i reads (Vaswani et al. 2017, eq. 1, with a mask). Query i of T stands at position i + S − T.
Tests compare the kernels with it, so it shares no code with them. Gradients are autograd's.
"""

import torch
from torch import Tensor


def reference_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Every query by itself: q [B, T, H, D], k [B, S, K, D], v [B, S, K, M] -> y [B, T, H, M], float64."""
    (b, t, h, d), (s, shared, m) = q.shape, v.shape[1:]
    scale = d**-0.5 if scale is None else scale
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for row in range(b):
        for i in range(t):
            last = i + s - t + 1 if causal else s
            first = 0 if window is None else max(0, last - window)
            read = torch.tensor([j for j in range(first, last) if mask is None or mask[row, j]], dtype=torch.int64)
            for head in range(h):
                keys, values = (x[row, read, head // (h // shared)] for x in (k, v))
                weights = torch.softmax(scale * (keys @ q[row, i, head]), 0)
                rows.append(weights @ values if len(read) else 0 * q[row, i, head].sum() + torch.zeros(m).double())
    return torch.stack(rows).reshape(b, t, h, m) if rows else q.new_zeros(b, t, h, m) * (q.sum() + k.sum() + v.sum())
