"""Adapters for timm: vision transformers, EVA, BEiT, Swin, PVT v2, CaiT, XCiT, Twins, ConViT, MaxViT, Hiera, MViT."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from mnemos.ops.gated_cache import Windows
from mnemos.types import InputError

from .host import (
    POOLS,
    TEXT_SLOTS,
    AttentionInput,
    Call,
    Host,
    Site,
    TokenReader,
    add_paper,
    any_length,
    argument,
    in_a_part,
    no_reason,
)
from .masks import CAUSAL, refuse_mask, valid_tokens

IMAGE = (224, 224)  # of a model that does not declare it
POOLED_QUERIES = "it pools its queries: it returns fewer tokens than it takes"


def image_size(above: tuple[object, ...]) -> tuple[int, int]:
    """The height and width of the images that a model was made for."""
    for module in above:
        config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size:
            return int(size[-2]), int(size[-1])
    return IMAGE


@dataclass(frozen=True)
class _MaskedReader:
    """Reads a call whose argument at `index` is a mask, as models of images of several sizes pass for their padding."""

    index: int  # behind the angles of rotary positions, if there are any

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        x, mask = argument(args, kwargs, 0, "x"), argument(args, kwargs, self.index, "attn_mask")
        if argument(args, kwargs, self.index + 1, "is_causal"):
            raise InputError(CAUSAL)
        has_rows = isinstance(mask, Tensor) and mask.dim() == 4
        if isinstance(mask, Tensor) and mask.dim() == 3:  # one per head, for all rows
            mask = mask[None]
        return Call(x, valid_tokens(mask, x) if has_rows else refuse_mask(mask, x))


def _patches(site: Site, seen: int | None, prefix: int | None = None) -> AttentionInput:
    """A vision transformer: one slot per patch; class and register tokens are not summarised.

    prefix: their number, where it is not `num_prefix_tokens` of the attention or of the model.
    """
    if any(type(m).__name__ == "MobileVitBlock" for m in site.above):  # rows of patches; there is no class token
        return any_length(site, seen)
    model = next((m for m in reversed(site.above) if hasattr(m, "patch_embed") or hasattr(m, "embeds")), None)
    if prefix is None:
        owner = site.module if hasattr(site.module, "num_prefix_tokens") else model
        prefix = int(getattr(owner, "num_prefix_tokens", 0))
        declared = hasattr(owner, "num_prefix_tokens")
        if not declared and (owner is None or any(hasattr(m, "cls_token") for m in site.above)):
            return in_a_part(site, seen)
    embed = getattr(model, "patch_embed", None)
    patches = getattr(embed, "num_patches", None)
    if isinstance(patches, int):
        tokens = seen or patches + prefix
        grid = _grid(embed) if tokens == patches + prefix else None
        return AttentionInput(tokens, tokens - prefix, prefix, grid, tokens)
    if seen:
        return AttentionInput(seen, seen - prefix, prefix, None, seen)
    sides = getattr(getattr(model, "embeds", None), "pos_embed_grid_size", None)  # NaFlexViT: images of any shape
    return any_length(site, None)._replace(prefix=prefix, slots=math.prod(sides) if sides else TEXT_SLOTS)


def _grid(patches: Any) -> tuple[int, int]:
    if hasattr(patches, "grid_size"):
        return patches.grid_size[0], patches.grid_size[1]
    return patches.img_size[0] // patches.patch_size, patches.img_size[1] // patches.patch_size  # XCiT


def _after_class_token(site: Site, seen: int | None) -> AttentionInput:
    """ConViT: a class token joins the patches at one of the later blocks."""
    model = next((m for m in site.above if hasattr(m, "local_up_to_layer")), None)
    if model is None:
        return _patches(site, seen)
    index = next(i for i, block in enumerate(model.blocks) if block in site.above)
    return _patches(site, seen, prefix=int(index >= model.local_up_to_layer))


def window(windows: Windows, stage: int | None) -> AttentionInput:
    """Swin: windows are rows of the batch, so T, and the cache's length, is the area of a window.

    windows: how they cover the grid of the stage. stage None: unknown, and so is the paper's length.
    """
    area, (down, across) = windows.window[0] * windows.window[1], windows.divided
    place = AttentionInput(area, area, 0, windows.window, area, down * across, padded=windows)
    if stage is None:
        return place._replace(paper=AttentionInput(area, None, pool=POOLS[0]))
    return add_paper(place, stage, windows)


def stage_grid(first: tuple[int, int], stage: int) -> tuple[int, int]:
    """The grid of stage 0, 1, … of a Swin: each stage merges 2 × 2 tokens, and an odd row or column is padded."""
    return -(-first[0] // 2**stage), -(-first[1] // 2**stage)


def _window(site: Site, _: int | None) -> AttentionInput:
    """Swin: the block around the attention divides the grid of the patches, halved in each stage before it."""
    block, size = site.above[-1] if site.above else None, site.module.window_size
    model, stage = next((m for m in site.above if hasattr(m, "patch_embed")), None), _stage(site, "layers")
    if model is None or stage is None:  # a part of a Swin
        return window(Windows(getattr(block, "input_resolution", size), size), None)
    shift = getattr(block, "shift_size", (0, 0))
    return window(Windows(stage_grid(model.patch_embed.grid_size, stage), size, shift), stage)


def _stage(site: Site, lists: str) -> int | None:
    """The stage of an attention: its place in the model's list of stages, or in its name with features_only=True."""
    found = (i for m in site.above for i, s in enumerate(getattr(m, lists, ())) if s in site.above)
    name = re.match(rf"(?:.*\.)?{lists}_(\d+)\.", site.name)
    return next(found, int(name[1]) if name else None)


