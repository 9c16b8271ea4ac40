"""Attention layers: (x, state) -> (y, state), one file each."""

from .gated import GatedCacheAttention
from .linear import LinearAttention, LinearConfig
from .softmax import SoftmaxAttention, SoftmaxConfig

__all__ = ["GatedCacheAttention", "LinearAttention", "LinearConfig", "SoftmaxAttention", "SoftmaxConfig"]
