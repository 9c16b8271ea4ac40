"""Attention layers: (x, state) -> (y, state), one file each."""

from .block_sparse import BlockSparseAttention, BlockSparseConfig
from .bucket_union import BucketUnionAttention, BucketUnionConfig
from .compressive import CompressiveAttention, CompressiveConfig
from .cross import CrossAttention
from .gated import GatedCacheAttention
from .linear import LinearAttention, LinearConfig, PlacedSums
from .position_bias import PositionBias
from .reformer import ReformerAttention, ReformerConfig
from .relative import RelativeAttention, RelativeConfig
from .softmax import SoftmaxAttention, SoftmaxConfig

__all__ = [
    "BlockSparseAttention",
    "BlockSparseConfig",
    "BucketUnionAttention",
    "BucketUnionConfig",
    "CompressiveAttention",
    "CompressiveConfig",
    "CrossAttention",
    "GatedCacheAttention",
    "LinearAttention",
    "LinearConfig",
    "PlacedSums",
    "PositionBias",
    "ReformerAttention",
    "ReformerConfig",
    "RelativeAttention",
    "RelativeConfig",
    "SoftmaxAttention",
    "SoftmaxConfig",
]
