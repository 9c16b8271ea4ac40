"""Adapters for Hugging Face's vision models: ViT and its relatives, CLIP, SigLIP, Swin, PVT, DETR and others."""

from collections.abc import Callable
from functools import partial

from mnemos.ops.gated_cache import Windows

from .host import FUTURE, AttentionInput, Call, Host, Site, config_field, in_a_part, never, nowhere, padded, tokens_in
from .timm_hosts import IMAGE, pyramid, stage_grid, window


def _sides(size: object) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))  # type: ignore[index]


def _grid(site: Site) -> tuple[int, int]:
    """The patches of an image of the size that the configuration names."""
    image, patch = _sides(config_field(site, "image_size")), _sides(config_field(site, "patch_size"))
    return image[0] // patch[0], image[1] // patch[1]


def _patches(site: Site, seen: int | None, prefix: int = 1) -> AttentionInput:
    """One slot per patch; `prefix` class, distillation and register tokens are not summarised."""
    height, width = _grid(site)
    tokens = seen or height * width + prefix
    grid = (height, width) if tokens == height * width + prefix else None
    return AttentionInput(tokens, tokens - prefix, prefix, grid, tokens)


def _registers(site: Site, seen: int | None) -> AttentionInput:
    """DINOv2 and DINOv3: a class token and a number of register tokens."""
    return _patches(site, seen, 1 + int(config_field(site, "num_register_tokens") or 0))


def _masked_patches(site: Site, seen: int | None) -> AttentionInput:
    """ViTMAE: the encoder sees the patches that are not masked, in random order; the decoder sees all."""
    if "decoder_layers" in site.name.split("."):
        return _patches(site, seen)
    height, width = _grid(site)
    kept = seen - 1 if seen else int(height * width * (1 - float(config_field(site, "mask_ratio"))))
    return AttentionInput(kept + 1, kept, 1, None, height * width)


def _tower(site: Site, seen: int | None, prefix: int) -> AttentionInput:
    """A vision tower, or a text tower that is not causal."""
    return _patches(site, seen, prefix) if hasattr(site.module.config, "image_size") else nowhere(site, seen)


def _text_tower(site: Site) -> str | None:
    causal = not hasattr(site.module.config, "image_size")
    return f"its text tower is causal: {FUTURE}" if causal else None


def _window(site: Site, seen: int | None) -> AttentionInput:
    """Swin: the layer around the attention divides the grid of the patches, halved in each stage before it."""
    # The table of relative positions has (2w − 1)² rows.
    table = site.module.relative_position_bias.relative_position_bias_table
    side = (round(table.shape[0] ** 0.5) + 1) // 2
    return _windows(site, side, site.above[-1] if site.above else None)


def _window2(site: Site, seen: int | None) -> AttentionInput:
    """Swin v2: the attention is inside a module with the projection, and that inside the layer."""
    layer = site.above[-2] if len(site.above) > 1 else None
    return _windows(site, site.module.window_size[0], layer, fixed_shift=True)


