"""Adapters for Hugging Face: ViT, DeiT, Swin, PVT, PVT v2, BERT, RoBERTa, BigBird, Reformer, Marian and BART."""

from collections.abc import Callable
from typing import Any

from mnemos.ops.gated_cache import Windows

from .host import AttentionInput, Call, Host, Site, argument, tokens_in, valid_tokens
from .timm_hosts import pyramid, stage_grid, window

_DECODER = "it is in a decoder: a shared cache would show it the future"
_ACROSS = "it attends across two sequences: a cache needs an input of its own"


def _config(site: Site, name: str) -> Any:
    """A field's value in the innermost configuration that has it, from the module upwards."""
    for module in (site.module, *reversed(site.above)):
        if (value := getattr(getattr(module, "config", None), name, None)) is not None:
            return value
    return None


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _patches(site: Site, seen: int | None) -> AttentionInput:
    """ViT and DeiT: one slot per patch; the class token (DeiT: and the teacher's) is not summarised."""
    prefix = 2 if type(site.module).__name__.startswith("DeiT") else 1
    image, patch = _sides(_config(site, "image_size")), _sides(_config(site, "patch_size"))
    height, width = image[0] // patch[0], image[1] // patch[1]
    tokens = seen or height * width + prefix
    grid = (height, width) if tokens == height * width + prefix else None
    return AttentionInput(tokens, tokens - prefix, prefix, grid, tokens)


