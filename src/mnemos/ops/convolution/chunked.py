"""The short causal convolution in PyTorch: W products of the weights with inputs that are shifted along the tokens.

Invalid tokens are first sorted behind the valid ones of their row, which leaves every valid token's window beside it. A
reset is a number of its sequence: inputs of another sequence than the token's count as zeros. The operations are
PyTorch's own, with all of their derivatives.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.padding import take, valid_first
from mnemos.ops.precision import in_full_precision


@in_full_precision
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """x [B, T, C], weight [C, W], state [B, W − 1, C] -> y, state. O(B·T·C·W).

    Kept for the backward: a copy of x and, with an activation, z; with a mask about two more, with resets W copies.
    """
    (b, t, c), w = x.shape, weight.shape[1]
    dtype = x.dtype
    wide = torch.float64 if torch.float64 in (dtype, weight.dtype) else torch.float32
    x, weight = x.to(wide), weight.to(wide)
    start = x.new_zeros(b, w - 1, c) if state is None else state.to(wide)
    sequence = None if resets is None else resets.cumsum(1)
    order = None
    if mask is not None:
        # A product with 0 would keep an invalid NaN, here and in the weights' gradient.
        x = x.masked_fill(~mask[..., None], 0)
        order = valid_first(mask)
        x = take(x, order)
        sequence = sequence if sequence is None else sequence.gather(1, order)
    seen = torch.cat([start, x], 1)
    of = None if sequence is None else F.pad(sequence, (w - 1, 0))  # the state belongs to sequence 0
    z = torch.zeros_like(x) if bias is None else bias.to(wide).expand(b, t, c)
    for i in range(w):
        part = seen[:, i : i + t]
        if of is not None:
            part = part.masked_fill((of[:, i : i + t] != of[:, w - 1 :])[..., None], 0)
        z = torch.addcmul(z, part, weight[:, i])
    y = z if activation is None else F.silu(z)
    at = torch.arange(t, t + w - 1, device=x.device).expand(b, -1)  # the last of `seen` that are valid
    if mask is not None and order is not None:
        at = at - (~mask).sum(1, keepdim=True)
        y = take(y, order.argsort(1)).masked_fill(~mask[..., None], 0)
    end = take(seen, at)
    if of is not None and resets is not None:
        end = end.masked_fill((of.gather(1, at) != resets.sum(1, keepdim=True))[..., None], 0)
    return y.to(dtype), end.to(dtype)
