"""The gated recurrent cache's equations, as functions of tensors."""

from .resampling import places, resample
from .update import GateWeights, gated_update

__all__ = ["GateWeights", "gated_update", "places", "resample"]