def _windows(site: Site, side: int, layer: object, fixed_shift: bool = False) -> AttentionInput:
    """fixed_shift: the layer decides whether it shifts when it is made, not in each call."""
    stage = _stage(site, "layers")
    if stage is None:  # a part of a Swin
        return window(Windows(getattr(layer, "input_resolution", (side, side)), (side, side)), None)
    image, patch = _sides(config_field(site, "image_size")), _sides(config_field(site, "patch_size"))
    grid = stage_grid((-(-image[0] // patch[0]), -(-image[1] // patch[1])), stage)
    # A grid of one window is not shifted.
    shift = 0 if layer is None or min(grid) <= side else int(layer.shift_size)  # type: ignore[attr-defined]
    return window(Windows(grid, (side, side), (shift, shift), pads_first=True, fixed_shift=fixed_shift), stage)


def _stage(site: Site, path: str) -> int | None:
    """The number after `path` in a module's name: "…encoder.block.2.1.attention" -> 2; None without `path`."""
    _, inside, rest = f".{site.name}".rpartition(f".{path}.")
    return int(rest.split(".")[0]) if inside else None


def _pvt(site: Site, seen: int | None) -> AttentionInput:
    """PVT: one slot per key after the strided convolution; the last stage has a class token."""
    encoder = next((m for m in site.above if hasattr(m, "patch_embeddings") and hasattr(m, "block")), None)
    stage = _stage(site, "block")
    if encoder is None or stage is None:
        return in_a_part(site, seen)
    prefix = int(getattr(encoder.patch_embeddings[stage], "cls_token", None) is not None)
    height, width = _sides(config_field(site, "image_size"))
    for stride in config_field(site, "strides")[: stage + 1]:
        height, width = height // stride, width // stride
    return pyramid(seen, stage, (height, width), int(site.module.self.sequences_reduction_ratio), prefix)


def _overlapping(site: Site, strides: list[int], stage: int) -> tuple[int, int]:
    """The grid of a stage whose patches overlap and extend beyond the edge."""
    height, width = _sides(config_field(site, "image_size") or IMAGE)
    for stride in strides[: stage + 1]:
        height, width = -(-height // stride), -(-width // stride)
    return height, width


def _pvt_v2(site: Site, seen: int | None) -> AttentionInput:
    """PVT v2: one slot per key."""
    stage, module = _stage(site, "layers"), site.module
    if stage is None:
        return in_a_part(site, seen)
    keys = 49 if module.linear_attention else None
    grid = _overlapping(site, config_field(site, "strides"), stage)
    return pyramid(seen, stage, grid, module.spatial_reduction_ratio, keys=keys)


def _segformer(site: Site, seen: int | None) -> AttentionInput:
    """SegFormer: one slot per key."""
    stage = next((i for m in site.above for i, s in enumerate(getattr(m, "stages", ())) if s in site.above), None)
    if stage is None:
        return in_a_part(site, seen)
    grid = _overlapping(site, config_field(site, "strides"), stage)
    return pyramid(seen, stage, grid, int(site.module.sequence_reduction_ratio))


def _object_queries(site: Site) -> str | None:
    """DETR's decoder attends over a fixed set of learned queries, which are no tokens of the image."""
    inside = "decoder" in site.name.split(".")
    return "its tokens are the decoder's object queries, not the image's" if inside else None


def _pooled_queries(site: Site) -> str | None:
    return "it pools its queries: it returns fewer tokens than it takes" if site.module.query_stride > 1 else None


def _linear_host(
    kind: str,
    place: Callable[[Site, int | None], AttentionInput],
    signature: tuple[str, ...] = ("hidden_states", "attention_mask"),
    out: str = "o_proj.out_features",
    heads: str = "num_attention_heads",
    call: Callable[..., Call] | None = None,
    left: Callable[[Site], str | None] = never,
) -> Host:
    """An attention with a `q_proj`. A mask of a vision model is a bias of positions, unless `call` reads it."""
    reads = call or tokens_in("hidden_states")
    return Host(f"{_MODELS}.{kind}", signature, "q_proj.in_features", heads, reads, out, place, left)


_MODELS = "transformers.models"
HOSTS = (
    _linear_host("vit.modeling_vit:ViTAttention", _patches),
    _linear_host("deit.modeling_deit:DeiTAttention", partial(_patches, prefix=2)),
    Host(
        f"{_MODELS}.pix2struct.modeling_pix2struct:Pix2StructVisionAttention",
        ("hidden_states", "attention_mask"),
        width="hidden_size",
        out="output.out_features",
        heads="n_heads",
        call=padded(1),
    ),
    _linear_host("vit_msn.modeling_vit_msn:ViTMSNAttention", _patches),
    _linear_host("vit_mae.modeling_vit_mae:ViTMAEAttention", _masked_patches),
    _linear_host("beit.modeling_beit:BeitAttention", _patches),
    _linear_host("dinov2.modeling_dinov2:Dinov2Attention", _patches),
    _linear_host("dinov2_with_registers.modeling_dinov2_with_registers:Dinov2WithRegistersAttention", _registers),
    _linear_host("dinov3_vit.modeling_dinov3_vit:DINOv3ViTAttention", _registers, heads="num_heads"),
    _linear_host(
        "clip.modeling_clip:CLIPAttention",
        partial(_tower, prefix=1),
        out="out_proj.out_features",
        heads="num_heads",
        left=_text_tower,
    ),
    _linear_host(
        "siglip.modeling_siglip:SiglipAttention",
        partial(_tower, prefix=0),
        out="out_proj.out_features",
        heads="num_heads",
        call=padded(1),
    ),
    _linear_host(
        "detr.modeling_detr:DetrSelfAttention",
        nowhere,
        heads="config.encoder_attention_heads",
        call=padded(1),
        left=_object_queries,
    ),
    _linear_host("swin.modeling_swin:SwinAttention", _window),
    Host(
        f"{_MODELS}.swinv2.modeling_swinv2:Swinv2SelfAttention",
        ("hidden_states", "attention_mask"),
        width="all_head_size",
        heads="num_attention_heads",
        call=tokens_in("hidden_states"),
        place=_window2,
    ),
    _linear_host("segformer.modeling_segformer:SegformerAttention", _segformer, ("hidden_states", "height", "width")),
    Host(
        f"{_MODELS}.pvt.modeling_pvt:PvtAttention",
        ("hidden_states", "height", "width"),
        width="self.query.in_features",
        heads="self.num_attention_heads",
        call=tokens_in("hidden_states"),
        place=_pvt,
    ),
    Host(
        f"{_MODELS}.pvt_v2.modeling_pvt_v2:PvtV2SelfAttention",
        ("hidden_states", "height", "width"),
        width="hidden_size",
        heads="num_attention_heads",
        call=tokens_in("hidden_states"),
        place=_pvt_v2,
    ),
    Host(
        f"{_MODELS}.hiera.modeling_hiera:HieraMaskUnitAttention",
        ("hidden_states",),
        width="qkv.in_features",
        out="hidden_size_output",
        heads="num_heads",
        call=tokens_in("hidden_states"),
        left=_pooled_queries,
    ),
)
