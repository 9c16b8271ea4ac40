"""Exact gradients through arbitrarily long sequences at the memory of one step, for any recurrent model."""

from typing import TYPE_CHECKING

from mnemos.face import lazy

if TYPE_CHECKING:  # imported when they are first asked for; see `mnemos.face`
    from .passes import ReplayResult as ReplayResult
    from .rollout import ReplayOptions as ReplayOptions
    from .rollout import replay as replay
    from .transformers_caches import register_transformers_caches as register_transformers_caches
else:
    __getattr__, __dir__, __all__ = lazy(__name__)
