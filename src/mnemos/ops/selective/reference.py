"""The selective scan by its equations, token by token in float64 (Gu & Dao 2023, Algorithm 2).

Per channel c, with the state S [N], the step dt_t ≥ 0 and the rates A [N] ≤ 0:

    S_t = exp(dt_t A) ⊙ S_{t−1} + dt_t x_t B_t          y_t = C_t · S_t + D x_t

B_t and C_t [N] are those of all channels. Tests compare the backends with it, so it shares no code with them. Gradients
are autograd's.
"""

import torch
from torch import Tensor


def reference_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row and token by itself: x, dt [B, T, C], A [C, N], B, C [B, T, N], D [C], state [B, C, N].

    A token that `mask` [B, T] calls invalid leaves S as it is, and its y is 0. Where `resets` [B, T] is True S is zero
    before the token, valid or not. Returns y [B, T, C] and S [B, C, N], both float64.
    """
    b, t, c = x.shape
    rows, ends = [], []
    for row in range(b):
        s = torch.zeros(A.shape, dtype=torch.float64) if state is None else state[row].double()
        for i in range(t):
            if resets is not None and resets[row, i]:
                s = torch.zeros_like(s)
            if mask is not None and not mask[row, i]:
                rows.append(torch.zeros(c, dtype=torch.float64))
                continue
            step, value = dt[row, i].double(), x[row, i].double()
            decay = torch.exp(torch.einsum("c,cn->cn", step, A.double()))
            s = decay * s + torch.einsum("c,c,n->cn", step, value, B[row, i].double())
            y = torch.einsum("cn,n->c", s, C[row, i].double())
            rows.append(y if D is None else y + D.double() * value)
        ends.append(s)
    y = torch.stack(rows) if rows else x.double()
    return y.reshape(b, t, c), (torch.stack(ends) if ends else x.double()).reshape(b, *A.shape)
