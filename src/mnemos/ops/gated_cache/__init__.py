"""The gated recurrent cache's equations, as functions of tensors."""

from .resample import places, resample
from .update import Gates, gated_update

__all__ = ["Gates", "gated_update", "places", "resample"]
