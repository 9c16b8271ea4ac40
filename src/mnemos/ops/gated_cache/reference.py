"""The gated recurrent cache by its equations (Cached Transformers, eq. 2 to 5): loops over samples, slots and heads.

Tests compare the fast path with it, so it shares no code with it and uses only elementary functions.
"""

import math

import torch
from torch import Tensor


def reference_resample(tokens: Tensor, length: int) -> Tensor:
    """Nearest neighbour, [n, Dm] -> [length, Dm]: slot i takes token floor(i·n/length)."""
    return torch.stack([tokens[i * tokens.shape[0] // length] for i in range(length)])


def reference_update(
    source: Tensor,
    cache: Tensor,
    weights: dict[str, Tensor],
    candidate: str = "linear",
) -> Tensor:
    """Eq. 4 and 5 for one sample: resampled source [Tm, Dm] and cache [Tm, Dm] to C_t [Tm, Dm].

    `weights` has W_u, W_r, W_c, each [Dm, 2·Dm], and b_u, b_r, b_c [Dm]; for candidate "layernorm_gelu"
    also the layer norm's `gain` and `shift` [Dm].
    """
    rows = []
    for s, c in zip(source, cache, strict=True):
        both = torch.cat([s, c])
        g_u = torch.sigmoid(weights["W_u"] @ both + weights["b_u"])  # eq. 4, left
        g_r = torch.sigmoid(weights["W_r"] @ both + weights["b_r"])  # eq. 4, right
        new = weights["W_c"] @ torch.cat([s, g_r * c]) + weights["b_c"]  # eq. 5, right
        if candidate == "layernorm_gelu":
            new = 0.5 * new * (1 + torch.erf(new / math.sqrt(2)))
            new = (new - new.mean()) / torch.sqrt(((new - new.mean()) ** 2).mean() + 1e-5)
            new = new * weights["gain"] + weights["shift"]
        rows.append((1 - g_u) * c + g_u * new)  # eq. 5, left
    return torch.stack(rows)


def reference_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eq. 3 (and 1) for one sample and head: q [T, d], k [N, d], v [N, M] to [T, M]."""
    rows = []
    for query in q:
        scores = torch.stack([query @ key for key in k]) / math.sqrt(q.shape[1])
        share = torch.exp(scores - scores.max())
        rows.append((share / share.sum()) @ v)
    return torch.stack(rows)


def reference_mix(o_mem: Tensor, o_self: Tensor, mix: Tensor) -> Tensor:
    """Eq. 2 for one sample: o_mem, o_self [T, H, M] and λ [H] to [T, H, M]."""
    heads = []
    for h, value in enumerate(mix):
        share = 1 / (1 + torch.exp(-value))
        heads.append(share * o_mem[:, h] + (1 - share) * o_self[:, h])
    return torch.stack(heads, 1)
