"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model."""

from .rollout import Rollout, replay

__all__ = ["Rollout", "replay"]
