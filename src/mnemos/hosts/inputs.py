"""What models declare about the input of their attentions: tokens, grid, class tokens, and the slots of a cache.

Each function takes an attention and the T of its call in an example (None: there is none), and returns an
`AttentionInput`. First what several libraries share, then timm, torchvision and Hugging Face.
"""

import math
import re
import sys
from typing import Any, NamedTuple

from mnemos.ops.gated_cache import Windows

Grid = tuple[int, int]
IMAGE = (224, 224)  # of a model that does not declare it
TEXT_SLOTS = 64  # length="auto" where T varies: the value of the paper's translation models
POOLS = (4, 2)  # length="paper": the sides of the squares of tokens per slot in a model's first stages; then 1
PART = (
    "the number of class tokens, or the grid, is not known without the model around these attentions, so all tokens "
    "are summarised alike; give mnemos.cache() the whole model, with where= for the part"
)


class NamedModule(NamedTuple):
    """A module of a model, its name, and the modules above it, beginning with the model."""

    name: str
    module: Any
    above: tuple[Any, ...]


class AttentionInput(NamedTuple):
    """What a model declares about the input of one of its attentions.

    tokens: T of a call, with class tokens (None: it varies, and there is no example). slots: the value of
    length="auto". limit: the largest useful number of slots. grid: (height, width) of the tokens after the first
    `prefix`, which are class tokens. rows: rows of the attention's batch per sample; Swin's windows are rows.
    With a cache over a sample's whole grid, windows: how the rows of the batch cover it; tokens is then the number of
    tokens in all windows, and rows 1. pool: the side of the squares of tokens that are averaged to one slot. paper: the
    input as length="paper" has it, where it differs. warning: what the model does not declare, and what follows.
    padded: how windows that are rows cover the grid, which says what of them is padding.
    """

    tokens: int | None = None
    slots: int | None = None
    prefix: int = 0
    grid: Grid | None = None
    limit: int | None = None
    rows: int = 1
    pool: int = 1
    windows: Windows | None = None
    paper: "AttentionInput | None" = None
    warning: str = ""
    padded: Windows | None = None


def any_length(site: NamedModule, t: int | None) -> AttentionInput:
    """Sequences of any length: 64 slots, or the number of tokens of an example."""
    limits = (getattr(getattr(m, "config", None), "max_position_embeddings", None) for m in site.above)
    limit = next((n for n in limits if isinstance(n, int) and n > 0), None)
    slots = t or TEXT_SLOTS
    return AttentionInput(tokens=t, slots=min(slots, limit or slots), limit=limit)


def in_a_part(site: NamedModule, t: int | None) -> AttentionInput:
    """Images of a model that is not known: as `any_length`, with a warning."""
    return any_length(site, t)._replace(warning=PART)


def on_grid(t: int | None, grid: Grid, prefix: int) -> AttentionInput:
    """One slot per patch of a grid; `prefix` class, distillation and register tokens are not summarised."""
    declared = grid[0] * grid[1] + prefix
    tokens = t or declared
    return AttentionInput(tokens, tokens - prefix, prefix, grid if tokens == declared else None, tokens)


