"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model."""

from .passes import ReplayResult
from .rollout import ReplayOptions, replay
from .transformers_caches import register_transformers_caches

__all__ = ["ReplayOptions", "ReplayResult", "register_transformers_caches", "replay"]
