"""Attention to earlier batches' tokens in image models that someone else wrote: Table 2's attention-based cache."""

from typing import Any

from torch import Tensor, nn

from mnemos.memory.stored import stored
from mnemos.memory.token_cache import AttentionCache, TokenCache
from mnemos.types import InputError

from .example import tokens_seen
from .hooks import attach_root
from .host import Host, Site, tokens_in

_NAME = "attention_cache"  # of the child
_TIMM, _HF = "timm.models", "transformers.models"
# Hosts whose keys and values have projections of their own, which may be given more tokens than the queries'.
_PROJECTED = {
    f"{_TIMM}.pvt_v2:Attention": ("kv",),
    f"{_HF}.pvt.modeling_pvt:PvtEfficientSelfAttention": ("key", "value"),
}
# Hosts that are given the kept tokens as tokens of their own, which costs queries that nobody wants. Without a mask
# and without positions inside, every token's output is what it would be if they had been keys and values alone.
_WHOLE = ("timm.layers.attention:Attention", f"{_HF}.vit.modeling_vit:ViTAttention")


def cache_attention(model: nn.Module, config: AttentionCache, example: Any) -> list[str]:
    """Let the self-attentions of an image model look back at earlier batches, in place; the names of those that do.

    For timm's vision transformers and PVT v2 and for Hugging Face's ViT and PVT. `example`, an input of the size that
    all will have, is run once in eval mode to see how many tokens each attention is given. Each cache (a `TokenCache`)
    is a child `attention_cache` of the projections of keys and values, or of the whole attention where there are none
    apart. Cost: their share of a longer attention, (1 + images)·T keys; for ViT also as many more queries.
    Raises InputError, the model unchanged, where there is no such attention or there are caches already.
    """
    if found := stored(model):
        raise InputError(f"the model has {len(found)} caches already; an attention cache goes into one without")
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
            "no attention that an attention cache is known for: timm's ViT and PVT v2, Hugging Face's ViT and PVT; "
            "give the model a gated cache, or none"
        )
    seen = tokens_seen(model, sites, example)
    caches = []
    for site in sites:
        tokens, width, device = seen[site.name]
        caches.append(TokenCache(config.images, tokens, width).to(device).train(site.module.training))
        setattr(site.module, _NAME, caches[-1])
    for site in projections:
        site.module.register_forward_pre_hook(_lengthen)
    for site in whole:
        site.module.register_forward_pre_hook(_lengthen_tokens, with_kwargs=True)
        site.module.register_forward_hook(_shorten)
    attach_root(model, caches)
    return [site.name for site in sites]


def _classes(kinds: tuple[str, ...]) -> tuple[type, ...]:
    """Those classes whose library has been imported."""
    found = (Host(kind, (), "", "", tokens_in("")).cls() for kind in kinds)
    return tuple(cls for cls in found if cls is not None)


# Hooks hold no module, so that a deep copy of a model keeps its own tokens.
def _lengthen(projection: Any, args: tuple) -> tuple:
    return projection.attention_cache(args[0]), *args[1:]


def _lengthen_tokens(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    options = {**kwargs}
    x = args[0] if args else options.pop("hidden_states" if "hidden_states" in options else "x")
    if any(value is not None and value is not False for value in (*args[1:], *options.values())):
        raise InputError("an attention with an attention cache takes tokens alone, found a mask or an option beside")
    return (attention.attention_cache(x),), options


def _shorten(attention: Any, args: tuple, output: Any) -> Any:
    tokens: int = attention.attention_cache.tokens
    if isinstance(output, Tensor):
        return output[:, :tokens]
    return output[0][:, :tokens], *output[1:]
