"""Functions of flash-linear-attention's modules in PyTorch: norms, SwiGLU and cross entropies, with their gradients.

`fla_on_cpu` registers them under the names of fla (0.6), whose arguments they have. All compute in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_norm_of(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    is_rms_norm: bool = False,
) -> Tensor:
    """norm(x) ⊙ gate, in x's dtype, computed in float32."""
    wide, gate = x.float(), g.float()
    if not is_rms_norm:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return (y * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))).to(x.dtype)


def gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    is_rms_norm: bool = False,
    **ignored: Any,
) -> tuple[Tensor, None, None, Tensor]:
    """`layer_norm_gated_fwd`. The means and lengths, which only their backward pass reads, are left out."""
    return gated_norm_of(x, g, weight, bias, activation, eps, is_rms_norm), None, None, x


def gated_norm_gradients(
    dy: Tensor,
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: None = None,
    rstd: None = None,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    **ignored: Any,
) -> tuple[Tensor | None, ...]:
    """`layer_norm_gated_bwd`: the gradients of x, gate, weight and bias."""

    def forward(x: Tensor, g: Tensor, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
        return [gated_norm_of(x, g, weight, bias, activation, eps, is_rms_norm)]

    return *gradients(forward, (x, g, weight, bias), [dy]), None


def gradients(
    forward: Callable[..., list[Tensor]], inputs: tuple[Tensor | None, ...], given: list[Tensor]
) -> list[Tensor | None]:
    """The gradients of inputs, None for those that are None. The outputs are computed again."""
    with torch.enable_grad():
        again = [x if x is None else x.detach().requires_grad_() for x in inputs]
        outputs = forward(*again)
        found = iter(torch.autograd.grad(outputs, [x for x in again if x is not None], given))
    return [x if x is None else next(found) for x in inputs]


def norm_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """`layer_norm_fwd` of x [T, D], or of x plus the residual: y, means [T], 1/standard deviations [T], and the sum.

    weight and bias [G·D] hold D numbers for each of G groups; row t belongs to group t mod G.
    """
    wide = x.float() if residual is None else x.float() + residual.float()
    kept = residual_dtype if residual is None else residual.dtype
    mean = None if is_rms_norm else wide.mean(-1)
    centred = wide if mean is None else wide - mean[:, None]
    inverse = torch.rsqrt(centred.square().mean(-1) + eps)
    y = (centred * inverse[:, None]).view(-1, num_groups, x.shape[-1])
    y = y if weight is None else y * weight.view(num_groups, -1)
    y = y if bias is None else y + bias.view(num_groups, -1)
    y = y.view(x.shape).to(x.dtype if out_dtype is None else out_dtype)
    return y, mean, inverse, x if residual is None and kept in (None, x.dtype) else wide.to(kept)


def norm_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    num_groups: int = 1,
    **ignored: Any,
) -> tuple[Tensor | None, ...]:
    """`layer_norm_bwd`: the gradients of input, weight, bias and residual. x: the sum that was normalised."""
    assert rstd is not None
    wide, grad = (x.float() if mean is None else x.float() - mean[:, None]) * rstd[:, None], dy.float()
    groups = (-1, num_groups, x.shape[-1])
    dw = None if weight is None else (grad * wide).view(groups).sum(0).view_as(weight).to(weight.dtype)
    db = None if bias is None else grad.view(groups).sum(0).view_as(bias).to(bias.dtype)
    scaled = grad if weight is None else (grad.view(groups) * weight.view(num_groups, -1)).view(x.shape)
    dx = scaled - wide * (scaled * wide).mean(-1, keepdim=True)
    dx = (dx if is_rms_norm else dx - scaled.mean(-1, keepdim=True)) * rstd[:, None]
    dx = dx if dres is None else dx + dres.float()
    return dx.to(x_dtype or x.dtype), dw, db, dx.to(x.dtype) if has_residual else None


def swiglu(x: Tensor, y: Tensor, **ignored: Any) -> Tensor:
    """`swiglu_fwd`: silu(x) ⊙ y."""
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def swiglu_gradients(x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False, **ignored: Any) -> tuple[Tensor, ...]:
    """`swiglu_fwdbwd`: the gradients of x and y for that of the product, g; with `use_weight` the product too."""
    wide, share, grad = x.float(), x.float().sigmoid(), g.float()
    dx = (grad * y.float() * share * (1 + wide * (1 - share))).to(x.dtype)
    dy = (grad * wide * share).to(y.dtype)
    return (dx, dy, swiglu(x, y)) if use_weight else (dx, dy)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    **ignored: Any,
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """`cross_entropy_fwd` of logits [N, V]: losses [N], their part λ·lse², lse = log Σ e^logit, V, and 0."""
    wide = _bounded(logits, logit_scale, logit_softcapping)[0]
    lse, counts = wide.logsumexp(-1), target != ignore_index
    right = wide.gather(-1, target.where(counts, 0)[:, None])[:, 0]
    extra = (lse_square_scale * lse.square()).where(counts, 0)
    smooth = label_smoothing * wide.mean(-1) if label_smoothing else 0.0
    loss = (lse - (1 - label_smoothing) * right - smooth).where(counts, 0) + extra
    return loss, extra, lse, logits.shape[1], 0


def cross_entropy_gradients(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    total_classes: int | None = None,
    class_start_idx: int = 0,
    inplace_backward: bool = False,
    **ignored: Any,
) -> Tensor:
    """`cross_entropy_bwd`: the gradient of the logits, in their place where `inplace_backward` says so."""
    wide, slope = _bounded(logits, logit_scale, logit_softcapping)
    counts = target != ignore_index
    found = (wide - lse[:, None]).exp() * (1 + 2 * lse_square_scale * lse)[:, None] - label_smoothing / logits.shape[1]
    found.scatter_add_(-1, target.where(counts, 0)[:, None], found.new_full((len(found), 1), label_smoothing - 1))
    found = found * slope * (dloss.float().where(counts, 0) * logit_scale)[:, None]
    return logits.copy_(found) if inplace_backward else found.to(logits.dtype)


def times(do: Tensor, dx: Tensor, dw: Tensor | None, db: Tensor | None) -> tuple[Tensor | None, ...]:
    """`fused_linear_cross_entropy_bwd`: gradients times that of the loss. A second call may need them: not in place."""
    return tuple([grad if grad is None else grad * do for grad in (dx, dw, db)])


def _bounded(logits: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | float]:
    """The scaled logits, bounded by c·tanh(x/c) if there is a cap c, and the slope of the bound."""
    wide = logits.float() * scale
    if cap is None:
        return wide, 1.0
    share = (wide / cap).tanh()
    return cap * share, 1 - share.square()
