"""Memories: the states and stored caches that persist across segments and training steps."""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .associations import AssociationsConfig as AssociationsConfig
    from .associations import AssociationState as AssociationState
    from .associations import AssociativeMemory as AssociativeMemory
    from .gated_cache import GRC as GRC
    from .gated_cache import GatedCache as GatedCache
    from .gated_cache import accumulate_caches as accumulate_caches
    from .gated_cache import caches as caches
    from .gated_cache import clear_caches as clear_caches
    from .gated_cache import hold_caches as hold_caches
    from .gated_cache import traced as traced
    from .key_values import KeyValues as KeyValues
    from .key_values import Segments as Segments
    from .slots import SlotMemory as SlotMemory
    from .slots import SlotsConfig as SlotsConfig
    from .slots import SlotState as SlotState
    from .tokens import TokenMemory as TokenMemory
    from .tokens import TokensConfig as TokensConfig
    from .tokens import TokenState as TokenState
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