def _window(site: Site, seen: int | None) -> AttentionInput:
    """Swin: the layer around the attention divides the grid of the patches, halved in each stage before it."""
    # The table of relative positions has (2w − 1)² rows.
    table = site.module.relative_position_bias.relative_position_bias_table
    side = (round(table.shape[0] ** 0.5) + 1) // 2
    layer = site.above[-1] if site.above else None
    if ".layers." not in f".{site.name}":  # a part of a Swin
        return window(Windows(getattr(layer, "input_resolution", (side, side)), (side, side)), None)
    image, patch = _sides(_config(site, "image_size")), _sides(_config(site, "patch_size"))
    stage = _stage(site, "layers")
    grid = stage_grid((-(-image[0] // patch[0]), -(-image[1] // patch[1])), stage)
    # A grid of one window is not shifted.
    shift = 0 if layer is None or min(grid) <= side else int(layer.shift_size)
    return window(Windows(grid, (side, side), (shift, shift), pads_first=True), stage)


def _stage(site: Site, path: str) -> int:
    """The number after `path` in a module's name: "…encoder.block.2.1.attention" -> 2."""
    return int(f".{site.name}".rpartition(f".{path}.")[2].split(".")[0])


def _pvt(site: Site, seen: int | None) -> AttentionInput:
    """PVT: one slot per key after the strided convolution; the last stage has a class token."""
    encoder = next(m for m in site.above if hasattr(m, "patch_embeddings") and hasattr(m, "block"))
    stage = _stage(site, "block")
    prefix = int(getattr(encoder.patch_embeddings[stage], "cls_token", None) is not None)
    height, width = _sides(_config(site, "image_size"))
    for stride in _config(site, "strides")[: stage + 1]:
        height, width = height // stride, width // stride
    return pyramid(seen, stage, (height, width), int(site.module.self.sequences_reduction_ratio), prefix)


def _pvt_v2(site: Site, seen: int | None) -> AttentionInput:
    """PVT v2: one slot per key."""
    stage = _stage(site, "layers")
    height, width = _sides(_config(site, "image_size"))
    for stride in _config(site, "strides")[: stage + 1]:
        height, width = -(-height // stride), -(-width // stride)  # its patches overlap and extend beyond the edge
    module = site.module
    keys = 49 if module.linear_attention else None
    return pyramid(seen, stage, (height, width), module.spatial_reduction_ratio, keys=keys)


def _text(module: object, args: tuple, kwargs: dict) -> Call:
    x = argument(args, kwargs, 0, "hidden_states")
    return Call(x, valid_tokens(argument(args, kwargs, 1, "attention_mask"), x))


def _big_bird(module: object, args: tuple, kwargs: dict) -> Call:
    x = argument(args, kwargs, 0, "hidden_states")
    sparse = kwargs.get("to_mask")  # [B, 1, 1, T] of ones and zeros; dense attention gets the additive mask
    if sparse is not None:
        return Call(x, sparse[:, 0, 0] > 0)
    return Call(x, valid_tokens(argument(args, kwargs, 1, "attention_mask"), x))


def _sequence_to_sequence(module: object, args: tuple, kwargs: dict) -> Call:
    x = argument(args, kwargs, 0, "hidden_states")
    return Call(x, valid_tokens(argument(args, kwargs, 3, "attention_mask"), x))


def _decoder(site: Site) -> str | None:
    module = site.module
    if site.name.endswith("encoder_attn") or site.name.endswith("crossattention.self"):
        return _ACROSS
    if getattr(module, "is_decoder", False) or getattr(module, "is_causal", False) or _config(site, "is_decoder"):
        return _DECODER
    return None


def _marian(site: Site) -> str | None:
    if site.name.endswith("encoder_attn"):
        return _ACROSS
    return _DECODER if site.module.is_decoder or site.module.is_causal else None


def _linear_host(kind: str, place: Callable[[Site, int | None], AttentionInput]) -> Host:
    return Host(
        kind,
        ("hidden_states", "attention_mask"),
        width="q_proj.in_features",
        out="o_proj.out_features",
        heads="num_attention_heads",
        call=tokens_in("hidden_states"),
        place=place,
    )


def _heads_host(kind: str, signature: tuple[str, ...], **more: Any) -> Host:
    """An attention that returns its heads: the projection after it applies to both branches."""
    return Host(
        kind,
        ("hidden_states", "attention_mask", *signature),
        width="query.in_features",
        out="all_head_size",
        heads="num_attention_heads",
        call=_text,
        left=_decoder,
        **more,
    )


def _reformer_host(kind: str, width: str) -> Host:
    return Host(
        f"transformers.models.reformer.modeling_reformer:{kind}",
        ("hidden_states", "attention_mask"),
        width="hidden_size",
        out="all_head_size",
        heads="num_attention_heads",
        call=_text,
        left=_decoder,
    )


def _encoder_host(kind: str) -> Host:
    return Host(
        kind,
        ("hidden_states", "key_value_states", "past_key_values", "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        call=_sequence_to_sequence,
        left=_marian,
    )


_MODELS = "transformers.models"
HOSTS = (
    _linear_host(f"{_MODELS}.vit.modeling_vit:ViTAttention", _patches),
    _linear_host(f"{_MODELS}.deit.modeling_deit:DeiTAttention", _patches),
    _linear_host(f"{_MODELS}.swin.modeling_swin:SwinAttention", _window),
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
    _heads_host(f"{_MODELS}.bert.modeling_bert:BertSelfAttention", ("past_key_values",)),
    _heads_host(f"{_MODELS}.roberta.modeling_roberta:RobertaSelfAttention", ("past_key_values",)),
    Host(
        f"{_MODELS}.big_bird.modeling_big_bird:BigBirdAttention",
        ("hidden_states", "attention_mask", "encoder_hidden_states"),
        width="self.query.in_features",
        out="self.all_head_size",
        heads="self.num_attention_heads",
        call=_big_bird,
        left=_decoder,
        carrier="output",  # the attention inside is replaced when a sequence is short
    ),
    _reformer_host("LSHSelfAttention", "query_key"),
    _reformer_host("LocalSelfAttention", "query"),
    _encoder_host(f"{_MODELS}.marian.modeling_marian:MarianAttention"),
    _encoder_host(f"{_MODELS}.bart.modeling_bart:BartAttention"),
)
