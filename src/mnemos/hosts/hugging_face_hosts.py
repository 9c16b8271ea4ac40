"""Adapters for Hugging Face: encoders of images, text and speech, and causal decoders."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mnemos.ops.gated_cache import Windows

from .host import (
    ACROSS,
    DECODER,
    FUTURE,
    AttentionInput,
    Call,
    DecoderHost,
    Host,
    PaddedReader,
    Site,
    TokenReader,
    any_length,
    argument,
    config_field,
    in_a_part,
    no_reason,
)
from .masks import valid_tokens
from .timm_hosts import IMAGE, POOLED_QUERIES, pyramid, stage_grid, window

# Decoders with rotary positions, whose attentions have the same forward and configuration: package, class.
ROTARY = {
    **{"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "ministral": "Ministral"},
    **{"qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"},
    **{"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "phi": "Phi", "phi3": "Phi3"},
    **{"cohere": "Cohere", "cohere2": "Cohere2", "olmo": "Olmo", "olmo2": "Olmo2", "smollm3": "SmolLM3"},
    **{"granite": "Granite", "glm4": "Glm4", "starcoder2": "Starcoder2"},
}


def _kind(name: str) -> str:
    """The place of a class, as `Host` has it: "bert:BertModel" is in transformers.models.bert.modeling_bert."""
    package, cls = name.split(":")
    module = package if "." in package else f"{package}.modeling_{package}"
    return f"transformers.models.{module}:{cls}"


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
    return _patches(site, seen, prefix) if hasattr(site.module.config, "image_size") else any_length(site, seen)


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
    return POOLED_QUERIES if site.module.query_stride > 1 else None


def _linear_host(
    kind: str,
    place: Callable[[Site, int | None], AttentionInput],
    signature: tuple[str, ...] = ("hidden_states", "attention_mask"),
    out: str = "o_proj.out_features",
    heads: str = "num_attention_heads",
    call: Callable[..., Call] | None = None,
    left: Callable[[Site], str | None] = no_reason,
) -> Host:
    """An attention with a `q_proj`. A mask of a vision model is a bias of positions, unless `call` reads it."""
    reads = call or TokenReader("hidden_states")
    projection = out.removesuffix(".out_features")
    return Host(_kind(kind), signature, "q_proj.in_features", heads, reads, out, place, left, projection=projection)


_VISION: tuple[Host, ...] = (
    _linear_host("vit:ViTAttention", _patches),
    _linear_host("deit:DeiTAttention", partial(_patches, prefix=2)),
    Host(
        _kind("pix2struct:Pix2StructVisionAttention"),
        ("hidden_states", "attention_mask"),
        width="hidden_size",
        out="output.out_features",
        heads="n_heads",
        call=PaddedReader(1),
        projection="output",
    ),
    _linear_host("vit_msn:ViTMSNAttention", _patches),
    _linear_host("vit_mae:ViTMAEAttention", _masked_patches),
    _linear_host("beit:BeitAttention", _patches),
    _linear_host("dinov2:Dinov2Attention", _patches),
    _linear_host("dinov2_with_registers:Dinov2WithRegistersAttention", _registers),
    _linear_host("dinov3_vit:DINOv3ViTAttention", _registers, heads="num_heads"),
    _linear_host(
        "clip:CLIPAttention",
        partial(_tower, prefix=1),
        out="out_proj.out_features",
        heads="num_heads",
        left=_text_tower,
    ),
    _linear_host(
        "siglip:SiglipAttention",
        partial(_tower, prefix=0),
        out="out_proj.out_features",
        heads="num_heads",
        call=PaddedReader(1),
    ),
    _linear_host(
        "detr:DetrSelfAttention",
        any_length,
        heads="config.encoder_attention_heads",
        call=PaddedReader(1),
        left=_object_queries,
    ),
    _linear_host("swin:SwinAttention", _window),
    Host(
        _kind("swinv2:Swinv2SelfAttention"),
        ("hidden_states", "attention_mask"),
        width="all_head_size",
        heads="num_attention_heads",
        call=TokenReader("hidden_states"),
        place=_window2,
        projection="",
    ),
    _linear_host("segformer:SegformerAttention", _segformer, ("hidden_states", "height", "width")),
    Host(
        _kind("pvt:PvtAttention"),
        ("hidden_states", "height", "width"),
        width="self.query.in_features",
        heads="self.num_attention_heads",
        call=TokenReader("hidden_states"),
        place=_pvt,
        projection="output.dense",
    ),
    Host(
        _kind("pvt_v2:PvtV2SelfAttention"),
        ("hidden_states", "height", "width"),
        width="hidden_size",
        heads="num_attention_heads",
        call=TokenReader("hidden_states"),
        place=_pvt_v2,
        projection="proj",
    ),
    Host(
        _kind("hiera:HieraMaskUnitAttention"),
        ("hidden_states",),
        width="qkv.in_features",
        out="hidden_size_output",
        heads="num_heads",
        call=TokenReader("hidden_states"),
        left=_pooled_queries,
        projection="proj",
    ),
)


def _big_bird(module: object, args: tuple, kwargs: dict) -> Call:
    x = argument(args, kwargs, 0, "hidden_states")
    sparse = kwargs.get("to_mask")  # [B, 1, 1, T] of ones and zeros; dense attention gets the additive mask
    if sparse is not None:
        return Call(x, sparse[:, 0, 0] > 0)
    return Call(x, valid_tokens(argument(args, kwargs, 1, "attention_mask"), x))


def _deberta(module: object, args: tuple, kwargs: dict) -> Call:
    """A mask [B, 1, T, T] of ones and zeros, the product of the masks of query and key."""
    x = argument(args, kwargs, 0, "hidden_states")
    return Call(x, valid_tokens(argument(args, kwargs, 1, "attention_mask").bool(), x))


def _longformer(module: object, args: tuple, kwargs: dict) -> Call:
    """A mask [B, T] of what is padding; the other one also tells local from global attention."""
    x, hidden = argument(args, kwargs, 0, "hidden_states"), argument(args, kwargs, 2, "is_index_masked")
    return Call(x, None if hidden is None else ~hidden)


def _decoder(site: Site) -> str | None:
    module = site.module
    if site.name.endswith(("encoder_attn", "crossattention.self", "EncDecAttention")):
        return ACROSS
    if getattr(module, "is_decoder", False) or getattr(module, "is_causal", False) or config_field(site, "is_decoder"):
        return DECODER
    return None


def _decoder_layer(site: Site) -> str | None:
    """In a model with an encoder and a decoder, whose configuration does not tell them apart."""
    if site.name.endswith("encoder_attn"):
        return ACROSS
    return DECODER if site.module.is_decoder or site.module.is_causal else None


def _speech_decoder(site: Site) -> str | None:
    """Moonshine: one configuration for encoder and decoder, and attentions across them that are not causal."""
    if site.name.endswith("encoder_attn"):
        return ACROSS
    return DECODER if site.module.is_causal else None


def _heads_host(kind: str, more: tuple[str, ...] = ("past_key_values",), **other: Any) -> Host:
    """An attention without a projection, so that its output is its heads, or with one of its own."""
    options: dict[str, Any] = {"width": "query.in_features", "out": "all_head_size", "heads": "num_attention_heads"}
    options |= {"call": PaddedReader(1), "left": _decoder, "projection": ""}
    return Host(_kind(kind), ("hidden_states", "attention_mask", *more), **(options | other))


def _sequence_host(kind: str, mask: int = 3) -> Host:
    """An attention of an encoder, a decoder or across both; `mask` is the position of the mask among its arguments."""
    past = ("past_key_values",) if mask == 3 else ()
    return Host(
        _kind(kind),
        ("hidden_states", "key_value_states", *past, "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        call=PaddedReader(mask),
        left=_decoder_layer,
        projection="out_proj",
    )


_ENCODERS: tuple[Host, ...] = (
    *map(
        _heads_host,
        (
            *("bert:BertSelfAttention", "roberta:RobertaSelfAttention", "xlm_roberta:XLMRobertaSelfAttention"),
            *("xlm_roberta_xl:XLMRobertaXLSelfAttention", "camembert:CamembertSelfAttention"),
            *("electra:ElectraSelfAttention", "ernie:ErnieSelfAttention"),
            "data2vec.modeling_data2vec_text:Data2VecTextSelfAttention",
        ),
    ),
    _heads_host("deberta:DisentangledSelfAttention", (), width="all_head_size", call=_deberta),
    _heads_host("deberta_v2:DisentangledSelfAttention", (), width="all_head_size", call=_deberta),
    _heads_host("reformer:LSHSelfAttention", (), width="hidden_size"),
    _heads_host("reformer:LocalSelfAttention", (), width="hidden_size"),
    _heads_host(
        "longformer:LongformerSelfAttention",
        ("is_index_masked",),
        width="embed_dim",
        out="embed_dim",
        heads="num_heads",
        call=_longformer,
    ),
    _heads_host(
        "big_bird:BigBirdAttention",
        ("encoder_hidden_states",),
        width="self.query.in_features",
        out="self.all_head_size",
        heads="self.num_attention_heads",
        call=_big_bird,
        carrier="output",  # the attention inside is replaced when a sequence is short
    ),
    _heads_host(
        "albert:AlbertAttention",
        (),
        carrier="dense",  # its own output includes the residual and a norm
    ),
    _heads_host(
        "distilbert:DistilBertSelfAttention", (), width="dim", out="dim", heads="n_heads", projection="out_lin"
    ),
    _heads_host("mpnet:MPNetSelfAttention", (), width="q.in_features", out="o.out_features", projection="o"),
    Host(
        _kind("modernbert:ModernBertAttention"),
        ("hidden_states", "position_embeddings", "attention_mask"),
        width="Wqkv.in_features",
        out="Wo.out_features",
        heads="config.num_attention_heads",
        call=PaddedReader(2),
        left=_decoder,
        projection="Wo",
    ),
    Host(
        _kind("t5:T5Attention"),
        ("hidden_states", "mask"),
        width="d_model",
        heads="n_heads",
        call=PaddedReader(1, "mask"),
        left=_decoder,
        projection="o",
    ),
    Host(
        _kind("moonshine:MoonshineAttention"),
        ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "key_value_states"),
        width="q_proj.in_features",
        out="o_proj.out_features",
        heads="config.encoder_num_attention_heads",
        call=PaddedReader(2),
        left=_speech_decoder,
        projection="o_proj",
    ),
    *map(
        _sequence_host,
        (
            *("marian:MarianAttention", "bart:BartAttention", "mbart:MBartAttention", "pegasus:PegasusAttention"),
            *("m2m_100:M2M100Attention", "plbart:PLBartAttention", "whisper:WhisperAttention"),
        ),
    ),
    _sequence_host("wav2vec2:Wav2Vec2Attention", mask=2),
    _sequence_host("hubert:HubertAttention", mask=2),
    _sequence_host("data2vec.modeling_data2vec_audio:Data2VecAudioAttention", mask=2),
)


def _across(site: Site) -> str | None:
    return ACROSS if site.module.is_cross_attention else None


def _both_ways(site: Site) -> str | None:
    """Gemma 3 may be an encoder (use_bidirectional_attention), whose tokens would read earlier ones only."""
    return None if getattr(site.module, "is_causal", True) else "it attends in both directions, and is no decoder"


def _rotary_host(package: str, name: str) -> DecoderHost:
    return DecoderHost(
        _kind(f"{package}:{name}Attention"),
        ("hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        left=_both_ways,
        projection="dense" if package == "phi" else "o_proj",
    )


_DECODERS: tuple[Host, ...] = (
    DecoderHost(
        _kind("gpt2:GPT2Attention"),
        ("hidden_states", "past_key_values", "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        left=_across,
        projection="c_proj",
    ),
    DecoderHost(
        _kind("opt:OPTAttention"),
        ("hidden_states", "past_key_values", "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        projection="out_proj",
    ),
    DecoderHost(
        _kind("gpt_neox:GPTNeoXAttention"),
        ("hidden_states", "attention_mask", "layer_past"),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        past="layer_past",
        projection="dense",
    ),
    DecoderHost(
        _kind("falcon:FalconAttention"),
        ("hidden_states", "alibi", "attention_mask", "position_ids", "layer_past"),
        width="hidden_size",
        heads="num_heads",
        past="layer_past",
        projection="dense",
    ),
    *(_rotary_host(package, name) for package, name in ROTARY.items()),
)

HOSTS = (*_VISION, *_ENCODERS, *_DECODERS)
