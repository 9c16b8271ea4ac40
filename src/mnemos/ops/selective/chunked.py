"""The selective scan in PyTorch, one token after the other, with a backward whose memory is not O(T·C·N).

A *chunk* is CHUNK tokens. Its decays exp(dt A) and additions dt x B [B, CHUNK, C, N] are computed at once; the loop
over its tokens has one operation each. Only the inputs and the state before each chunk are kept, and the backward
computes one chunk after the other again (`by_slab`). The exponents are dt A ≤ 0; nothing is divided.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import rewritten
from mnemos.ops.backward import by_slab
from mnemos.ops.precision import in_full_precision

CHUNK = 64


@in_full_precision
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    s: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x, dt [B, T, C], A [C, N], B, C [B, T, N], D [C], s [B, C, N] -> y, s. O(B·T·C·N).

    torch.compile unrolls the loop over the tokens, and then everything is kept for the backward.
    """
    wanted = x.dtype
    x = x.to(dt.dtype)
    if mask is not None:
        x, dt, B, C = (z.masked_fill(~mask[..., None], 0) for z in (x, dt, B, C))
    s = x.new_zeros(len(x), *A.shape) if s is None else s
    tokens = x, dt, B, C, resets
    t = x.shape[1]
    if t == 1 or torch.compiler.is_compiling() or rewritten():
        y, end = _chunk(tokens, (A,), s) if t else (x.clone(), s.clone())
    else:
        y, end = by_slab("selective_scan", _chunk, CHUNK, tokens, (A,), s)
    y = y if D is None else torch.addcmul(y, x, D)
    y = y if mask is None else y.masked_fill(~mask[..., None], 0)  # also where the state or the gradient is not finite
    return y.to(wanted), end


def _chunk(tokens: Sequence[Any], rates: Sequence[Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over all tokens x, dt, B, C, resets, in PyTorch's own operations."""
    (x, dt, B, C, resets), (A,) = tokens, rates
    decays, new = torch.exp(dt[..., None] * A), (dt * x)[..., None] * B[:, :, None]
    states = []
    for t, (decay, addition) in enumerate(zip(decays.unbind(1), new.unbind(1), strict=True)):
        if resets is not None:
            s = s.masked_fill(resets[:, t, None, None], 0)
        s = torch.addcmul(addition, decay, s)
        states.append(s)
    return (torch.stack(states, 1) @ C[..., None]).squeeze(-1), s
