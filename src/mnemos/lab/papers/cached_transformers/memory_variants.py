"""Variants of an image recipe: with a memory, or with wider MLPs that have as many parameters as the memory."""

from dataclasses import replace
from typing import Any

from mnemos.config import mapped
from mnemos.lab.run.recipe import Recipe
from mnemos.memory.grc import GRC
from mnemos.memory.token_cache import AttentionCache

# Tables 1 and 8: half of the channels are cached, there is a slot per token, or per square of tokens in the first two
# stages of PVT and Swin, and a positional term is added.
PAPER_CACHE = GRC(preset="paper", ratio=0.5, length="paper", convolution=True)


def cached(base: Recipe, cache: GRC | None = None) -> Recipe:
    """The recipe with a gated cache beside every attention; by default the library's."""
    return _changed(base, cache=cache or GRC())


def unwritten(variant: Recipe) -> Recipe:
    """The baseline of a cached variant: equal parameters and reading, but the cache is never written."""
    return replace(variant, model=mapped(variant.model, GRC, GRC.unwritten))


def attention_cached(base: Recipe) -> Recipe:
    """The recipe with a cache of the previous batch's keys and values (Table 2); not possible for Swin's windows."""
    return _changed(base, cache=AttentionCache())


def wider(base: Recipe, **widths: Any) -> Recipe:
    """The recipe without memory and with wider MLPs: `widths` are chosen to match the cached variant's parameters."""
    return _changed(base, **widths)


def _changed(base: Recipe, **fields: Any) -> Recipe:
    return replace(base, model=replace(base.model, **fields))
