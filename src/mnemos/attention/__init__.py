"""Attention layers: `y, state = layer(x, state=None, mask=None)`, one file a family.

Three ideas. A layer's state is what it keeps of earlier tokens: keys and values (softmax.py), running sums (linear.py),
sums that forget and correct (recurrent.py), inputs of earlier segments (relative.py), and slots that compress those
(compressive.py). Any length of x gives the same as token by token, but for the last two, whose outputs depend on where
a sequence is cut into calls (`splits` is "segments"). Checks, padding and dropout are in one base (multi_head.py), and
a configuration beside each layer builds it by name. A gated cache can be put around any layer whose heads can be mixed
before they are projected (gated.py). cross.py reads another sequence and has no state.
Read multi_head.py, then linear.py; then any other.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
    from .compressive import CompressedSegments as CompressedSegments
    from .compressive import CompressiveAttention as CompressiveAttention
    from .compressive import CompressiveConfig as CompressiveConfig
    from .cross import CrossAttention as CrossAttention
    from .gated import GatedCacheAttention as GatedCacheAttention
    from .linear import LinearAttention as LinearAttention
    from .linear import LinearConfig as LinearConfig
    from .linear import PlacedSums as PlacedSums
    from .recurrent import DeltaAttention as DeltaAttention
    from .recurrent import DeltaConfig as DeltaConfig
    from .recurrent import GatedDeltaConfig as GatedDeltaConfig
    from .recurrent import GatedLinearAttention as GatedLinearAttention
    from .recurrent import GLAConfig as GLAConfig
    from .recurrent import KimiDeltaConfig as KimiDeltaConfig
    from .recurrent import Mamba2Attention as Mamba2Attention
    from .recurrent import Mamba2Config as Mamba2Config
    from .recurrent import RecurrentSums as RecurrentSums
    from .recurrent import Retention as Retention
    from .recurrent import RetentionConfig as RetentionConfig
    from .relative import PositionBias as PositionBias
    from .relative import RelativeAttention as RelativeAttention
    from .relative import RelativeConfig as RelativeConfig
    from .softmax import SoftmaxAttention as SoftmaxAttention
    from .softmax import SoftmaxConfig as SoftmaxConfig
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
