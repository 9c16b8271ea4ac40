"""The attentions that `cache` knows: of torch.nn, torchvision, timm, Hugging Face, and those registered by others.

One table, `ADAPTERS`: a row is one or several classes and what `Host` says of them. Before it the functions that read
calls of another form, and the reasons for which an attention gets no cache. What the models declare about tokens and
grids is in `inputs`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import registry
from mnemos._compat import assert_in_graph
from mnemos.types import InputError

from . import inputs
from .host import Call, DecoderHost, Host, TokenReader, argument
from .inputs import NamedModule, config_field
from .masks import CAUSAL, combine, find_visible, refuse_mask, valid_tokens

# --- calls of another form than `TokenReader` reads ---

_OTHER_KEYS = (
    "a cached MultiheadAttention: expected the same values as query and key, found others; an attention across two "
    "sequences cannot have a cache: leave it out with where="
)


def _multihead(module: nn.MultiheadAttention, args: tuple, kwargs: dict) -> Call:
    query, key = (argument(args, kwargs, i, name) for i, name in enumerate(("query", "key")))
    if query.is_nested:
        raise InputError("a cached MultiheadAttention: expected padded tensors, found nested tensors; pad them")
    if argument(args, kwargs, 7, "is_causal"):
        raise InputError(CAUSAL)
    # --- one sequence: some models add their positions to query and key anew, so equal values are enough ---
    if key is not query:
        if query.shape != key.shape:
            raise InputError(_OTHER_KEYS)
        if not query.is_meta:
            equal = ((query == key) | (query.isnan() & key.isnan())).all()
            if torch.compiler.is_compiling():
                assert_in_graph(equal, _OTHER_KEYS)
            elif not equal:
                raise InputError(_OTHER_KEYS)
    # --- padding, which PyTorch marks by True or by −∞; other numbers are a bias ---
    padding = argument(args, kwargs, 3, "key_padding_mask")
    valid = None
    if padding is not None:
        valid = find_visible(padding, hides=True)
    attended, batched = argument(args, kwargs, 5, "attn_mask"), query.dim() == 3
    x = query[None] if not batched else query if module.batch_first else query.transpose(0, 1)
    valid = valid if valid is None or batched else valid[None]
    mask = combine(valid, refuse_mask(attended, x, hides=True))
    return Call(x, mask, "batch" if module.batch_first or not batched else "time")


@dataclass(frozen=True)
class _TimmReader:
    """Reads a call whose argument at `index` is a mask, as models of images of several sizes pass for their padding."""

    index: int  # behind the angles of rotary positions, if there are any

    def __call__(self, module: object, args: tuple, kwargs: dict) -> Call:
        x, mask = argument(args, kwargs, 0, "x"), argument(args, kwargs, self.index, "attn_mask")
        if argument(args, kwargs, self.index + 1, "is_causal"):
            raise InputError(CAUSAL)
        if isinstance(mask, Tensor) and mask.dim() == 4:  # it has rows
            return Call(x, valid_tokens(mask, x))
        one_for_all = isinstance(mask, Tensor) and mask.dim() == 3  # one per head, for all rows
        return Call(x, refuse_mask(mask[None] if one_for_all else mask, x))


def _groups(module: object, args: tuple, kwargs: dict) -> Call:
    """torchvision's MaxViT: [B, groups, T, D]; each group is a row."""
    return Call(argument(args, kwargs, 0, "x").flatten(0, 1))


def _channels_first(module: object, args: tuple, kwargs: dict) -> Call:
    return Call(argument(args, kwargs, 0, "x").flatten(2).transpose(1, 2), layout="channels")


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


# --- why an attention gets no cache ---

FUTURE = "a shared cache would show it the future"  # how the reason of every causal attention ends
_DECODER = f"it is in a decoder: {FUTURE}"
_ACROSS = "it attends across two sequences: a cache needs an input of its own"


def _torch_decoder(site: NamedModule) -> str | None:
    parent, part = site.above[-1] if site.above else None, site.name.rpartition(".")[2]
    if isinstance(parent, nn.TransformerDecoderLayer):
        return _DECODER if part == "self_attn" else _ACROSS
    across = "Pool" in type(parent).__name__ or "cross" in part or part == "encoder_attn"
    return _ACROSS if across else None


