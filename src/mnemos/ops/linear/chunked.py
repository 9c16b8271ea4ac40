"""Causal linear attention in PyTorch, chunk by chunk, with a backward whose memory is not O(T·D·M).

With o = num/den and den = φ(q)·z + eps, the values v' = [v, 1] include the normaliser: num' = [num, den − eps] is
unnormalised causal linear attention of v', with the state S' = [S, z] of shape [D', M+1]. Within a chunk it is a masked
product, across chunks a running sum:

    num'_i = Σ_{j≤i in the chunk} (q_i·k_j) v'_j + S'ᵀ q_i                 S' = Σ_{j before the chunk} k_j v'_jᵀ

and, with ĝ = g/den, γ = −(ĝ·o), g' = [ĝ, γ] and R' = Σ_{i after the chunk} q_i g'_iᵀ (at the end: dS, dz),

    dq_i = a_i + γ_i z_i    a_i = Σ_{j≤i} (ĝ_i·v_j) k_j + S ĝ_i    γ_i = −(q_i·a_i)/den_i
    dk_j = Σ_{i≥j} (g'_i·v'_j) q_i + R' v'_j
    dv_j = Σ_{i≥j} (q_i·k_j) ĝ_i + Rᵀ k_j            dS_0, dz_0 = R' at the start

γ is computed from a and not from o, because a and γ·z cancel where the values have a mean, and an o that was rounded to
half precision would not let them.

A *slab* is as many chunks as fit the processor's caches. Memory: the inputs, one denominator per token and head, one
S' per slab, and the temporaries of one slab. Sums start from zero in each slab.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import rewritten
from mnemos.ops.backward import Gradients, differentiable_once
from mnemos.ops.delta import decayed_attention
from mnemos.ops.delta.chunked import masked_product
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision, in_full_precision

from .feature_maps import Pointwise

# Measured on a CPU, forward and backward, D = M of 32, 64 and 128: chunks of 32 are fastest up to 32 channels, chunks
# of 64 above; tensors of a slab should have about a megabyte (README.md). GPUs are faster with few large steps.
NARROW, CHUNK_NARROW, CHUNK_WIDE = 32, 32, 64
SLAB_NUMBERS = {"cpu": 2**18}
SLAB_NUMBERS_ELSEWHERE = 2**25


@in_full_precision
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s [B, H, D, M], z -> y, s, z.

    s and z may be None: zeros. Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens.
    """
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    b, _, h, d = k.shape
    if causal and k.numel() and rewritten():  # `_Causal` has no tangents
        return attend_by_decay(q, k, v, s, z, mask, phi, eps, None, "chunked")
    # One expanded number: the backward keeps no memory for it.
    s = v.new_zeros((), dtype=wide).expand(b, h, d, v.shape[-1]) if s is None else s
    z = v.new_zeros((), dtype=wide).expand(b, h, d) if z is None else z
    if causal and q.shape[1] > 1 and k.numel():
        return _Causal.apply(q, k, v, s, z, mask, phi, eps)

    # --- in PyTorch's own operations ---
    q, k, values = _features(q, k, v, mask, phi, wide)
    if causal and k.numel():  # one token, eq. 18 to 20, in few operations: their number is the time of decoding
        s = torch.addcmul(s, k.transpose(1, 2).mT, values.transpose(1, 2))
        z, q = z + k[:, 0], q.transpose(1, 2)  # [B, H, 1, D]
        y = ((q @ s) / (q @ z[..., None] + eps)).transpose(1, 2)
    else:  # all queries read all keys, eq. 5 and 6
        s, z = s + torch.einsum("bnhd,bnhm->bhdm", k, values), z + k.sum(1)
        y = torch.einsum("bthd,bhdm->bthm", q, s) / (torch.einsum("bthd,bhd->bth", q, z)[..., None] + eps)
    return y.to(v.dtype), s, z


