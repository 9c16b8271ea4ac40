"""The delta rule and decayed attention in PyTorch, chunk by chunk, with a backward whose memory is not O(T·D·M).

Within a chunk of C tokens, G = cumsum(g) and D_ij = e^{G_i − G_j} for i ≥ j, 0 above. S is the state before the chunk:

    A = tril(β K Kᵀ ⊙ D, −1)     (I + A) V' = β (V − (K ⊙ e^G) S)      V' = V in decayed attention
    O = (Q ⊙ e^G) S + (Q Kᵀ ⊙ D) V'              S ← e^{G_C} S + (K ⊙ e^{G_C − G})ᵀ V'

The triangular system is solved for V' itself, row after row, so no difference U − W S cancels, and no inverse is made.

G_i − G_j is never a difference: every exponent is its own sum of the decays between two tokens (`_between`), so it is ≤ 0, −∞ in
it is no −∞ − (−∞), and a weak decay beside a strong one keeps its digits. Its derivative is a sum over the pairs that a token
lies between, not a difference of the sums over its row and its column.

A decay per channel makes D a tensor [C, C, D], so its chunks have 16 tokens.

A *slab* is as many chunks as fit the processor's caches. Only the inputs and the state before each slab are kept; the backward
computes a slab again, with its graph, from the last to the first.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import forward_differentiated, transformed
from mnemos.ops.linear.chunked import masked_product
from mnemos.ops.once import differentiable_once
from mnemos.ops.precision import full_precision

CHUNK, CHUNK_PER_CHANNEL = 64, 16
SLAB_NUMBERS = {"cpu": 2**18}  # numbers in a tensor of a slab
SLAB_NUMBERS_ELSEWHERE = 2**24

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, beta, decay


def runs_here() -> bool:
    """True: it needs only PyTorch."""
    return True


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True: any device and floating type."""
    return True


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, Hk, D], v [B, T, H, M], beta [B, T, H], decay [B, T, H(, D)], s [B, H, D, M] -> y, s.

    Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens, and C·D exponentials per token with a decay per channel.
    torch.compile unrolls the loop over the chunks and keeps them all.
    """
    (b, t, _, d), (h, m) = k.shape, v.shape[2:]
    if s is None:
        s = v.new_zeros(b, h, d, m, dtype=torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32))
    if t == 0:
        return v.clone(), s
    if t == 1:
        return _token(q, k, v, beta, decay, s, scale)
    if torch.compiler.is_compiling() or transformed() or forward_differentiated():
        return _slab((q, k, v, beta, decay), s, scale)
    y, end = _Recomputed.apply(q, k, v, beta, decay, s, scale)
    return y, end


def _token(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token, in few operations, because their number determines the time of decoding."""
    b, h, d, m = s.shape
    shared = k.shape[2]
    key = k.to(s.dtype).reshape(b, shared, 1, d, 1).expand(-1, -1, h // shared, -1, -1).reshape(b, h, d, 1)
    query = q.to(s.dtype).reshape(b, shared, 1, 1, d).expand(-1, -1, h // shared, -1, -1).reshape(b, h, 1, d)
    value = v.to(s.dtype).reshape(b, h, 1, m)
    if decay is not None:
        s = decay.exp().reshape(b, h, -1, 1) * s
    if beta is not None:
        value = beta.reshape(b, h, 1, 1) * (value - key.mT @ s)
    s = s + key * value
    return (scale * (query @ s)).transpose(1, 2).to(v.dtype), s


class _Recomputed(torch.autograd.Function):
    """See the top of the file."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        decay: Tensor | None,
        s: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        given = q, k, v, beta, decay
        y, starts = v.new_empty(v.shape), []
        length = _slab_length(v, k, decay)
        for a in range(0, v.shape[1], length):
            starts.append(s)
            y[:, a : a + length], s = _slab(_part(given, a, length), s, scale)
        ctx.save_for_backward(*given, *starts)
        ctx.scale = scale
        return y, s

    @staticmethod
    @differentiable_once("delta_rule")
    def backward(ctx: Any, saved: tuple[Tensor, ...], gy: Tensor, gs: Tensor) -> tuple[Tensor | None, ...]:
        given, starts = saved[:5], saved[5:]
        length = _slab_length(given[2], given[1], given[4])
        found = [x if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
        # The caller may have autocast on, which would round the float32 products.
        with full_precision(gy.device.type):
            for a in reversed(range(0, gy.shape[1], length)):
                *parts, start = [
                    x if x is None else x.detach().requires_grad_()
                    for x in (*_part(given, a, length), starts[a // length])
                ]
                with torch.enable_grad():
                    outputs = _slab((*parts,), start, ctx.scale)
                wanted = [x for x in (*parts, start) if x is not None]
                *grads, gs = torch.autograd.grad(outputs, wanted, (gy[:, a : a + length], gs))
                for whole, grad in zip([x for x in found if x is not None], grads, strict=True):
                    whole[:, a : a + length] = grad
        return *found, gs, None


def _part(given: Any, a: int, length: int) -> Inputs:
    q, k, v, beta, decay = (x if x is None else x[:, a : a + length] for x in given)
    return q, k, v, beta, decay


def _chunk(decay: Tensor | None) -> int:
    return CHUNK_PER_CHANNEL if decay is not None and decay.dim() == 4 else CHUNK


def _slab_length(v: Tensor, k: Tensor, decay: Tensor | None) -> int:
    """Tokens per slab: a multiple of CHUNK, so that the states that are kept are few."""
    chunk = _chunk(decay)
    numbers = SLAB_NUMBERS.get(v.device.type, SLAB_NUMBERS_ELSEWHERE)
    width = max(k.shape[3], v.shape[3]) if chunk == CHUNK else chunk * k.shape[3]
    return CHUNK * max(1, numbers // max(1, v.shape[0] * v.shape[2] * width * CHUNK))


def _slab(given: Inputs, s: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence over all tokens of the inputs, in PyTorch's own operations."""
    q, k, v, beta, decay = given
    (b, t, shared, _), h, wide = k.shape, v.shape[2], s.dtype
    c = min(t, _chunk(decay))
    n = -(-t // c)

    def split(x: Tensor) -> Tensor:
        """[B, T, heads, ·] as [B, Hk, heads / Hk, n, C, ·], padded with zeros, which change no state."""
        x = F.pad(x.to(wide).transpose(1, 2), (0, 0, 0, n * c - t))
        return x.reshape(b, shared, x.shape[1] // shared, n, c, x.shape[-1])

    def flat(x: Tensor) -> Tensor:
        """One batch of all heads and chunks."""
        return x.expand(b, shared, h // shared, n, *x.shape[4:]).reshape(b * h * n, *x.shape[4:])

    queries, keys = split(q) * scale, split(k)
    g = decay if decay is None else split(decay if decay.dim() == 4 else decay[..., None])
    reading, likeness, decays = _products(queries, keys, g, beta is not None)
    reading, new = flat(reading), flat(split(v)).unflatten(0, (b * h, n))
    erasing = writing = keys
    if decays is not None:
        before, after, whole = decays
        queries, erasing, writing = queries * before, keys * before, keys * after
        kept = flat(whole).unflatten(0, (b * h, n)).unbind(1)
    additions = flat(writing).mT.unflatten(0, (b * h, n)).unbind(1)
    state, states, written = s.flatten(0, 1), [], []
    if beta is not None:
        weight = split(beta[..., None])
        systems = flat(weight * likeness).unflatten(0, (b * h, n)).unbind(1)
        erasing = flat(weight * erasing).unflatten(0, (b * h, n)).unbind(1)
        new = new * flat(weight).unflatten(0, (b * h, n))
    for i, value in enumerate(new.unbind(1)):
        states.append(state)
        if beta is not None:
            held = torch.baddbmm(value, erasing[i], state, alpha=-1)
            value = torch.linalg.solve_triangular(systems[i], held, upper=False, unitriangular=True)
        written.append(value)
        state = torch.baddbmm(state if decays is None else kept[i] * state, additions[i], value)
    y = masked_product(reading, torch.stack(written, 1).flatten(0, 1))
    y = torch.baddbmm(y, flat(queries), torch.stack(states, 1).flatten(0, 1))
    y = y.reshape(b, h, n * c, y.shape[-1])[:, :, :t].transpose(1, 2)
    return y.to(v.dtype), state.unflatten(0, (b, h))


def _products(
    queries: Tensor, keys: Tensor, g: Tensor | None, delta: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """Of chunks [.., C, D] with log decays g [.., C, 1 or D]: Q Kᵀ ⊙ D, and tril(K Kᵀ ⊙ D, −1) if `delta`;

    and e^G [.., C, 1 or D], e^{G_C − G} and e^{G_C} [.., 1 or D, 1].
    """
    if g is None:
        return (queries @ keys.mT).tril(), (keys @ keys.mT).tril(-1) if delta else keys, None
    pairs = _between(g).exp()
    sums = g.flip(-2).cumsum(-2).flip(-2)
    later = F.pad(sums[..., 1:, :], (0, 0, 0, 1))
    decays = g.cumsum(-2).exp(), later.exp(), sums[..., 0, :, None].exp()
    if g.shape[-1] == 1:
        pairs = pairs[..., 0]
        # 0·∞ above the diagonal is not 0.
        reading = (queries @ keys.mT * pairs).tril()
        return reading, (keys @ keys.mT * pairs).tril(-1) if delta else keys, decays
    both = pairs * keys[..., None, :, :] @ torch.stack([queries, keys], -1)
    return both[..., 0].tril(), both[..., 1].tril(-1), decays


def _between(g: Tensor) -> Tensor:
    """Σ g_l over j < l ≤ i, and −∞ for i < j: [.., C, w] to [.., C, C, w], each a sum of its own."""
    c = g.shape[-2]
    order = torch.ones(c, c, dtype=torch.bool, device=g.device)
    sums = torch.where(order.tril(-1)[..., None], g[..., None, :], 0).cumsum(-3)
    return sums.masked_fill(order.triu(1)[..., None], -torch.inf)
