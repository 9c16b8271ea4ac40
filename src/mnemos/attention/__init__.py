"""Attention layers: (x, state) -> (y, state), one file each."""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .compressive import CompressiveAttention as CompressiveAttention
    from .compressive import CompressiveConfig as CompressiveConfig
    from .cross import CrossAttention as CrossAttention
    from .decayed import GatedLinearAttention as GatedLinearAttention
    from .decayed import GLAConfig as GLAConfig
    from .decayed import Retention as Retention
    from .decayed import RetentionConfig as RetentionConfig
    from .delta import DeltaAttention as DeltaAttention
    from .delta import DeltaConfig as DeltaConfig
    from .delta import GatedDeltaConfig as GatedDeltaConfig
    from .delta import KimiDeltaConfig as KimiDeltaConfig
    from .gated import GatedCacheAttention as GatedCacheAttention
    from .linear import LinearAttention as LinearAttention
    from .linear import LinearConfig as LinearConfig
    from .linear import PlacedSums as PlacedSums
    from .mamba2 import Mamba2Attention as Mamba2Attention
    from .mamba2 import Mamba2Config as Mamba2Config
    from .position_bias import PositionBias as PositionBias
    from .recurrent import RecurrentSums as RecurrentSums
    from .relative import RelativeAttention as RelativeAttention
    from .relative import RelativeConfig as RelativeConfig
    from .softmax import SoftmaxAttention as SoftmaxAttention
    from .softmax import SoftmaxConfig as SoftmaxConfig
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
