"""The update of a gated recurrent cache, eq. 4 and 5 of Cached Transformers, whose backward computes it again.

`gated_update` computes the equations for tokens that are as many as the slots; `write` is what a forward does: it
resamples its tokens to the slots, updates, and takes the mean over the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import dispatch_mode_active, transformed
from mnemos.modes import in_graph
from mnemos.ops.backward import differentiate_again
from mnemos.ops.precision import full_precision

from . import native
from .resampling import nearest_tokens, resample, same_number

_EPS = 1e-5  # of the layer norm


class GateValues(NamedTuple):
    """The gates of an update: g_u and g_r [B, Tm, Dm], for inspection; no gradient flows through them."""

    update: Tensor
    reset: Tensor


def gated_update(
    source: Tensor,
    cache: Tensor,
    update: tuple[Tensor, Tensor],
    reset: tuple[Tensor, Tensor],
    candidate: tuple[Tensor, Tensor],
    norm: tuple[Tensor, Tensor] | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, GateValues]:
    """C_t = (1 − g_u) ⊙ C + g_u ⊙ C̃ for S̄ `source` [B, Tm, Dm] and `cache` [Tm, Dm] or [B, Tm, Dm].

        g_u = σ(W_u [S̄ ; C])    g_r = σ(W_r [S̄ ; C])    C̃ = W_c [S̄ ; g_r ⊙ C]

    update, reset, candidate: (weight [Dm, 2·Dm], bias [Dm]). norm: (gain, shift) of a layer norm; the candidate is then
    LN(GELU(·)), which is bounded. Without it the recurrence is linear in C and unbounded. index [Tm] integers: source
    is [B, T, Dm] and slot i takes its token index[i].

    Each weight is split into its two halves: [S̄ ; C] is not built, and a cache shared by the batch is multiplied once
    instead of B times. Cost of a forward: 4·B·Tm·Dm² multiply-adds, 6·B·Tm·Dm² for a cache per row. Sums and
    non-linearities work in place, because the memory traffic of elementwise operations takes most of the time. The
    backward keeps only the inputs: it computes the products again, 4·B·Tm·Dm², and 8·B·Tm·Dm² of its own. If its
    result must be differentiable too, all intermediates are kept.
    """
    inputs = source, cache, *update, *reset, *candidate, *(norm or (None, None))
    differentiates = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    with full_precision(source.device.type):
        # Function transforms (vmap, jvp) and graphs have rules for PyTorch's operations, and none for `_Update`.
        plain = in_graph() or transformed(source)
        compute = _Update.apply if differentiates and not plain else _update
        new, g_u, g_r = compute(index, *inputs)
    return new, GateValues(g_u, g_r)


def _update(index: Tensor | None, source: Tensor, cache: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """C_t, g_u, g_r."""
    w_u, b_u, w_r, b_r, w_c, b_c, gain, shift = weights
    d = source.shape[-1]
    # Not in place where a mode observes the operations: selective checkpointing keeps results of products.
    observed = not torch.compiler.is_compiling() and dispatch_mode_active()
    add, sigmoid = (Tensor.add, Tensor.sigmoid) if observed else (Tensor.add_, Tensor.sigmoid_)
    slots = (source if index is None else source.index_select(1, index)).to(cache.dtype)
    rows = slots.flatten(0, 1)  # a matrix with any row stride is multiplied without a copy

    def product(weight: Tensor, bias: Tensor, beside: Tensor) -> Tensor:
        """W [S̄ ; beside] + b."""
        return add(F.linear(rows, weight[:, :d], bias).unflatten(0, slots.shape[:2]), F.linear(beside, weight[:, d:]))

    g_u, g_r = sigmoid(product(w_u, b_u, cache)), sigmoid(product(w_r, b_r, cache))
    new = product(w_c, b_c, g_r * cache)
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
        index, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        with full_precision(grad.device.type):  # as in the forward
            return None, *differentiate_again(lambda *args: _update(index, *args)[:1], inputs, needed, [grad])


Pair = tuple[Tensor, Tensor]
Weights = Sequence[Tensor | None]


class Written(NamedTuple):
    """new: C_t [B, Tm, Dm]. mean: its mean [Tm, Dm] over the rows with a valid token; rows: their number, []."""

    new: Tensor
    mean: Tensor | None
    rows: Tensor | None


def write(
    source: Tensor,
    cache: Tensor,
    weights: Weights,
    mask: Tensor | None = None,
    method: str = "nearest",
    grid: tuple[int, int] | None = None,
    mean: bool = False,
    observe: Callable[[GateValues], None] | None = None,
) -> Written:
    """C_t of tokens `source` [B, T, Dm], valid where mask [B, T] bool, and `cache` [Tm, Dm] or [B, Tm, Dm].

    The tokens of each row are resampled to the slots (`resample`: method, grid); `gated_update` then computes C_t. A
    row without a valid token keeps its cache and is not counted in the mean, which is computed if `mean`. weights:
    weight [Dm, 2·Dm] and bias [Dm] of update gate, reset gate and candidate, and gain and shift of its layer norm or
    None, None. observe: is called with the gates.

    Cost: that of `gated_update`. On the CPU in float32 one kernel computes all of it (native.py), unless the gates are
    observed. Raises InputError as `resample` does.
    """
    tokens, slots = source.shape[1], cache.shape[-2]
    resampled = method != "nearest" or tokens == 0
    if resampled:
        source = resample(source.to(cache.dtype), slots, mask, method, grid)
        if tokens == 0:  # nothing is written
            mask = torch.zeros(source.shape[:2], dtype=torch.bool, device=source.device)
        elif mask is not None and tokens != slots:  # a slot has no padding of its own: only whole rows do
            mask = mask.any(1, keepdim=True).expand(-1, slots)
    composed: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = partial(_compose, resampled, mean, observe)
    inputs = source, cache, mask, *weights
    kernel = native.Update(composed, resampled, mean)
    if observe is None and native.takes(*inputs) and kernel.fits(*inputs):
        return Written(*native.fused(kernel, *inputs))
    return Written(*composed(*inputs))


def _compose(
    resampled: bool,
    mean: bool,
    observe: Callable[[GateValues], None] | None,
    source: Tensor,
    cache: Tensor,
    mask: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`write` in PyTorch's operations."""
    slots, tokens = cache.shape[-2], None
    if not resampled:
        if mask is not None:
            source = resample(source.to(cache.dtype), slots, mask)
        elif not same_number(source.shape[1], slots):  # the backward resamples again, which saves keeping the result
            tokens = nearest_tokens(source.shape[1], slots, source.device)
        else:
            source = source.to(cache.dtype)
    rows = None if mask is None else mask.any(1)
    if rows is not None:
        source = torch.where(rows[:, None, None], source, 0)  # padding may hold anything, also NaN in the backward
    w_u, b_u, w_r, b_r, w_c, b_c, *norm = cast(Sequence[Tensor], weights)
    affine = None if norm[0] is None else (norm[0], norm[1])
    new, gates = gated_update(source, cache, (w_u, b_u), (w_r, b_r), (w_c, b_c), affine, tokens)
    if rows is not None:
        new = torch.where(rows[:, None, None], new, cache)
    if observe is not None:
        observe(gates)
    return (new, *batch_mean(new, rows)) if mean else (new, None, None)


def batch_mean(new: Tensor, rows: Tensor | None) -> Pair:
    """The mean [Tm, Dm] of C_t [B, Tm, Dm] over `rows` ([B] bool, None: all), and the number of rows."""
    if rows is None:
        mean = new.mean(0) if new.shape[0] else new.sum(0)  # of no row: zeros, not NaN, which a sum would keep
        return mean, torch.full((), new.shape[0], dtype=new.dtype, device=new.device)
    share = rows.to(new.dtype)
    count = share.sum()
    return torch.einsum("b,btd->td", share, new) / count.clamp(min=1), count
