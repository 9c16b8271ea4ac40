"""Attention to the tokens of earlier batches in image models: the attention-based cache of the paper's Table 2."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos.config import check_fields
from mnemos.hosts.hooks import attach_root, keep_handle
from mnemos.hosts.inputs import NamedModule
from mnemos.hosts.named import Reader, record_calls
from mnemos.memory.gated_cache import StoredCache, begin_forward, end_forward, several_processes, stored
from mnemos.types import InputError

# Attentions, and their projections of keys and values, which accept more tokens than the queries'. Without these the
# whole attention gets the stored tokens as tokens of its own, at the cost of unused queries. As it has no mask and no
# positions, the outputs are the same as with additional keys and values alone.
_PROJECTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("timm.models.pvt_v2", "Attention"): ("kv",),
    ("transformers.models.pvt.modeling_pvt", "PvtEfficientSelfAttention"): ("key", "value"),
    ("timm.layers.attention", "Attention"): (),
}


@dataclass(frozen=True)
class AttentionCache:
    """Transformer-XL's memory in an image model (Cached Transformers, Table 2): keys and values of earlier batches.

    Every attention also attends to its input tokens for `images` images of the previous training batch. They are
    stored as they were (width D, no gradient) and projected to keys and values with the present weights.
    """

    images: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "AttentionCache")
        if self.images < 1:
            raise InputError(
                f"AttentionCache.images: expected at least 1, found {self.images}; use cache=None for none"
            )


class TokenCache(StoredCache):
    """`longer = cache(x)`: tokens x [B, T, D], followed by the tokens of the first images of the previous batch.

    The result is [B, T + images·T, D]; the stored tokens are the same for every row and carry no gradient. In training
    the cache stores the first rows of x for the next batch (those of the first process and the first micro-batch); in
    eval() it does not change. While it is empty (all zeros), the row's own tokens take its place, because attention to
    [x; x] equals attention to x. Memory: images·T·D floats. Raises InputError for another T, or a batch below `images`.
    """

    def __init__(self, images: int, tokens: int, dim: int) -> None:
        super().__init__(images * tokens, dim)
        self.images, self.tokens = images, tokens

    def forward(self, x: Tensor) -> Tensor:
        dim = self.cache.shape[1]
        if x.dim() != 3 or x.shape[1:] != (self.tokens, dim):
            raise InputError(
                f"attention cache of {self.images} image(s): expected tokens [B, {self.tokens}, {dim}], found "
                f"{tuple(x.shape)}; build it for this size"
            )
        began = self.training and self.complete and begin_forward([self])
        before = self.contents()
        stored = torch.where((before != 0).any(), before.to(x.dtype), x.repeat(1, self.images, 1))
        if self.training:
            if x.shape[0] < self.images:
                raise InputError(
                    f"AttentionCache(images={self.images}): expected a batch of at least as many images, found "
                    f"{x.shape[0]}; use fewer images or larger batches"
                )
            first = not several_processes() or dist.get_rank() == 0
            self.stage(x[: self.images].flatten(0, 1), self.cache.new_full((1,), float(first)))
        if began:
            end_forward([self])
        return torch.cat([x, stored], 1)

    if TYPE_CHECKING:
        __call__ = forward

    def joined(self, before: Tensor, count: Tensor, successor: Tensor, rows: Tensor) -> Tensor:
        """`before` unchanged: the first micro-batch holds the first rows of the whole batch."""
        return before


def cache_attention(model: nn.Module, config: AttentionCache, example: object) -> list[str]:
    """Let the self-attentions of an image model attend to tokens of earlier batches, in place; returns their names.

    Works on timm's vision transformers and PVT v2, and on Hugging Face's PVT. The model is run once, in eval
    mode, on `example`, an input of the size that all inputs will have. Each cache (a `TokenCache`) is a child
    `attention_cache`. Cost: attention to (1 + images)·T keys; for ViT also as many more queries.
    Raises InputError, and leaves the model unchanged, if it has no such attention or has caches already.
    """
    if present := stored(model):
        raise InputError(
            f"expected a model without caches, found {len(present)}; build a new model for an attention cache"
        )

    # --- the modules that will read stored tokens, with the number of their tokens ---
    projections, whole = [], []
    for name, module in model.named_modules():
        for (library, attention), parts in _PROJECTIONS.items():
            # A library that has not been imported has no models in this process.
            if isinstance(module, getattr(sys.modules.get(library), attention, ())):
                projections += [NamedModule(f"{name}.{part}", getattr(module, part), ()) for part in parts]
                whole += [] if parts else [NamedModule(name, module, ())]
    modules = [*projections, *whole]
    if not modules:
        raise InputError(
            "expected an attention of timm's ViT or PVT v2 or of Hugging Face's PVT, found none; use a gated cache"
        )
    calls, refused = record_calls(model, dict.fromkeys(modules, Reader()), example)
    for error in refused.values():
        raise error

    # --- their caches ---
    caches = []
    for one in modules:
        call = calls[one.name]
        cache = TokenCache(config.images, call.tokens, call.width)
        one.module.attention_cache = cache.to(call.device).train(one.module.training)
        caches.append(cache)
    for one in projections:
        keep_handle(one.module, one.module.register_forward_pre_hook(_lengthen))
    for one in whole:
        keep_handle(one.module, one.module.register_forward_pre_hook(_lengthen_tokens, with_kwargs=True))
        keep_handle(one.module, one.module.register_forward_hook(_shorten))
    attach_root(model, caches)
    return [one.name for one in modules]


# The hooks hold no module, so a deep copy of a model uses its own stored tokens.
def _lengthen(projection: Any, args: tuple) -> tuple:
    return projection.attention_cache(args[0]), *args[1:]


def _lengthen_tokens(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    x, *options = (*args, *kwargs.values())
    if any(value is not None and value is not False for value in options):
        raise InputError(
            "an attention with an attention cache: expected tokens alone, found a mask or another option; "
            "call it without"
        )
    return (attention.attention_cache(x),), {}


def _shorten(attention: Any, args: tuple, output: Tensor) -> Tensor:
    return output[:, : attention.attention_cache.tokens]
