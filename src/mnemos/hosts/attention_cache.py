"""Attention to the tokens of earlier batches in existing image models: the attention-based cache of Table 2."""

from typing import Any

from torch import Tensor, nn

from mnemos.memory.stored import stored
from mnemos.memory.token_cache import AttentionCache, TokenCache
from mnemos.types import InputError

from .custom import Reader
from .hooks import attach_root, remember
from .host import Host, Site, TokenReader
from .probe import first_calls

_NAME = "attention_cache"  # attribute name of the cache
_TIMM, _HF = "timm.models", "transformers.models"
# Hosts with separate projections of keys and values, which accept more tokens than the queries'.
_PROJECTED = {
    f"{_TIMM}.pvt_v2:Attention": ("kv",),
    f"{_HF}.pvt.modeling_pvt:PvtEfficientSelfAttention": ("key", "value"),
}
# Hosts with one projection: the whole attention gets the stored tokens as tokens of its own, at the cost of unused
# queries. As these have no mask and no positions, the outputs are the same as with additional keys and values alone.
_WHOLE = ("timm.layers.attention:Attention", f"{_HF}.vit.modeling_vit:ViTAttention")


def cache_attention(model: nn.Module, config: AttentionCache, example: object) -> list[str]:
    """Let the self-attentions of an image model attend to tokens of earlier batches, in place; returns their names.

    Works on timm's vision transformers and PVT v2, and on Hugging Face's ViT and PVT. The model is run once, in eval
    mode, on `example`, an input of the size that all inputs will have, to find the number of tokens of each attention.
    Each cache (a `TokenCache`) is a child `attention_cache` of the projections of keys and values, or of the whole
    attention where these are not separate. Cost: attention to (1 + images)·T keys; for ViT also as many more queries.
    Raises InputError, and leaves the model unchanged, if it has no such attention or has caches already.
    """
    if found := stored(model):
        raise InputError(
            f"expected a model without caches, found {len(found)}; build a new model for an attention cache"
        )
    projections, whole = [], []
    for name, module in model.named_modules():
        if isinstance(module, _classes(_WHOLE)):
            whole.append(Site(name, module, ()))
        for kind, parts in _PROJECTED.items():
            if isinstance(module, _classes((kind,))):
                projections += [Site(f"{name}.{part}", getattr(module, part), ()) for part in parts]
    sites = [*projections, *whole]
    if not sites:
        raise InputError(
            "expected an attention of timm's ViT or PVT v2 or of Hugging Face's ViT or PVT, found none; "
            "use a gated cache"
        )
    seen, refused = first_calls(model, dict.fromkeys(sites, Reader()), example)
    for error in refused.values():
        raise error
    caches = []
    for site in sites:
        call = seen[site.name]
        cache = TokenCache(config.images, call.tokens, call.width)
        caches.append(cache.to(call.device).train(site.module.training))
        setattr(site.module, _NAME, caches[-1])
    for site in projections:
        remember(site.module, site.module.register_forward_pre_hook(_lengthen))
    for site in whole:
        remember(site.module, site.module.register_forward_pre_hook(_lengthen_tokens, with_kwargs=True))
        remember(site.module, site.module.register_forward_hook(_shorten))
    attach_root(model, caches)
    return [site.name for site in sites]


def _classes(kinds: tuple[str, ...]) -> tuple[type, ...]:
    """The classes among these whose library has been imported; other libraries have no models in this process."""
    found = (Host(kind, (), "", "", TokenReader("")).cls() for kind in kinds)
    return tuple(cls for cls in found if cls is not None)


# The hooks hold no module, so a deep copy of a model uses its own stored tokens.
def _lengthen(projection: Any, args: tuple) -> tuple:
    return projection.attention_cache(args[0]), *args[1:]


def _lengthen_tokens(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    options = {**kwargs}
    x = args[0] if args else options.pop("hidden_states" if "hidden_states" in options else "x")
    if any(value is not None and value is not False for value in (*args[1:], *options.values())):
        raise InputError(
            "an attention with an attention cache: expected tokens alone, found a mask or another option; "
            "call it without"
        )
    return (attention.attention_cache(x),), options


def _shorten(attention: Any, args: tuple, output: Any) -> Any:
    tokens: int = attention.attention_cache.tokens
    if isinstance(output, Tensor):
        return output[:, :tokens]
    return output[0][:, :tokens], *output[1:]
