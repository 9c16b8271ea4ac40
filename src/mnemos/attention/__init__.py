"""Attention layers: (x, state) -> (y, state), one file each."""

from .cross import CrossAttention
from .gated import GatedCacheAttention
from .linear import LinearAttention, LinearConfig
from .lsh import LSHAttention, LSHConfig
from .position_bias import PositionBias
from .relative import RelativeAttention, RelativeConfig
from .softmax import SoftmaxAttention, SoftmaxConfig

__all__ = [
    "CrossAttention",
    "GatedCacheAttention",
    "LSHAttention",
    "LSHConfig",
    "LinearAttention",
    "LinearConfig",
    "PositionBias",
    "RelativeAttention",
    "RelativeConfig",
    "SoftmaxAttention",
    "SoftmaxConfig",
]
