"""What persists across segments and steps."""

from .gated_cache import GatedCache, accumulate, caches, empty, hold, traced
from .grc import GRC
from .key_values import KeyValues

__all__ = ["GRC", "GatedCache", "KeyValues", "accumulate", "caches", "empty", "hold", "traced"]
