"""The gated recurrent cache's update, eq. 4 and 5 of Cached Transformers, for a batch; its backward by hand."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import transformed
from mnemos.ops.precision import full_precision

aten = torch.ops.aten
_EPS = 1e-5  # of the layer norm


class GateWeights(NamedTuple):
    """What an update opened: g_u and g_r [B, Tm, Dm]. To look at: no gradient flows through them."""

    update: Tensor
    reset: Tensor


def gated_update(
    source: Tensor,
    cache: Tensor,
    update: tuple[Tensor, Tensor],
    reset: tuple[Tensor, Tensor],
    candidate: tuple[Tensor, Tensor],
    norm: tuple[Tensor, Tensor] | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, GateWeights]:
    """C_t = (1 − g_u) ⊙ C + g_u ⊙ C̃ for S̄ `source` [B, Tm, Dm] and `cache` [Tm, Dm] or [B, Tm, Dm].

        g_u = σ(W_u [S̄ ; C])    g_r = σ(W_r [S̄ ; C])    C̃ = W_c [S̄ ; g_r ⊙ C]

    update, reset, candidate: (weight [Dm, 2·Dm], bias [Dm]). With `norm`, a layer norm's (gain, shift), the
    candidate is LN(GELU(·)), whose size is bounded; without, the recurrence is linear in C and is not. With `places`
    [Tm] (integers) source is [B, T, Dm] and slot i takes its token places[i].

    Each weight is split in its two halves, so that [S̄ ; C] is never built and a cache that the batch shares
    is multiplied once, not B times: 4·B·Tm·Dm² multiply-adds for it, 6 for a cache a row. What comes out of a product
    is added to and squashed in place: the traffic of elementwise work is most of an update's time. For the backward
    nothing is kept but what was given: it makes the products again, 4·B·Tm·Dm², beside the 8 that are its own. A
    gradient that is itself to be differentiated is taken by autograd, and keeps all.
    """
    given = (source, cache, *update, *reset, *candidate, *(norm or (None, None)))
    differentiates = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    with full_precision(source.device.type):
        # A transformation of functions (vmap, jvp) knows each operation, and not ours.
        compute = _Update.apply if differentiates and not _transformed(source) else _update
        new, g_u, g_r = compute(places, *given)
    return new, GateWeights(g_u, g_r)


def _transformed(tensor: Tensor) -> bool:
    """Whether functions are being transformed (vmap, jvp), or a tensor is many at once (is_grads_batched)."""
    if torch.compiler.is_compiling():
        return False
    return transformed(tensor)


def _raw(
    places: Tensor | None, source: Tensor, cache: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """S̄, g_u, g_r, g_r ⊙ C and W_c [S̄ ; g_r ⊙ C]."""
    w_u, b_u, w_r, b_r, w_c, b_c = weights
    d = source.shape[-1]
    slots = (source if places is None else source.index_select(1, places)).to(cache.dtype)
    rows = slots.flatten(0, 1)  # a matrix whose rows may stand apart is multiplied without a copy

    def product(weight: Tensor, bias: Tensor) -> Tensor:
        return F.linear(rows, weight[:, :d], bias).unflatten(0, slots.shape[:2])

    g_u, g_r = (product(w, b).add_(F.linear(cache, w[:, d:])).sigmoid_() for w, b in ((w_u, b_u), (w_r, b_r)))
    gated = g_r * cache
    return slots, g_u, g_r, gated, product(w_c, b_c).add_(F.linear(gated, w_c[:, d:]))


def _update(places: Tensor | None, source: Tensor, cache: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C_t, g_u, g_r."""
    *gates, gain, shift = weights
    _, g_u, g_r, _, new = _raw(places, source, cache, *gates)
    if gain is not None:
        new = F.layer_norm(F.gelu(new), new.shape[-1:], gain, shift, _EPS)
    return torch.lerp(cache.expand_as(new), new, g_u), g_u, g_r


class _Update(torch.autograd.Function):
    forward = staticmethod(_update)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple:
        places, *given = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        with full_precision(grad.device.type):  # as the forward was
            if not torch.is_grad_enabled() and not _transformed(grad):
                return None, *_backward(needed[1], grad, places, *given)
            with torch.enable_grad():
                # Views, for gradients of this update alone: what is given may be made of one another.
                given = [None if t is None else t.view_as(t) for t in given]
                new = _update(places, *given)[0]
            wanted = [t for t, wants in zip(given, needed, strict=True) if wants]
            found = iter(torch.autograd.grad(new, wanted, grad, create_graph=torch.is_grad_enabled()))
            return None, *(next(found) if wants else None for wants in needed)


def _backward(
    moves: bool, grad: Tensor, places: Tensor | None, source: Tensor, cache: Tensor, *weights: Tensor
) -> tuple:
    """The gradient of all that C_t is made of, in its order; None for a cache, unless it `moves`."""
    *gates, gain, shift = weights
    w_u, _, w_r, _, w_c, _ = gates
    d = source.shape[-1]
    slots, g_u, g_r, gated, raw = _raw(places, source, cache, *gates)
    d_raw, d_gain, d_shift = grad * g_u, None, None
    if gain is None:
        new = raw
    else:
        squashed = F.gelu(raw)
        new, mean, deviation = torch.native_layer_norm(squashed, [d], gain, shift, _EPS)
        d_raw, d_gain, d_shift = aten.native_layer_norm_backward(
            d_raw, squashed, [d], mean, deviation, gain, shift, [True, True, True]
        )
        d_raw = aten.gelu_backward(d_raw, raw)
    d_gated = F.linear(d_raw, w_c[:, d:].t())
    d_cache = None
    if moves:
        d_cache = torch.addcmul(grad, grad, g_u, value=-1).addcmul_(d_gated, g_r)
    # All of these are made here and used once: a sigmoid's gradient is g·(1 − g).
    d_u = new.sub_(cache).mul_(grad).mul_(g_u.addcmul_(g_u, g_u, value=-1))
    d_r = d_gated.mul_(cache).mul_(g_r.addcmul_(g_r, g_r, value=-1))

    d_slots = d_u.flatten(0, 1) @ w_u[:, :d]
    d_slots = d_slots.addmm_(d_r.flatten(0, 1), w_r[:, :d]).addmm_(d_raw.flatten(0, 1), w_c[:, :d]).view_as(d_raw)
    if places is not None:
        d_slots = torch.zeros_like(source, dtype=cache.dtype).index_add_(1, places, d_slots)
    if d_cache is not None:
        d_cache += F.linear(d_u, w_u[:, d:].t()) + F.linear(d_r, w_r[:, d:].t())
        d_cache = d_cache.sum_to_size(cache.shape)

    def linear(of: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """Of a weight and its bias, from that of its product: of its half that saw S̄, and of that beside."""
        flat = of.flatten(0, 1)
        shared = of.sum_to_size(beside.shape).flatten(0, -2)
        halves = flat.t() @ slots.flatten(0, 1), shared.t() @ beside.flatten(0, -2)
        return torch.cat(halves, 1), flat.sum(0)

    return (
        d_slots.to(source.dtype),
        d_cache,
        *linear(d_u, cache),
        *linear(d_r, cache),
        *linear(d_raw, gated),
        d_gain,
        d_shift,
    )
