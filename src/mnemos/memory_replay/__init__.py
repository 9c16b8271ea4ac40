"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model."""

from .passes import ReplayResult, replay

__all__ = ["ReplayResult", "replay"]
