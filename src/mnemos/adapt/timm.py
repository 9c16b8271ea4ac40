"""Hosts of timm: `Attention` of its vision transformers, Swin's `WindowAttention`, PVT v2's `Attention`."""

from typing import Any

from .host import Host, Place, Site, nowhere, tokens_in

IMAGE = 224  # of a model that does not say


def image_size(above: tuple[Any, ...]) -> int:
    """The image side that a model was made for."""
    for module in above:
        config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size:
            return int(size[-1])
    return IMAGE


def _patches(site: Site, seen: int | None) -> Place:
    """A vision transformer's: as many slots as patches; class and register tokens are left out."""
    for module in reversed(site.above):
        patches = getattr(getattr(module, "patch_embed", None), "num_patches", None)
        if isinstance(patches, int):
            prefix = int(getattr(module, "num_prefix_tokens", 0))
            tokens = seen or patches + prefix
            grid = tuple(module.patch_embed.grid_size) if tokens == patches + prefix else None
            return Place(tokens, tokens - prefix, prefix, grid, tokens)
    return nowhere(site, seen)


def windows(site: Site, window: tuple[int, int]) -> int:
    """How many windows a sample has in the Swin block around an attention, padded ones too; 1 if it does not say."""
    size = getattr(site.above[-1], "input_resolution", None) if site.above else None
    return -(-size[0] // window[0]) * -(-size[1] // window[1]) if size else 1


def _window(site: Site, _: int | None) -> Place:
    """Swin's: windows are folded in the batch, so T is the window's area, and so is the cache's length."""
    height, width = site.module.window_size
    area = height * width
    return Place(area, area, 0, (height, width), area, windows(site, (height, width)))


def _pyramid(site: Site, seen: int | None) -> Place:
    """PVT v2's: as many slots as the layer has keys, the length its convolution or pooling reduces to."""
    stage = next((i for m in site.above for i, s in enumerate(getattr(m, "stages", ())) if s in site.above), 0)
    side = round(seen**0.5) if seen else -(-image_size(site.above) // (4 * 2**stage))
    attention = site.module
    if attention.pool is not None:
        keys = 49
    else:
        keys = (side // attention.sr.stride[0] if attention.sr is not None else side) ** 2
    return Place(side * side, min(keys, side * side), 0, (side, side), side * side)


HOSTS = (
    Host(
        "timm.layers.attention:Attention",
        ("x", "attn_mask"),
        width="qkv.in_features",
        out="proj.out_features",
        heads="num_heads",
        call=tokens_in("x"),
        place=_patches,
    ),
    Host(
        "timm.models.swin_transformer:WindowAttention",
        ("x", "mask"),
        width="dim",
        out="proj.out_features",
        heads="num_heads",
        call=tokens_in("x"),
        place=_window,
    ),
    Host(
        "timm.models.pvt_v2:Attention",
        ("x", "feat_size"),
        width="dim",
        heads="num_heads",
        call=tokens_in("x"),
        place=_pyramid,
    ),
)