def _decoder(site: NamedModule) -> str | None:
    module = site.module
    if site.name.endswith(("encoder_attn", "crossattention.self", "EncDecAttention")):
        return _ACROSS
    causal = getattr(module, "is_decoder", False) or getattr(module, "is_causal", False)
    return _DECODER if causal or config_field(site, "is_decoder") else None


def _decoder_layer(site: NamedModule) -> str | None:
    """In a model with an encoder and a decoder, whose configuration does not tell them apart."""
    if site.name.endswith("encoder_attn"):
        return _ACROSS
    return _DECODER if getattr(site.module, "is_decoder", False) or site.module.is_causal else None


def _gpt2(site: NamedModule) -> str | None:
    return _ACROSS if site.module.is_cross_attention else None


def _both_ways(site: NamedModule) -> str | None:
    """Gemma 3 may be an encoder (use_bidirectional_attention), whose tokens would read earlier ones only."""
    return None if getattr(site.module, "is_causal", True) else "it attends in both directions, and is no decoder"


def _text_tower(site: NamedModule) -> str | None:
    return None if hasattr(site.module.config, "image_size") else f"its text tower is causal: {FUTURE}"


def _object_queries(site: NamedModule) -> str | None:
    """DETR's decoder attends over a fixed set of learned queries, which are no tokens of the image."""
    inside = "decoder" in site.name.split(".")
    return "its tokens are the decoder's object queries, not the image's" if inside else None


def _pools(site: NamedModule) -> str | None:
    """Hiera by a stride, MViT by a convolution or a pooling, which torchvision has inside another module."""
    pool = getattr(site.module, "pool_q", None)
    stride = getattr(getattr(pool, "pool", pool), "stride", 1)
    for name in ("q_stride", "query_stride"):
        stride = getattr(site.module, name, stride)
    pools = any(one != 1 for one in (stride if isinstance(stride, tuple | list) else (stride,)))
    return "it pools its queries: it returns fewer tokens than it takes" if pools else None


# --- the table ---

