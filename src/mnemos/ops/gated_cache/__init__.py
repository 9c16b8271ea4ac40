"""The gated recurrent cache's equations, as functions of tensors."""

from .resampling import Windows, grid_shape, nearest_tokens, onto_grid, pool_grid, resample
from .update import GateValues, Written, batch_mean, gated_update, write

__all__ = [
    "GateValues",
    "Windows",
    "Written",
    "batch_mean",
    "gated_update",
    "grid_shape",
    "nearest_tokens",
    "onto_grid",
    "pool_grid",
    "resample",
    "write",
]
