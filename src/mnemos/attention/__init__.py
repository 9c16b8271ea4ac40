"""Attention layers: (x, state) -> (y, state), one file each."""

from .block_sparse import BlockSparseAttention, BlockSparseConfig
from .compressive import CompressiveAttention, CompressiveConfig
from .cross import CrossAttention
from .decayed import GatedLinearAttention, GLAConfig, Retention, RetentionConfig
from .delta import DeltaAttention, DeltaConfig, GatedDeltaConfig, KimiDeltaConfig
from .gated import GatedCacheAttention
from .linear import LinearAttention, LinearConfig, PlacedSums
from .mamba2 import Mamba2Attention, Mamba2Config
from .position_bias import PositionBias
from .recurrent import RecurrentSums
from .reformer import ReformerAttention, ReformerConfig
from .relative import RelativeAttention, RelativeConfig
from .softmax import SoftmaxAttention, SoftmaxConfig

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConfig",
    "CompressiveAttention",
    "CompressiveConfig",
    "CrossAttention",
    "DeltaAttention",
    "DeltaConfig",
    "GLAConfig",
    "GatedCacheAttention",
    "GatedDeltaConfig",
    "GatedLinearAttention",
    "KimiDeltaConfig",
    "LinearAttention",
    "LinearConfig",
    "Mamba2Attention",
    "Mamba2Config",
    "PlacedSums",
    "PositionBias",
    "RecurrentSums",
    "ReformerAttention",
    "ReformerConfig",
    "RelativeAttention",
    "RelativeConfig",
    "Retention",
    "RetentionConfig",
    "SoftmaxAttention",
    "SoftmaxConfig",
]
