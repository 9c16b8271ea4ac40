"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model."""

from .caches import register_transformers_caches
from .rollout import ReplayOptions, ReplayResult, replay

__all__ = ["ReplayOptions", "ReplayResult", "register_transformers_caches", "replay"]
