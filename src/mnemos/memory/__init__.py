"""Memories: the states and stored caches that persist across segments and training steps."""

from .associations import AssociationsConfig, AssociationState, AssociativeMemory
from .compressive import CompressedSegments
from .gated_cache import GatedCache, accumulate_caches, caches, clear_caches, hold_caches, traced
from .grc import GRC
from .key_values import KeyValues, Segments
from .memory_tokens import TokenMemory, TokensConfig, TokenState
from .slots import SlotMemory, SlotsConfig, SlotState

__all__ = [
    "GRC",
    "AssociationState",
    "AssociationsConfig",
    "AssociativeMemory",
    "CompressedSegments",
    "GatedCache",
    "KeyValues",
    "Segments",
    "SlotMemory",
    "SlotState",
    "SlotsConfig",
    "TokenMemory",
    "TokenState",
    "TokensConfig",
    "accumulate_caches",
    "caches",
    "clear_caches",
    "hold_caches",
    "traced",
]
