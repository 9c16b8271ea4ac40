"""Adapters for timm: `Attention` of its vision transformers, Swin's `WindowAttention`, PVT v2's `Attention`."""

import math

from mnemos.ops.gated_cache import Windows
from mnemos.types import InputError

from .host import (
    POOLS,
    AttentionInput,
    Call,
    Host,
    Site,
    argument,
    hides_the_future,
    nowhere,
    tokens_in,
    valid_tokens,
    with_paper,
)

IMAGE = (224, 224)  # of a model that does not declare it


def image_size(above: tuple[object, ...]) -> tuple[int, int]:
    """The height and width of the images that a model was made for."""
    for module in above:
        config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size:
            return int(size[-2]), int(size[-1])
    return IMAGE


def _masked(module: object, args: tuple, kwargs: dict) -> Call:
    """A model of images of several sizes passes a padding mask [B, 1, T or 1, T]."""
    x, mask = argument(args, kwargs, 0, "x"), argument(args, kwargs, 1, "attn_mask")
    if argument(args, kwargs, 2, "is_causal") or hides_the_future(mask, hidden=False):
        raise InputError(
            "a cached Attention: expected a call without a causal mask, found that it was called causally; "
            "a shared cache would show it the future: leave it out with where="
        )
    return Call(x, valid_tokens(mask, x) if mask is not None and mask.dim() == 4 else None)


def _patches(site: Site, seen: int | None) -> AttentionInput:
    """A vision transformer: one slot per patch; class and register tokens are not summarised."""
    for module in reversed(site.above):
        patches = getattr(getattr(module, "patch_embed", None), "num_patches", None)
        if isinstance(patches, int):
            prefix = int(getattr(module, "num_prefix_tokens", 0))
            tokens = seen or patches + prefix
            grid = tuple(module.patch_embed.grid_size) if tokens == patches + prefix else None
            return AttentionInput(tokens, tokens - prefix, prefix, grid, tokens)
    return nowhere(site, seen)


def window(windows: Windows, stage: int | None) -> AttentionInput:
    """Swin: windows are rows of the batch, so T, and the cache's length, is the area of a window.

    windows: how they cover the grid of the stage. stage None: unknown, and so is the paper's length.
    """
    area, (down, across) = windows.window[0] * windows.window[1], windows.divided
    place = AttentionInput(area, area, 0, windows.window, area, down * across)
    if stage is None:
        return place._replace(paper=AttentionInput(area, None, pool=POOLS[0]))
    return with_paper(place, stage, windows)


def stage_grid(first: tuple[int, int], stage: int) -> tuple[int, int]:
    """The grid of stage 0, 1, … of a Swin: each stage merges 2 × 2 tokens, and an odd row or column is padded."""
    return -(-first[0] // 2**stage), -(-first[1] // 2**stage)


def _window(site: Site, _: int | None) -> AttentionInput:
    """Swin: the block around the attention divides the grid of the patches, halved in each stage before it."""
    block, size = site.above[-1] if site.above else None, site.module.window_size
    model = next((m for m in site.above if hasattr(m, "layers") and hasattr(m, "patch_embed")), None)
    if model is None:  # a part of a Swin
        return window(Windows(getattr(block, "input_resolution", size), size), None)
    stage = next(i for i, s in enumerate(model.layers) if s in site.above)
    shift = getattr(block, "shift_size", (0, 0))
    return window(Windows(stage_grid(model.patch_embed.grid_size, stage), size, shift), stage)


def _pyramid(site: Site, seen: int | None) -> AttentionInput:
    """PVT v2: one slot per key; its convolution or pooling determines their number."""
    stage = next((i for m in site.above for i, s in enumerate(getattr(m, "stages", ())) if s in site.above), 0)
    height, width = (-(-side // (4 * 2**stage)) for side in image_size(site.above))
    attention = site.module
    reduction = 1 if attention.sr is None else attention.sr.stride[0]
    return pyramid(seen, stage, (height, width), reduction, keys=None if attention.pool is None else 49)


def pyramid(
    seen: int | None, stage: int, grid: tuple[int, int], reduction: int, prefix: int = 0, keys: int | None = None
) -> AttentionInput:
    """PVT: `keys` slots, or as many as a convolution of stride `reduction` makes of the tokens.

    The tokens form the `grid` of the `stage`, unless an example showed another number: then a square, if possible.
    """
    count = grid[0] * grid[1] if seen is None else seen - prefix
    found: tuple[int, int] | None = grid
    if count != grid[0] * grid[1]:
        side = math.isqrt(count)
        found = (side, side) if side * side == count else None
    if keys is None:
        keys = (found[0] // reduction) * (found[1] // reduction) if found else count // reduction**2
    place = AttentionInput(count + prefix, max(1, min(keys, count)), prefix, found, count + prefix)
    return with_paper(place, stage)


HOSTS = (
    Host(
        "timm.layers.attention:Attention",
        ("x", "attn_mask"),
        width="qkv.in_features",
        out="proj.out_features",
        heads="num_heads",
        call=_masked,
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
