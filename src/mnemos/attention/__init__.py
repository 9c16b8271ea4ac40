"""Attention layers: (x, state) -> (y, state), one file each."""

from .gated import GatedCacheAttention
from .linear import LinearAttention
from .softmax import SoftmaxAttention

__all__ = ["GatedCacheAttention", "LinearAttention", "SoftmaxAttention"]