# Decoders with rotary positions, whose attentions have the same forward and configuration: package, class.
ROTARY = {
    **{"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "ministral": "Ministral"},
    **{"qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"},
    **{"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3", "phi": "Phi", "phi3": "Phi3"},
    **{"cohere": "Cohere", "cohere2": "Cohere2", "olmo": "Olmo", "olmo2": "Olmo2", "smollm3": "SmolLM3"},
    **{"granite": "Granite", "glm4": "Glm4", "starcoder2": "Starcoder2"},
}


def _rows(
    classes: str, forward: str, sizes: str, call: Any, *more: Any, adapter: type[Host] = Host, **last: Any
) -> list[Host]:
    """An adapter for each of the classes: "module:Class", or "package:Class" of a package of transformers.models.

    forward: its first arguments. sizes: `width`, `out` ("=": as width), `heads` and `projection` of `Host` ("=": the
    output is the heads, "-": not known). more: `input` and `why_skipped`.
    """
    width, out, heads, projection = sizes.split()
    columns: dict[str, Any] = {"width": width, "heads": heads, "out": "" if out == "=" else out, "call": call, **last}
    columns |= {"projection": {"-": None, "=": ""}.get(projection, projection)}
    columns |= dict(zip(("input", "why_skipped"), more, strict=False))
    rows = []
    for one in classes.split():
        package, cls = one.split(":")
        kind = one if "." in package else f"transformers.models.{package}.modeling_{package}:{cls}"
        rows.append(adapter(kind, tuple(forward.split()), **columns))
    return rows


_X, _HIDDEN, _padded = TokenReader("x"), TokenReader("hidden_states"), partial(TokenReader, "hidden_states")
_QKV = "qkv.in_features proj.out_features num_heads proj"
_DIM = "dim proj.out_features num_heads proj"
_NORMED = ("norm", "gate")
_LINEAR = "q_proj.in_features o_proj.out_features num_attention_heads o_proj"
_TOWER = "q_proj.in_features out_proj.out_features num_heads out_proj"
_BERT = "query.in_features all_head_size num_attention_heads ="
_ROTARY = "hidden_states position_embeddings attention_mask past_key_values"
# fmt: off
ADAPTERS: dict[str, Host] = {one.kind: one for rows in (
    # --- torch.nn and torchvision ---
    _rows("torch.nn.modules.activation:MultiheadAttention",
          "query key value key_padding_mask need_weights attn_mask average_attn_weights is_causal",
          "embed_dim = num_heads -", _multihead, inputs.torch_patches, _torch_decoder),
    _rows("torchvision.models.swin_transformer:ShiftedWindowAttention",
          "x", "qkv.in_features proj.out_features num_heads -", _X, inputs.torchvision_swin),
    _rows("torchvision.models.maxvit:RelativePositionalMultiHeadAttention",
          "x", "to_qkv.in_features merge.out_features n_heads merge", _groups, inputs.torchvision_maxvit),
    _rows("torchvision.models.video.mvit:MultiscaleAttention",
          "x thw", "embed_dim output_dim num_heads project.0", _X, inputs.mvit, _pools),
    # --- timm ---
    _rows("timm.layers.attention:Attention", "x attn_mask", _QKV, _TimmReader(1), inputs.timm_patches,
          between=_NORMED),
    _rows("timm.layers.attention:AttentionRope timm.models.eva:EvaAttention",
          "x rope attn_mask", "proj.out_features = num_heads proj", _TimmReader(2), inputs.timm_patches,
          between=_NORMED),
    _rows("timm.models.beit:Attention", "x shared_rel_pos_bias", _QKV, _X, inputs.timm_patches),
    _rows("timm.models.swin_transformer:WindowAttention timm.models.swin_transformer_v2:WindowAttention",
          "x mask", _DIM, _X, inputs.timm_swin),
    _rows("timm.models.pvt_v2:Attention", "x feat_size", "dim = num_heads proj", _X, inputs.timm_pvt_v2),
    # the class token joins in later layers, which attend across two sequences
    _rows("timm.models.cait:TalkingHeadAttn timm.models.xcit:XCA",
          "x", _QKV, _X, partial(inputs.timm_patches, prefix=0)),
    _rows("timm.models.convit:GPSA", "x", _DIM, _X, inputs.convit),
    _rows("timm.models.convit:MHSA", "x", _QKV, _X, inputs.convit),
    _rows("timm.models.twins:LocallyGroupedAttn", "x size", _DIM, _X, inputs.twins),
    _rows("timm.models.twins:GlobalSubSampleAttn", "x size", _DIM, _X, inputs.twins),
    _rows("timm.models.maxxvit:AttentionCl", "x shared_rel_pos", _QKV, _X, inputs.timm_maxvit),
    _rows("timm.models.maxxvit:Attention2d",
          "x shared_rel_pos", "qkv.in_channels proj.out_channels num_heads proj", _channels_first, inputs.timm_maxvit),
    _rows("timm.models.hiera:MaskUnitAttention", "x", "dim dim_out heads proj", _X, inputs.any_length, _pools),
    _rows("timm.models.mvitv2:MultiScaleAttention", "x feat_size", _QKV, _X, inputs.mvit, _pools),
    _rows("timm.models.mvitv2:MultiScaleAttentionPoolFirst",
          "x feat_size", "q.in_features proj.out_features num_heads proj", _X, inputs.mvit, _pools),
    # --- Hugging Face, images: a mask is a bias of positions, unless the call reads it ---
    _rows("vit:ViTAttention vit_msn:ViTMSNAttention beit:BeitAttention dinov2:Dinov2Attention",
          "hidden_states attention_mask", _LINEAR, _HIDDEN, inputs.patches),
    _rows("deit:DeiTAttention", "hidden_states attention_mask", _LINEAR, _HIDDEN, partial(inputs.patches, prefix=2)),
    _rows("vit_mae:ViTMAEAttention", "hidden_states attention_mask", _LINEAR, _HIDDEN, inputs.masked_patches),
    _rows("dinov2_with_registers:Dinov2WithRegistersAttention",
          "hidden_states attention_mask", _LINEAR, _HIDDEN, inputs.registers),
    _rows("dinov3_vit:DINOv3ViTAttention", "hidden_states attention_mask",
          "q_proj.in_features o_proj.out_features num_heads o_proj", _HIDDEN, inputs.registers),
    _rows("pix2struct:Pix2StructVisionAttention",
          "hidden_states attention_mask", "hidden_size output.out_features n_heads output", _padded(1)),
    _rows("clip:CLIPAttention",
          "hidden_states attention_mask", _TOWER, _HIDDEN, partial(inputs.tower, prefix=1), _text_tower),
    _rows("siglip:SiglipAttention",
          "hidden_states attention_mask", _TOWER, _padded(1), partial(inputs.tower, prefix=0)),
    _rows("detr:DetrSelfAttention", "hidden_states attention_mask",
          "q_proj.in_features o_proj.out_features config.encoder_attention_heads o_proj",
          _padded(1), inputs.any_length, _object_queries),
    _rows("swin:SwinAttention", "hidden_states attention_mask", _LINEAR, _HIDDEN, inputs.swin),
    _rows("swinv2:Swinv2SelfAttention",
          "hidden_states attention_mask", "all_head_size = num_attention_heads =", _HIDDEN, inputs.swin),
    _rows("segformer:SegformerAttention", "hidden_states height width", _LINEAR, _HIDDEN,
          partial(inputs.overlapping, path="stages", reduction="sequence_reduction_ratio")),
    _rows("pvt:PvtAttention", "hidden_states height width",
          "self.query.in_features = self.num_attention_heads output.dense", _HIDDEN, inputs.pvt),
    _rows("pvt_v2:PvtV2SelfAttention",
          "hidden_states height width", "hidden_size = num_attention_heads proj", _HIDDEN,
          partial(inputs.overlapping, path="layers", reduction="spatial_reduction_ratio")),
    _rows("hiera:HieraMaskUnitAttention",
          "hidden_states", "qkv.in_features hidden_size_output num_heads proj", _HIDDEN, inputs.any_length, _pools),
    # --- Hugging Face, encoders of text and speech ---
    _rows("bert:BertSelfAttention roberta:RobertaSelfAttention xlm_roberta:XLMRobertaSelfAttention "
          "xlm_roberta_xl:XLMRobertaXLSelfAttention camembert:CamembertSelfAttention electra:ElectraSelfAttention "
          "ernie:ErnieSelfAttention transformers.models.data2vec.modeling_data2vec_text:Data2VecTextSelfAttention",
          "hidden_states attention_mask past_key_values", _BERT, _padded(1), inputs.any_length, _decoder),
    _rows("deberta:DisentangledSelfAttention deberta_v2:DisentangledSelfAttention", "hidden_states attention_mask",
          "all_head_size = num_attention_heads =", _deberta, inputs.any_length, _decoder),
    _rows("reformer:LSHSelfAttention reformer:LocalSelfAttention", "hidden_states attention_mask",
          "hidden_size all_head_size num_attention_heads =", _padded(1), inputs.any_length, _decoder),
    _rows("longformer:LongformerSelfAttention", "hidden_states attention_mask is_index_masked",
          "embed_dim = num_heads =", _longformer, inputs.any_length, _decoder),
    # the attention inside is replaced when a sequence is short
    _rows("big_bird:BigBirdAttention", "hidden_states attention_mask encoder_hidden_states",
          "self.query.in_features self.all_head_size self.num_attention_heads =",
          _big_bird, inputs.any_length, _decoder, carrier="output"),
    # its own output includes the residual and a norm
    _rows("albert:AlbertAttention",
          "hidden_states attention_mask", _BERT, _padded(1), inputs.any_length, _decoder, carrier="dense"),
    _rows("distilbert:DistilBertSelfAttention", "hidden_states attention_mask",
          "dim = n_heads out_lin", _padded(1), inputs.any_length, _decoder),
    _rows("mpnet:MPNetSelfAttention", "hidden_states attention_mask",
          "q.in_features o.out_features num_attention_heads o", _padded(1), inputs.any_length, _decoder),
    _rows("modernbert:ModernBertAttention", "hidden_states position_embeddings attention_mask",
          "Wqkv.in_features Wo.out_features config.num_attention_heads Wo",
          _padded(2), inputs.any_length, _decoder),
    _rows("t5:T5Attention",
          "hidden_states mask", "d_model = n_heads o", _padded(1, "mask"), inputs.any_length, _decoder),
    _rows("moonshine:MoonshineAttention",
          "hidden_states position_embeddings attention_mask past_key_values key_value_states",
          "q_proj.in_features o_proj.out_features config.encoder_num_attention_heads o_proj",
          _padded(2), inputs.any_length, _decoder_layer),
    _rows("marian:MarianAttention bart:BartAttention mbart:MBartAttention pegasus:PegasusAttention "
          "m2m_100:M2M100Attention plbart:PLBartAttention whisper:WhisperAttention",
          "hidden_states key_value_states past_key_values attention_mask",
          "embed_dim = num_heads out_proj", _padded(3), inputs.any_length, _decoder_layer),
    _rows("wav2vec2:Wav2Vec2Attention hubert:HubertAttention "
          "transformers.models.data2vec.modeling_data2vec_audio:Data2VecAudioAttention",
          "hidden_states key_value_states attention_mask",
          "embed_dim = num_heads out_proj", _padded(2), inputs.any_length, _decoder_layer),
    # --- Hugging Face, causal decoders ---
    _rows("gpt2:GPT2Attention", "hidden_states past_key_values attention_mask",
          "embed_dim = num_heads c_proj", _HIDDEN, inputs.any_length, _gpt2, adapter=DecoderHost),
    _rows("opt:OPTAttention", "hidden_states past_key_values attention_mask",
          "embed_dim = num_heads out_proj", _HIDDEN, adapter=DecoderHost),
    _rows("gpt_neox:GPTNeoXAttention", "hidden_states attention_mask layer_past",
          "config.hidden_size = config.num_attention_heads dense", _HIDDEN, adapter=DecoderHost, past="layer_past"),
    _rows("falcon:FalconAttention", "hidden_states alibi attention_mask position_ids layer_past",
          "hidden_size = num_heads dense", _HIDDEN, adapter=DecoderHost, past="layer_past"),
    _rows(" ".join(f"{package}:{name}Attention" for package, name in ROTARY.items() if name != "Phi"), _ROTARY,
          "config.hidden_size = config.num_attention_heads o_proj", _HIDDEN, inputs.any_length, _both_ways,
          adapter=DecoderHost),
    _rows("phi:PhiAttention", _ROTARY, "config.hidden_size = config.num_attention_heads dense",
          _HIDDEN, inputs.any_length, _both_ways, adapter=DecoderHost),
) for one in rows}
# fmt: on
_registered: dict[str, Host] = {}


def register_host(host: Host) -> Host:
    """Let `mnemos.cache` add gated caches to another attention class; returns the host.

        mnemos.register_host(Host("their_library.layers:Attention", ("x",), width="dim", heads="num_heads", call=...))

    A plug-in of the entry-point group `mnemos.plugins` may call this function: `mnemos.cache` loads the plug-ins (see
    `mnemos.registry`). Raises InputError if the class has another adapter already.
    """

    def reader(one: Host) -> str:
        return f"{one.call.__module__}:{getattr(one.call, '__qualname__', type(one.call).__qualname__)}"

    before = ADAPTERS.get(host.kind) or _registered.get(host.kind)
    if before is not None and before != host:
        raise InputError(
            f"expected a class without an adapter, found {host.kind}, whose calls {reader(before)} reads already; "
            f"remove that of {reader(host)}"
        )
    if before is None:
        _registered[host.kind] = host
    return host


def adapters_by_class() -> Callable[[nn.Module], Host | None]:
    """The look-up of a module's adapter by its class or the nearest that it inherits from; None: of no known class.

    Loads the plug-ins; warns of those that cannot be loaded.
    """
    for failure in registry.load_plugins():
        warnings.warn(failure, RuntimeWarning, stacklevel=2)
    # A class that others registered may be defined in another module than the one that they name.
    others = {host.cls(): host for host in _registered.values()}

    def find(module: nn.Module) -> Host | None:
        for cls in type(module).__mro__:
            adapter = ADAPTERS.get(f"{cls.__module__}:{cls.__qualname__}") or others.get(cls)
            if adapter is not None:
                return adapter
        return None

    return find