def _pyramid(site: Site, seen: int | None) -> AttentionInput:
    """PVT v2: one slot per key; its convolution or pooling determines their number."""
    stage = _stage(site, "stages")
    if stage is None:
        return in_a_part(site, seen)
    height, width = (-(-side // (4 * 2**stage)) for side in image_size(site.above))
    attention = site.module
    reduction = 1 if attention.sr is None else attention.sr.stride[0]
    return pyramid(seen, stage, (height, width), reduction, keys=None if attention.pool is None else 49)


def _twins(site: Site, seen: int | None) -> AttentionInput:
    """Twins: one slot per key; its local attentions divide the grid into windows of side `ws`, the others reduce it."""
    model = next((m for m in site.above if hasattr(m, "patch_embeds")), None)
    if model is None:
        return in_a_part(site, seen)
    stage = next(i for i, blocks in enumerate(model.blocks) if blocks in site.above)
    side = getattr(site.module, "ws", None)
    keys = None if side is None else side * side
    grid = model.patch_embeds[stage].H, model.patch_embeds[stage].W
    return pyramid(seen, stage, grid, getattr(site.module, "sr_ratio", 1), keys=keys)


def _partition(site: Site, seen: int | None) -> AttentionInput:
    """MaxViT: windows, or tokens at equal distances, are rows of the batch; CoAtNet: the whole grid is one row."""
    size = getattr(site.above[-1] if site.above else None, "partition_size", None)
    if size is None:
        return any_length(site, seen)
    area = size[0] * size[1]
    stage = next((i for m in site.above for i, s in enumerate(getattr(m, "stages", ())) if s in site.above), 0)
    height, width = (side // (4 * 2**stage) for side in image_size(site.above))
    rows = max(1, height // size[0]) * max(1, width // size[1])
    return AttentionInput(area, area, 0, None, area, rows)


def _channels_first(module: object, args: tuple, kwargs: dict) -> Call:
    x = argument(args, kwargs, 0, "x")
    return Call(x.flatten(2).transpose(1, 2), layout="channels")


def _pooled_units(site: Site) -> str | None:
    """Hiera."""
    return POOLED_QUERIES if site.module.q_stride > 1 else None


def _pooled_grid(site: Site) -> str | None:
    """MViT."""
    stride = getattr(site.module.pool_q, "stride", 1)
    return POOLED_QUERIES if stride not in (1, (1, 1)) else None


def _grid_and_class(site: Site, seen: int | None) -> AttentionInput:
    """MViT: 64 slots, or one per token of an example; a class token, if there is one."""
    place, prefix = any_length(site, seen), int(site.module.has_cls_token)
    return place._replace(prefix=prefix, slots=(seen - prefix) if seen else place.slots)


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
    return add_paper(place, stage)


def _host(
    kind: str,
    signature: tuple[str, ...],
    place: Callable[[Site, int | None], AttentionInput],
    call: Callable[..., Call],
    width: str = "qkv.in_features",
    out: str = "proj.out_features",
    heads: str = "num_heads",
    left: Callable[[Site], str | None] = no_reason,
) -> Host:
    return Host(f"timm.{kind}", signature, width, heads, call, out, place, left, projection="proj")


_TOKENS = TokenReader("x")
_NO_CLASS = partial(_patches, prefix=0)  # the class token joins in later layers, which attend across two sequences
_BETWEEN = "norm", "gate"
HOSTS = (
    replace(
        _host("layers.attention:Attention", ("x", "attn_mask"), _patches, _MaskedReader(1)),
        between=_BETWEEN,
    ),
    *(
        replace(
            _host(kind, ("x", "rope", "attn_mask"), _patches, _MaskedReader(2), "proj.out_features"), between=_BETWEEN
        )
        for kind in ("layers.attention:AttentionRope", "models.eva:EvaAttention")
    ),
    _host("models.beit:Attention", ("x", "shared_rel_pos_bias"), _patches, _TOKENS),
    _host("models.swin_transformer:WindowAttention", ("x", "mask"), _window, _TOKENS, "dim"),
    _host("models.swin_transformer_v2:WindowAttention", ("x", "mask"), _window, _TOKENS, "dim"),
    _host("models.pvt_v2:Attention", ("x", "feat_size"), _pyramid, _TOKENS, "dim", "dim"),
    _host("models.cait:TalkingHeadAttn", ("x",), _NO_CLASS, _TOKENS),
    _host("models.xcit:XCA", ("x",), _NO_CLASS, _TOKENS),
    _host("models.convit:GPSA", ("x",), _after_class_token, _TOKENS, "dim"),
    _host("models.convit:MHSA", ("x",), _after_class_token, _TOKENS),
    _host("models.twins:LocallyGroupedAttn", ("x", "size"), _twins, _TOKENS, "dim"),
    _host("models.twins:GlobalSubSampleAttn", ("x", "size"), _twins, _TOKENS, "dim"),
    _host("models.maxxvit:AttentionCl", ("x", "shared_rel_pos"), _partition, _TOKENS),
    _host(
        "models.maxxvit:Attention2d",
        ("x", "shared_rel_pos"),
        _partition,
        _channels_first,
        "qkv.in_channels",
        "proj.out_channels",
    ),
    _host("models.hiera:MaskUnitAttention", ("x",), any_length, _TOKENS, "dim", "dim_out", "heads", _pooled_units),
    _host("models.mvitv2:MultiScaleAttention", ("x", "feat_size"), _grid_and_class, _TOKENS, left=_pooled_grid),
    _host(
        "models.mvitv2:MultiScaleAttentionPoolFirst",
        ("x", "feat_size"),
        _grid_and_class,
        _TOKENS,
        "q.in_features",
        left=_pooled_grid,
    ),
)
