"""The gated recurrent cache's equations, as functions of tensors."""

from .resampling import grid_shape, onto_grid, places, pool_grid, resample
from .swin_windows import Windows
from .update import GateWeights, gated_update
from .writing import Written, batch_mean, write

__all__ = [
    "GateWeights",
    "Windows",
    "Written",
    "batch_mean",
    "gated_update",
    "grid_shape",
    "onto_grid",
    "places",
    "pool_grid",
    "resample",
    "write",
]
