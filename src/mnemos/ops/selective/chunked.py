"""The selective scan in PyTorch, one token after the other, with a backward whose memory is not O(T·C·N).

A *chunk* is CHUNK tokens. Its decays exp(dt A) and additions dt x B [B, CHUNK, C, N] are computed at once; the loop
over its tokens has one operation each. Only the inputs and the state before each chunk are kept. The backward computes
one chunk after the other again, with its graph, from the last to the first. The exponents are dt A ≤ 0; nothing is
divided.
"""

from typing import Any

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, transformed
from mnemos.ops.once import differentiable_once
from mnemos.ops.precision import full_precision

CHUNK = 64

Tokens = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # x, dt, B, C, resets


def runs_here() -> bool:
    """True: it needs only PyTorch."""
    return True


def takes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """True: any device and floating type."""
    return True


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
    if t == 1 or torch.compiler.is_compiling() or transformed() or forward_differentiated():
        y, end = _chunk(tokens, A, s) if t else (x.clone(), s.clone())
    else:
        y, end = _Recomputed.apply(*tokens, A, s)
    y = y if D is None else torch.addcmul(y, x, D)
    y = y if mask is None else y.masked_fill(~mask[..., None], 0)  # also where the state or the gradient is not finite
    return y.to(wanted), end


def _chunk(tokens: Tokens, A: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over all tokens given, in PyTorch's own operations."""
    x, dt, B, C, resets = tokens
    decays, new = torch.exp(dt[..., None] * A), (dt * x)[..., None] * B[:, :, None]
    states = []
    for t, (decay, addition) in enumerate(zip(decays.unbind(1), new.unbind(1), strict=True)):
        if resets is not None:
            s = s.masked_fill(resets[:, t, None, None], 0)
        s = torch.addcmul(addition, decay, s)
        states.append(s)
    return (torch.stack(states, 1) @ C[..., None]).squeeze(-1), s


class _Recomputed(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, resets: Tensor | None, A: Tensor, s: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens, y, starts = (x, dt, B, C, resets), torch.empty_like(x), []
        for a in range(0, x.shape[1], CHUNK):
            starts.append(s)
            y[:, a : a + CHUNK], s = _chunk(_part(tokens, a), A, s)
        ctx.save_for_backward(*tokens, A, *starts)
        return y, s if starts else s.clone()

    @staticmethod
    @differentiable_once("selective_scan")
    def backward(ctx: Any, saved: tuple[Any, ...], gy: Tensor, gs: Tensor) -> tuple[Tensor | None, ...]:
        tokens, A, starts = saved[:5], saved[5], saved[6:]
        found, rates = [torch.empty_like(x) for x in tokens[:4]], torch.zeros_like(A)
        # The caller may have autocast on, which would round the products.
        with full_precision(gy.device.type):
            for a in reversed(range(0, gy.shape[1], CHUNK)):
                part = _part(tokens, a)
                *grads, rate, gs = _gradients(part, A, starts[a // CHUNK], gy[:, a : a + CHUNK], gs)
                rates += rate
                for whole, grad in zip(found, grads, strict=True):
                    whole[:, a : a + CHUNK] = grad
        return *found, None, rates, gs


def _gradients(part: Tokens, A: Tensor, start: Tensor, gy: Tensor, gs: Tensor) -> tuple[Tensor, ...]:
    """Those of a chunk's x, dt, B and C, of A and of the state before it. A function, so that its graph ends."""
    leaves: Any = [x.detach().requires_grad_() for x in (*part[:4], A, start)]
    with torch.enable_grad():
        outputs = _chunk((*leaves[:4], part[4]), *leaves[4:])
    return torch.autograd.grad(outputs, leaves, (gy, gs))


def _part(tokens: Tokens, a: int) -> Any:
    return tuple([x if x is None else x[:, a : a + CHUNK] for x in tokens])
