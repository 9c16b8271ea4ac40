"""The short causal convolution by its equation, token by token in float64.

Per channel, with the weights w_1 … w_W and the window of the last W valid inputs x̃_1 … x̃_W, the token's own last:

    y_t = a(bias + Σ_i w_i x̃_i)         a(z) = z, or silu: z / (1 + e^−z)

The window holds zeros where fewer inputs were seen. A depthwise convolution that is padded on the left, as in H3 (Fu et
al. 2023), Mamba and Gated DeltaNet. Tests compare the backends with it, so it shares no code with them. Gradients are
autograd's.
"""

import torch
from torch import Tensor


def reference_short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    resets: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Every row and token by itself: x [B, T, C], weight [C, W], bias [C], state [B, W − 1, C].

    A token that `mask` [B, T] calls invalid does not enter the window, and its y is 0. Where `resets` [B, T] is True
    the window is empty before the token, valid or not. Returns y [B, T, C] and the window's last W − 1 inputs, float64.
    """
    (b, t, c), w = x.shape, weight.shape[1]
    rows, ends = [], []
    for row in range(b):
        window = [torch.zeros(c, dtype=torch.float64) for _ in range(w - 1)]
        if state is not None:
            window = [state[row, i].double() for i in range(w - 1)]
        for i in range(t):
            if resets is not None and resets[row, i]:
                window = [torch.zeros(c, dtype=torch.float64) for _ in range(w - 1)]
            if mask is not None and not mask[row, i]:
                rows.append(torch.zeros(c, dtype=torch.float64))
                continue
            window.append(x[row, i].double())
            z = torch.zeros(c, dtype=torch.float64) if bias is None else bias.double()
            for j in range(w):
                z = z + weight[:, j].double() * window[j]
            rows.append(z if activation is None else z / (1 + torch.exp(-z)))
            window = window[1:]
        ends += window
    y = torch.stack(rows) if rows else x.double()
    return y.reshape(b, t, c), torch.stack(ends).reshape(b, w - 1, c) if ends else x.new_zeros(b, w - 1, c).double()
