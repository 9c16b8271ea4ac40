"""What steps of recurrent layers share: the causal convolution with its window, norms, and the type of memories."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_cache import FunctionalCache, following


def memory_dtype(x: Tensor) -> torch.dtype:
    """float32 at least: half precision does not hold a long sum."""
    return torch.promote_types(x.dtype, torch.float32)


def convolved(x: Tensor, window: Tensor | None, conv: Any, cache: FunctionalCache) -> tuple[Tensor, Tensor]:
    """A depthwise causal convolution of x [B, T, C] and the last K − 1 inputs, which are the next window.

    conv: an nn.Conv1d of kernel K with C groups. window [B, K − 1, C]: zeros in new rows; None: a first call.
    """
    before = conv.kernel_size[0] - 1
    window = x.new_zeros(len(x), before, x.shape[-1]) if window is None else window.to(x.dtype)
    joined = following(window, x, cache.padding)
    y = F.conv1d(joined.mT, conv.weight, conv.bias, groups=conv.groups)
    return y.mT, joined[:, x.shape[1] :].clone()


def only_valid(x: Tensor, cache: FunctionalCache, value: float = 0.0) -> Tensor:
    """x [B, T, ..] with `value` at padding, in memory's type."""
    x = x.to(memory_dtype(x))
    if cache.valid is None:
        return x
    valid = cache.valid.to(x.device)
    return x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), value)


def rms(x: Tensor, eps: float, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x / √(mean x² + ε) over the last axis, times a weight; computed in `dtype`, by default memory's type."""
    wide = x.to(dtype or memory_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight
