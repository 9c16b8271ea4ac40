"""Memories: the states and stored caches that persist across segments and training steps."""

from .compressive import CompressedSegments
from .gated_cache import GatedCache, accumulate_caches, caches, clear_caches, hold_caches, traced
from .grc import GRC
from .hashed_keys import HashedKeys
from .key_values import KeyValues
from .segment_memory import Segments
from .slots import SlotMemory, SlotsConfig, SlotState

__all__ = [
    "GRC",
    "CompressedSegments",
    "GatedCache",
    "HashedKeys",
    "KeyValues",
    "Segments",
    "SlotMemory",
    "SlotState",
    "SlotsConfig",
    "accumulate_caches",
    "caches",
    "clear_caches",
    "hold_caches",
    "traced",
]
