"""Recipes of text in words: the vocabulary of the training split, and an adaptive softmax that is tied to it."""

from dataclasses import replace
from typing import Any

from mnemos.lab.run.recipe import Recipe
from mnemos.models.transformer import HeadConfig, TransformerConfig

CUTOFFS = (20_000, 40_000, 200_000)  # of WikiText-103's 267,735 words, as Transformer-XL divides them


def in_words(recipe: Recipe, cutoffs: tuple[int, ...] = CUTOFFS) -> Recipe:
    """A recipe of text that reads words instead of bytes, with a tied adaptive softmax of these cut-offs."""
    model: Any = recipe.model
    data: Any = recipe.data
    model = replace(model, vocab_size=0)
    if isinstance(model, TransformerConfig):
        model = replace(model, head=HeadConfig(tied=True, cutoffs=cutoffs))
    else:
        model = replace(model, tied=True, cutoffs=cutoffs)
    return replace(recipe, model=model, data=replace(data, tokens="words"))
