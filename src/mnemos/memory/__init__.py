"""What persists across segments and steps."""

from .gated_cache import GatedCache, accumulate, caches, empty, hold, traced
from .grc import GRC
from .hashed_keys import HashedKeys
from .key_values import KeyValues
from .segments import Segments
from .slots import SlotMemory, SlotsConfig, SlotState

__all__ = [
    "GRC",
    "GatedCache",
    "HashedKeys",
    "KeyValues",
    "Segments",
    "SlotMemory",
    "SlotState",
    "SlotsConfig",
    "accumulate",
    "caches",
    "empty",
    "hold",
    "traced",
]
