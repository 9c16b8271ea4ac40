"""Attention layers: (x, state) -> (y, state), one file each."""

from .gated import GatedCacheAttention
from .linear import LinearAttention, LinearConfig
from .lsh import LSHAttention, LSHConfig
from .relative import RelativeAttention, RelativeConfig
from .softmax import SoftmaxAttention, SoftmaxConfig

__all__ = [
    "GatedCacheAttention",
    "LSHAttention",
    "LSHConfig",
    "LinearAttention",
    "LinearConfig",
    "RelativeAttention",
    "RelativeConfig",
    "SoftmaxAttention",
    "SoftmaxConfig",
]
