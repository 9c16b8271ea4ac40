"""Memories: what persists from call to call, or from one training step to the next.

Most are states, values that a call takes and returns: the keys and values of attentions, which several rows of a beam
search can share (key_values.py); and three memories with a configuration: slots, which are written by attending to a
segment (slots.py), memory tokens (tokens.py) and a matrix of associations (associations.py). In all states a row of
zeros is a new row (see types.py). One memory is stored in the model: the gated recurrent cache (gated_cache.py), a
buffer that training forwards update in two phases. row_blocks.py has a cache for each row, updated once a block of its
tokens; grid.py cuts a call into blocks, for the other memories that are written at the end of each.
Read slots.py as an example of a state, then gated_cache.py.
"""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:
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