def pyramid(
    t: int | None, stage: int, grid: Grid, reduction: int, prefix: int = 0, keys: int | None = None
) -> AttentionInput:
    """PVT: `keys` slots, or as many as a convolution of stride `reduction` makes of the tokens.

    The tokens form the `grid` of the `stage`, unless an example showed another number: then a square, if possible.
    """
    count = grid[0] * grid[1] if t is None else t - prefix
    own: Grid | None = grid
    if count != grid[0] * grid[1]:
        side = math.isqrt(count)
        own = (side, side) if side * side == count else None
    if keys is None:
        keys = (own[0] // reduction) * (own[1] // reduction) if own else count // reduction**2
    return _add_paper(AttentionInput(count + prefix, max(1, min(keys, count)), prefix, own, count + prefix), stage)


def _in_windows(windows: Windows, stage: int | None) -> AttentionInput:
    """Swin: windows are rows of the batch, and each has one slot per token. No stage: in a part of a model."""
    area, (down, across) = windows.window[0] * windows.window[1], windows.divided
    whole = AttentionInput(area, area, 0, windows.window, area, down * across, padded=windows)
    if stage is None:
        return whole._replace(paper=AttentionInput(area, None, pool=POOLS[0]))
    return _add_paper(whole, stage, windows)


def _add_paper(plain: AttentionInput, stage: int, windows: Windows | None = None) -> AttentionInput:
    """The input of an attention in stage 0, 1, … of a model with stages, with the one that length="paper" has.

    There the tokens of the first stages are averaged in squares (Cached Transformers, Appendix B: "pooling sizes for
    the first two blocks are 4 and 2"), and a cache spans the whole grid that the `windows` cover. Its slots are None
    where the tokens have to be averaged and form no known grid.
    """
    pool = POOLS[stage] if stage < len(POOLS) else 1
    tokens, grid = (plain.tokens, plain.grid) if windows is None else (windows.tokens, windows.grid)
    slots = None if pool > 1 or tokens is None else tokens - plain.prefix
    if grid is not None:
        slots = -(-grid[0] // pool) * -(-grid[1] // pool)
    return plain._replace(paper=AttentionInput(tokens, slots, plain.prefix, grid, pool=pool, windows=windows))


def _halve(grid: Grid, stage: int) -> Grid:
    """The grid of stage 0, 1, … of a Swin: each stage merges 2 × 2 tokens, and an odd row or column is padded."""
    return -(-grid[0] // 2**stage), -(-grid[1] // 2**stage)


def _find_stage(site: NamedModule, path: str) -> int | None:
    """The number after `path` in a module's name: "encoder.block.2.1.attention" -> 2; None without `path`.

    timm's models with features_only=True have it as "layers_2".
    """
    numbers = re.findall(rf"(?:^|\.){path}[._](\d+)(?=\.)", site.name)
    return int(numbers[-1]) if numbers else None


def _find(site: NamedModule, *names: str) -> Any:
    """The outermost module above that has these attributes, or None."""
    return next((m for m in site.above if all(hasattr(m, name) for name in names)), None)


# --- timm ---


def timm_patches(site: NamedModule, t: int | None, prefix: int | None = None) -> AttentionInput:
    """A vision transformer: one slot per patch. prefix: where it is not `num_prefix_tokens` of attention or model."""
    if any(type(m).__name__ == "MobileVitBlock" for m in site.above):  # rows of patches; there is no class token
        return any_length(site, t)
    model = next((m for m in reversed(site.above) if hasattr(m, "patch_embed") or hasattr(m, "embeds")), None)
    if prefix is None:
        owner = site.module if hasattr(site.module, "num_prefix_tokens") else model
        prefix = int(getattr(owner, "num_prefix_tokens", 0))
        declared = hasattr(owner, "num_prefix_tokens")
        if not declared and (owner is None or any(hasattr(m, "cls_token") for m in site.above)):
            return in_a_part(site, t)
    embed: Any = getattr(model, "patch_embed", None)
    if isinstance(getattr(embed, "num_patches", None), int):
        grid = getattr(embed, "grid_size", None) or [side // embed.patch_size for side in embed.img_size]  # XCiT
        return on_grid(t, (grid[0], grid[1]), prefix)
    if t:
        return AttentionInput(t, t - prefix, prefix, None, t)
    sides = getattr(getattr(model, "embeds", None), "pos_embed_grid_size", None)  # NaFlexViT: images of any shape
    return any_length(site, None)._replace(prefix=prefix, slots=math.prod(sides) if sides else TEXT_SLOTS)


def convit(site: NamedModule, t: int | None) -> AttentionInput:
    """A class token joins the patches at one of the later blocks."""
    model, block = _find(site, "local_up_to_layer"), _find_stage(site, "blocks")
    joined = None if model is None or block is None else int(block >= model.local_up_to_layer)
    return timm_patches(site, t, joined)


def timm_swin(site: NamedModule, t: int | None) -> AttentionInput:
    """The block around the attention divides the grid of the patches, halved in each stage before it."""
    block, size = site.above[-1] if site.above else None, site.module.window_size
    model, stage = _find(site, "patch_embed"), _find_stage(site, "layers")
    if model is None or stage is None:  # a part of a Swin
        return _in_windows(Windows(getattr(block, "input_resolution", size), size), None)
    windows = Windows(_halve(model.patch_embed.grid_size, stage), size, getattr(block, "shift_size", (0, 0)))
    return _in_windows(windows, stage)


def timm_pvt_v2(site: NamedModule, t: int | None) -> AttentionInput:
    """One slot per key; the attention's convolution or pooling determines their number."""
    stage, attention = _find_stage(site, "stages"), site.module
    if stage is None:
        return in_a_part(site, t)
    height, width = (-(-side // (4 * 2**stage)) for side in _timm_image(site))
    reduction = 1 if attention.sr is None else attention.sr.stride[0]
    return pyramid(t, stage, (height, width), reduction, keys=None if attention.pool is None else 49)


def twins(site: NamedModule, t: int | None) -> AttentionInput:
    """One slot per key; local attentions divide the grid into windows of side `ws`, the others reduce it."""
    model, stage = _find(site, "patch_embeds"), _find_stage(site, "blocks")
    if model is None or stage is None:
        return in_a_part(site, t)
    side, embed = getattr(site.module, "ws", None), model.patch_embeds[stage]
    keys = None if side is None else side * side
    return pyramid(t, stage, (embed.H, embed.W), getattr(site.module, "sr_ratio", 1), keys=keys)


def timm_maxvit(site: NamedModule, t: int | None) -> AttentionInput:
    """MaxViT: windows, or tokens at equal distances, are rows of the batch; CoAtNet: the whole grid is one row."""
    size = getattr(site.above[-1] if site.above else None, "partition_size", None)
    if size is None:
        return any_length(site, t)
    area = size[0] * size[1]
    height, width = (side // (4 * 2 ** (_find_stage(site, "stages") or 0)) for side in _timm_image(site))
    rows = max(1, height // size[0]) * max(1, width // size[1])
    return AttentionInput(area, area, 0, None, area, rows)


def mvit(site: NamedModule, t: int | None) -> AttentionInput:
    """64 slots, or one per token of an example, but for a class token, which torchvision's has always."""
    prefix = int(getattr(site.module, "has_cls_token", True))
    plain = any_length(site, t)
    return plain._replace(prefix=prefix, slots=(t - prefix) if t else plain.slots)


def _timm_image(site: NamedModule) -> Grid:
    """The height and width of the images that a model was made for."""
    for module in site.above:
        config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size:
            return int(size[-2]), int(size[-1])
    return IMAGE


# --- torch.nn and torchvision ---


def torch_patches(site: NamedModule, t: int | None) -> AttentionInput:
    """64 slots, or one per token of an example. torchvision's ViT: one per patch, without its class token."""
    library = sys.modules.get("torchvision.models.vision_transformer")
    cls = getattr(library, "VisionTransformer", ())
    model = next((m for m in site.above if isinstance(m, cls)), None)
    if model is None:
        inside = library is not None and any(type(m).__module__ == library.__name__ for m in site.above)
        return any_length(site, t)._replace(warning=PART if inside else "")
    side = model.image_size // model.patch_size
    return on_grid(t, (side, side), 1)


def torchvision_swin(site: NamedModule, t: int | None) -> AttentionInput:
    """The tokens are the whole grid of a stage, which the attention divides into windows by itself.

    One slot per token of a window. The model declares no image size: the grid is that of 224 × 224 pixels, or the
    square of an example's T.
    """
    before: list[Any] = []  # parts of `features`, where stages and merging layers alternate
    for module in next((m.features for m in site.above if hasattr(m, "features")), ()):
        if module in site.above:
            break
        before.append(module)
    if not before and not t:
        return in_a_part(site, t)
    stage = sum(type(module).__name__.startswith("PatchMerging") for module in before)
    patch = before[0][0].stride[0] if before else 4
    tokens = t or (-(-IMAGE[0] // patch) // 2**stage) ** 2
    side = round(tokens**0.5)
    grid = (side, side) if side * side == tokens else None
    area = site.module.window_size[0] * site.module.window_size[1]
    return _add_paper(AttentionInput(tokens, min(area, tokens), 0, grid, tokens), stage)


def torchvision_maxvit(site: NamedModule, t: int | None) -> AttentionInput:
    """One slot per token of a group."""
    tokens = int(site.module.max_seq_len)
    parent = next((m for m in reversed(site.above) if hasattr(m, "grid_size")), None)
    area = tokens if parent is None else parent.grid_size[0] * parent.grid_size[1]
    return AttentionInput(tokens, tokens, 0, None, tokens, area // tokens)


# --- Hugging Face ---


def config_field(site: NamedModule, name: str) -> Any:
    """A field's value in the innermost Hugging Face configuration that has it, from the module upwards; else None."""
    for module in (site.module, *reversed(site.above)):
        if (value := getattr(getattr(module, "config", None), name, None)) is not None:
            return value
    return None


def _sides(size: Any) -> Grid:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _config_grid(site: NamedModule) -> Grid:
    """The patches of an image of the size that the configuration names."""
    image, patch = _sides(config_field(site, "image_size")), _sides(config_field(site, "patch_size"))
    return image[0] // patch[0], image[1] // patch[1]


def patches(site: NamedModule, t: int | None, prefix: int = 1) -> AttentionInput:
    """ViT and its relatives."""
    return on_grid(t, _config_grid(site), prefix)


def registers(site: NamedModule, t: int | None) -> AttentionInput:
    """DINOv2 and DINOv3: a class token and a number of register tokens."""
    return patches(site, t, 1 + int(config_field(site, "num_register_tokens") or 0))


def masked_patches(site: NamedModule, t: int | None) -> AttentionInput:
    """ViTMAE: the encoder sees the patches that are not masked, in random order; the decoder sees all."""
    if "decoder_layers" in site.name.split("."):
        return patches(site, t)
    height, width = _config_grid(site)
    visible = t - 1 if t else int(height * width * (1 - float(config_field(site, "mask_ratio"))))
    return AttentionInput(visible + 1, visible, 1, None, height * width)


def tower(site: NamedModule, t: int | None, prefix: int) -> AttentionInput:
    """A vision tower, or a text tower that is not causal."""
    return patches(site, t, prefix) if hasattr(site.module.config, "image_size") else any_length(site, t)


def swin(site: NamedModule, t: int | None) -> AttentionInput:
    """Swin and Swin v2: the layer around the attention divides the grid of the patches, halved in each stage before it.

    Swin v2's attention is inside a module with the projection, and that inside the layer, which decides whether it
    shifts when it is made, not in each call.
    """
    second = hasattr(site.module, "window_size")
    if second:
        layer, side = site.above[-2] if len(site.above) > 1 else None, int(site.module.window_size[0])
    else:
        # The table of relative positions has (2w − 1)² rows.
        table = site.module.relative_position_bias.relative_position_bias_table
        layer, side = site.above[-1] if site.above else None, (round(table.shape[0] ** 0.5) + 1) // 2
    stage = _find_stage(site, "layers")
    if stage is None:  # a part of a Swin
        return _in_windows(Windows(getattr(layer, "input_resolution", (side, side)), (side, side)), None)
    image, patch = _sides(config_field(site, "image_size")), _sides(config_field(site, "patch_size"))
    grid = _halve((-(-image[0] // patch[0]), -(-image[1] // patch[1])), stage)
    # A grid of one window is not shifted.
    shift = 0 if layer is None or min(grid) <= side else int(layer.shift_size)
    windows = Windows(grid, (side, side), (shift, shift), pads_first=True, fixed_shift=second)
    return _in_windows(windows, stage)


def pvt(site: NamedModule, t: int | None) -> AttentionInput:
    """One slot per key after the strided convolution; the last stage has a class token."""
    encoder, stage = _find(site, "patch_embeddings", "block"), _find_stage(site, "block")
    if encoder is None or stage is None:
        return in_a_part(site, t)
    prefix = int(getattr(encoder.patch_embeddings[stage], "cls_token", None) is not None)
    height, width = _sides(config_field(site, "image_size"))
    for stride in config_field(site, "strides")[: stage + 1]:
        height, width = height // stride, width // stride
    return pyramid(t, stage, (height, width), int(site.module.self.sequences_reduction_ratio), prefix)


def overlapping(site: NamedModule, t: int | None, path: str, reduction: str) -> AttentionInput:
    """PVT v2 and SegFormer: one slot per key; patches overlap and extend beyond the edge."""
    stage = _find_stage(site, path)
    if stage is None:
        return in_a_part(site, t)
    height, width = _sides(config_field(site, "image_size") or IMAGE)
    for stride in config_field(site, "strides")[: stage + 1]:
        height, width = -(-height // stride), -(-width // stride)
    keys = 49 if getattr(site.module, "linear_attention", False) else None
    return pyramid(t, stage, (height, width), int(getattr(site.module, reduction)), keys=keys)
