"""The delta rule and decayed attention in PyTorch, chunk by chunk, with a backward whose memory is not O(T·D·M).

Within a chunk of C tokens, G = cumsum(g) and D_ij = e^{G_i − G_j} for i ≥ j, 0 above. S is the state before the chunk:

    A = tril(β K Kᵀ ⊙ D, −1)     (I + A) V' = β (V − (K ⊙ e^G) S)      V' = V in decayed attention
    O = (Q ⊙ e^G) S + (Q Kᵀ ⊙ D) V'              S ← e^{G_C} S + (K ⊙ e^{G_C − G})ᵀ V'

The triangular system is solved for V' itself, row by row. No inverse is made, which large keys would spoil.

**Decays.** Every exponent is a sum of decays, never a difference of two such sums: so it is ≤ 0, −∞ needs no care, and
a weak decay beside a strong one keeps its digits. For that the triangle is divided in halves (`_products`): a block of
size s below the diagonal, whose tokens are j < b ≤ i, is

    (Q_i ⊙ e^{Σ g from b to i}) (K_j ⊙ e^{Σ g from j + 1 to b − 1})ᵀ

for s = 1, 2, 4 … C/2. So a decay per channel needs log₂ C exponentials per token and channel, and nothing of size
[C, C, D]. The derivative of a decay is a sum over the pairs of tokens that it lies between.

**Memory.** A *slab* is as many chunks as fit the processor's caches. Only the inputs and the state before each slab are
kept, and the backward computes one slab after the other again (`by_slab`).
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import rewritten
from mnemos.ops.backward import by_slab
from mnemos.ops.precision import in_full_precision

CHUNK = 64  # a power of two
SLAB_NUMBERS = {"cpu": 2**18}  # numbers in a tensor of a slab
SLAB_NUMBERS_ELSEWHERE = 2**25

Decays = tuple[Tensor, Tensor, Tensor]


def name_of(inputs: Sequence[Any]) -> str:
    """The operator of q, k, v, beta, …"""
    return "decayed_attention" if inputs[3] is None else "delta_rule"


@in_full_precision
def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, Hk, D], v [B, T, H, M], beta [B, T, H], decay [B, T, H(, D)], s [B, H, D, M] -> y, s.

    Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens. torch.compile unrolls the loop over the chunks, and then
    everything is kept for the backward.
    """
    (b, t, _, d), (h, m) = k.shape, v.shape[2:]
    if s is None:
        wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        s = v.new_zeros(b, h, d, m, dtype=wide)
    if t == 1:
        return _token(q, k, v, beta, decay, s, scale)
    tokens = v, q, k, beta, decay
    if torch.compiler.is_compiling() or rewritten():
        return _slab(scale, tokens, (), s) if t else (v.clone(), s.clone())
    numbers = SLAB_NUMBERS.get(v.device.type, SLAB_NUMBERS_ELSEWHERE)
    length = CHUNK * max(1, numbers // max(1, b * h * max(d, m) * CHUNK))
    return by_slab(name_of((q, k, v, beta)), functools.partial(_slab, scale), length, tokens, (), s)


def _token(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One token, in few operations, because their number determines the time of decoding."""
    b, h, d, m = s.shape
    shared, each = k.shape[2], h // k.shape[2]
    state = s.unflatten(1, (shared, each))  # [B, Hk, H / Hk, D, M]
    key, query = k.to(s.dtype).view(b, shared, 1, d, 1), q.to(s.dtype).view(b, shared, 1, 1, d)
    value = v.to(s.dtype).view(b, shared, each, 1, m)
    if decay is not None:
        state = decay.exp().reshape(b, shared, each, d if decay.dim() == 4 else 1, 1) * state
    if beta is not None:
        value = beta.reshape(b, shared, each, 1, 1) * (value - key.mT @ state)
    state = state + key * value
    return (scale * (query @ state)).reshape(b, 1, h, m).to(v.dtype), state.flatten(1, 2)


def _slab(scale: float, tokens: Sequence[Any], _: object, s: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence over all tokens v, q, k, beta, decay, in PyTorch's own operations."""
    v, q, k, beta, decay = tokens
    (b, t, shared, _), h = k.shape, v.shape[2]
    c = CHUNK if t >= CHUNK else 1 << int(t - 1).bit_length()  # in a trace t is a tensor
    n = -(-t // c)

    def split(x: Tensor) -> Tensor:
        """[B, T, heads, ·] as [B, Hk, heads / Hk, n, C, ·], padded with zeros, which change no state."""
        x = F.pad(x.to(s.dtype).transpose(1, 2), (0, 0, 0, n * c - t))
        return x.reshape(b, shared, x.shape[1] // shared, n, c, x.shape[-1])

    def flat(x: Tensor) -> Tensor:
        """[B·H, n, ·, ·]"""
        return x.expand(b, shared, h // shared, n, *x.shape[4:]).reshape(b * h, n, *x.shape[4:])

    queries, keys, new = split(q) * scale, split(k), flat(split(v))
    g = decay if decay is None else split(decay if decay.dim() == 4 else decay[..., None])
    reading, likeness, decays = _products(queries, keys, g, beta is not None)
    erasing = writing = keys
    factors = None
    if decays is not None:
        before, after, whole = decays
        queries, erasing, writing = queries * before, keys * before, keys * after
        factors = flat(whole).unbind(1)
    if beta is not None and likeness is not None:
        weight = split(beta[..., None])
        systems, erased = flat(weight * likeness).unbind(1), flat(weight * erasing).unbind(1)
        new = new * flat(weight)
    additions = flat(writing).mT.unbind(1)
    state, states, written = s.flatten(0, 1), [], []
    for i, values in enumerate(new.unbind(1)):
        states.append(state)
        if likeness is not None:
            values = torch.baddbmm(values, erased[i], state, alpha=-1)
            values = torch.linalg.solve_triangular(systems[i], values, upper=False, unitriangular=True)
        written.append(values)
        state = torch.baddbmm(state if factors is None else factors[i] * state, additions[i], values)
    y = masked_product(flat(reading).flatten(0, 1), torch.stack(written, 1).flatten(0, 1))
    y = torch.baddbmm(y, flat(queries).flatten(0, 1), torch.stack(states, 1).flatten(0, 1))
    y = y.reshape(b, h, n * c, v.shape[3])[:, :, :t].transpose(1, 2)
    return y.to(v.dtype), state.unflatten(0, (b, h))


def _products(
    queries: Tensor, keys: Tensor, g: Tensor | None, delta: bool
) -> tuple[Tensor, Tensor | None, Decays | None]:
    """Q Kᵀ ⊙ D, tril(K Kᵀ ⊙ D, −1) if `delta`, and if there are decays e^G, e^{G_C − G} and e^{G_C}.

    Those are [.., C, w], [.., C, w] and [.., w, 1]. queries, keys [.., C, D], g [.., C, w], w = 1 or D; with decays C
    is a power of two. See the top of the file.
    """
    if g is None:
        return (queries @ keys.mT).tril(), (keys @ keys.mT).tril(-1) if delta else None, None
    left = torch.stack([queries, keys] if delta else [queries], -2)  # [.., C, P, D], P products
    diagonal = F.pad((queries * keys).sum(-1, keepdim=True), (0, left.shape[-2] - 1))
    products = diagonal.expand(*g.shape[:-1], -1)[..., None, :, None]  # [.., C / size, size, P, size]
    inside, later = g, torch.zeros_like(g)  # of the blocks of `size` tokens: Σ g up to a token, and after it
    total = g  # and of all their tokens [.., C / size, w]
    size = 1
    while size < g.shape[-2]:
        blocks = -1, 2, size
        inside0, inside1 = inside.unflatten(-2, blocks).unbind(-3)
        later0, later1 = later.unflatten(-2, blocks).unbind(-3)
        total0, total1 = total.unflatten(-2, (-1, 2)).unbind(-2)
        right = keys.unflatten(-2, blocks).select(-3, 0) * later0.exp()
        rows = left.unflatten(-3, blocks).select(-4, 1) * inside1.exp()[..., None, :]
        across = (rows.flatten(-3, -2) @ right.mT).unflatten(-2, (size, -1))
        upper, lower = products.unflatten(-4, (-1, 2)).unbind(-4)
        products = torch.cat([F.pad(upper, (0, size)), torch.cat([across, lower], -1)], -3)
        inside = torch.cat([inside0, inside1 + total0[..., None, :]], -2).flatten(-3, -2)
        later = torch.cat([later0 + total1[..., None, :], later1], -2).flatten(-3, -2)
        total = total0 + total1
        size *= 2
    reading, likeness = products.squeeze(-4).select(-2, 0), products.squeeze(-4).select(-2, -1) if delta else None
    return reading, likeness, (inside.exp(), later.exp(), total.mT.exp())


def masked_product(weights: Tensor, values: Tensor) -> Tensor:
    """The product of weights [n, c, c], which are 0 where j > i, with values [n, c, M].

    A product with 0 does not remove a value that is not finite, so such values are added apart, from their token on.
    They have no gradient: that of a sum of zeros, added and taken off again, would round the gradient of the product.
    """
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    return torch.bmm(weights, finite) + (values - finite).detach().cumsum(1)