def attend_by_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
    resets: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend`, causal, as decayed attention of [v, 1], whose last column is the normaliser: it has resets."""
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    start = None if s is None or z is None else torch.cat([s, z[..., None]], -1)
    # Not by its own mask, which would not read what φ(0) reads.
    q, k, values = _features(q, k, v, mask, phi, wide)
    values = F.pad(values, (0, 1), value=1.0)
    sums, end = decayed_attention(q, k, values, None, start, None, 1.0, resets, backend)
    y = sums[..., :-1] / (sums[..., -1:] + eps)
    return y.to(v.dtype), end[..., :-1].contiguous(), end[..., -1].contiguous()


def _features(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, phi: Pointwise | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """φ(q), and φ(k) and v with zeros in the padding: 0·NaN is NaN."""
    q, k = q.to(wide), zero_invalid(k.to(wide), mask)
    if phi is not None:
        q, k = phi(q), zero_invalid(phi(k), mask)
    return q, k, zero_invalid(v.to(wide), mask)


def _plan(b: int, t: int, h: int, width: int, device: str) -> tuple[int, int]:
    """Tokens per chunk and per slab."""
    chunk = CHUNK_NARROW if width <= NARROW else CHUNK_WIDE
    numbers = SLAB_NUMBERS.get(device, SLAB_NUMBERS_ELSEWHERE)
    chunks = max(1, numbers // max(1, b * h * width * chunk))
    if torch.compiler.is_compiling():
        chunks = -(-t // chunk)  # one slab, because torch.compile would unroll a loop
    return chunk, chunk * chunks


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        s: Tensor,
        z: Tensor,
        mask: Tensor | None,
        phi: Pointwise | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        (b, t, h, d), m = q.shape, v.shape[-1]
        c, length = _plan(b, t, h, max(d, m), q.device.type)
        state = torch.cat([s, z.unsqueeze(-1)], -1).flatten(0, 1)
        y, den, starts = v.new_empty(b, t, h, m), s.new_empty(b, t, h, 1), []
        for a in range(0, t, length):
            here = slice(a, min(a + length, t))
            rows = _Rows(b, here.stop - a, h, c, s.dtype)
            qs, ks, vs = rows.inputs(q, k, v, here, mask, phi)
            starts.append(state)
            before, added = _sums(ks, vs, state)
            state = state + added
            num = rows.back(masked_product(torch.bmm(qs, ks.mT).tril_(), vs).baddbmm_(qs, before))
            den[:, here] = num[..., m:] + eps
            y[:, here] = num[..., :m] / den[:, here]
        ctx.save_for_backward(q, k, v, mask, den, *starts)
        ctx.phi = phi
        state = state.unflatten(0, (b, h))
        return y, state[..., :m].contiguous(), state[..., m].contiguous()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them out once
        compute = functools.partial(_backward, ctx.phi, saved, upstream)
        return *differentiable_once("linear_attention", saved, upstream, compute), None, None, None


def _backward(phi: Pointwise | None, saved: Sequence[Any], upstream: Sequence[Tensor]) -> Gradients:
    """The gradients of q, k, v, s and z, from the last slab to the first."""
    (q, k, v, mask, den, *starts), (gy, gs, gz) = saved, upstream
    (b, t, h, d), m = q.shape, v.shape[-1]
    c, length = _plan(b, t, h, max(d, m), q.device.type)
    state = torch.cat([gs, gz.unsqueeze(-1)], -1).flatten(0, 1).to(den.dtype)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with full_precision(q.device.type):  # the caller may have autocast on, which would round the float32 products
        for index in reversed(range(len(starts))):
            here = slice(index * length, min((index + 1) * length, t))
            rows = _Rows(b, here.stop - here.start, h, c, den.dtype)
            qs, ks, vs = rows.inputs(q, k, v, here, mask, phi)
            gs = rows.split(gy[:, here] / den[:, here], ones=1)
            before, _ = _sums(ks, vs, starts[index])
            weights = torch.bmm(gs[..., :m], vs[..., :m].mT).tril_()
            grad = torch.bmm(weights, ks).baddbmm_(gs[..., :m], before[..., :m].mT)
            gamma = (grad * qs).sum(-1, keepdim=True).neg_().mul_(rows.split(den[:, here].reciprocal()))
            grad = rows.back(grad.addcmul_(gamma, ks.cumsum(1).add_(before[..., m].unsqueeze(1))))
            gs[..., m:] = gamma
            weights = (weights + gamma).tril_()
            after, added = _sums(qs, gs, state, backwards=True)
            state = state + added
            dq[:, here] = grad if phi is None else grad * phi.slope(rows.back(qs))
            grad = rows.back(torch.bmm(weights.mT, qs).baddbmm_(vs, after.mT))
            if phi is not None:
                grad = grad * phi.slope(rows.back(ks))
            dk[:, here] = zero_invalid(grad, None if mask is None else mask[:, here])
            weights = torch.bmm(qs, ks.mT).tril_()
            dv[:, here] = rows.back(torch.bmm(weights.mT, gs[..., :m]).baddbmm_(ks, after[..., :m]))
    state = state.unflatten(0, (b, h))
    return dq, dk, dv, state[..., :m], state[..., m]


class _Rows:
    """Converts [B, T, H, ·] to chunks [B·H·n, c, ·] of the working dtype, padded with zeros, and back."""

    def __init__(self, b: int, t: int, h: int, c: int, dtype: torch.dtype) -> None:
        self.b, self.t, self.h, self.c, self.n, self.dtype = b, t, h, c, -(-t // c), dtype

    def split(self, x: Tensor, phi: Pointwise | None = None, valid: Tensor | None = None, ones: int = 0) -> Tensor:
        """φ(x), zero where not valid [B, T], with `ones` columns of 1 appended."""
        d = x.shape[-1]
        out = torch.empty(self.b, self.h, self.n * self.c, d + ones, dtype=self.dtype, device=x.device)
        out[:, :, : self.t, :d] = x.transpose(1, 2)
        if phi is not None:
            out = phi.value(out)
        if valid is not None:
            out[:, :, : self.t].masked_fill_(~valid[:, None, :, None], 0)
        if self.n * self.c > self.t:
            out[:, :, self.t :] = 0
        if ones:
            out[..., d:] = 1
        return out.view(-1, self.c, d + ones)

    def inputs(
        self, q: Tensor, k: Tensor, v: Tensor, here: slice, mask: Tensor | None, phi: Pointwise | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """φ(q), φ(k) and v' of a slab. Invalid values are set to zero too, because 0·NaN is NaN."""
        valid = None if mask is None else mask[:, here]
        return (
            self.split(q[:, here], phi),
            self.split(k[:, here], phi, valid),
            self.split(v[:, here], None, valid, ones=1),
        )

    def back(self, x: Tensor) -> Tensor:
        """Chunks [B·H·n, c, ·] as [B, T, H, ·], without a copy."""
        return x.view(self.b, self.h, self.n * self.c, -1)[:, :, : self.t].transpose(1, 2)


def _sums(a: Tensor, b: Tensor, start: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Per chunk start + Σ aᵀb over the chunks before it (backwards: after it) [B·H·n, ·, ·]; and Σ aᵀb over all."""
    new = torch.bmm(a.mT, b).unflatten(0, (start.shape[0], -1))
    if start.device.type == "cpu" and not torch.compiler.is_compiling():
        # On a CPU cumsum of a few large matrices takes several times as long as adding them.
        parts = new.unbind(1)
        sums = [torch.zeros_like(start)]
        for part in reversed(parts) if backwards else parts:
            sums.append(sums[-1] + part)
        *before, last = sums
        stacked = torch.stack(before[::-1] if backwards else before, 1)
    else:
        scan = (new.flip(1) if backwards else new).cumsum(1)
        last = scan[:, -1]
        stacked = torch.cat([torch.zeros_like(scan[:, :1]), scan[:, :-1]], 1)
        stacked = stacked.flip(1) if backwards else stacked
    return stacked.add_(start[:, None]).flatten(0, 1), last
