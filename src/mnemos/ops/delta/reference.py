"""The delta rule and decayed attention by their equations, token by token in float64.

Per head, with the state S [D, M], the log decay g_t ≤ 0 and diag(e^{g_t}) for a decay per channel:

    S'_t = e^{g_t} S_{t−1}              RetNet (Sun et al. 2023, eq. 6), GLA (Yang et al. 2023, eq. 3), Mamba-2
    S_t = S'_t + k_t v_tᵀ               decayed attention
    u_t = β_t (v_t − S'_tᵀ k_t)         DeltaNet (Yang et al. 2024) where g = 0; Gated DeltaNet (Yang, Kautz and
    S_t = S'_t + k_t u_tᵀ               Hatamizadeh 2024, eq. 10); KDA (Kimi Linear, 2025) where g is per channel
    y_t = scale · S_tᵀ q_t

Tests compare the backends with it, so it shares no code with them. Gradients are autograd's.
"""

import torch
from torch import Tensor


def reference_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    normalise_keys: bool = False,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row and token by itself: q, k [B, T, Hk, D], v [B, T, H, M], beta [B, T, H], decay [B, T, H(, D)].

    beta None: decayed attention. Value head h has the query and key head h // (H / Hk). A token that `mask` [B, T]
    calls invalid leaves S as it is, and its y is 0; where `resets` [B, T] is True S is zero before the token. Returns
    y [B, T, H, M] and S [B, H, D, M], both float64.
    """
    (b, t, shared, d), (h, m) = q.shape, v.shape[2:]
    scale = d**-0.5 if scale is None else scale
    rows, ends = [], []
    for row in range(b):
        queries, keys, values = (x[row].double().unbind(0) for x in (q, k, v))
        betas, decays = (None if x is None else x[row].double().unbind(0) for x in (beta, decay))
        s = torch.zeros(h, d, m, dtype=torch.float64) if state is None else state[row].double()
        for i in range(t):
            if resets is not None and resets[row, i]:
                s = torch.zeros_like(s)
            if mask is not None and not mask[row, i]:
                rows.append(torch.zeros(h, m, dtype=torch.float64))
                continue
            key, value = keys[i].repeat_interleave(h // shared, 0), values[i]
            if normalise_keys:
                key = key / torch.sqrt((key * key).sum(-1, keepdim=True) + 1e-6)
            if decays is not None:
                s = decays[i].exp().reshape(h, d if decays[i].dim() == 2 else 1, 1) * s
            if betas is not None:
                value = betas[i][:, None] * (value - torch.einsum("hdm,hd->hm", s, key))
            s = s + torch.einsum("hd,hm->hdm", key, value)
            query = queries[i].repeat_interleave(h // shared, 0)
            rows.append(scale * torch.einsum("hdm,hd->hm", s, query))
        ends.append(s)
    y = torch.stack(rows) if rows else v.double()
    return y.reshape(b, t, h, m), (torch.stack(ends) if ends else v.double()).reshape(b, h, d, m)
