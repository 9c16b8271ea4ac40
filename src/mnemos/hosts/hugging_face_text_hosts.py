"""Adapters for Hugging Face's text and speech encoders: BERT, T5, BART, Whisper and their relatives."""

from collections.abc import Callable
from typing import Any

from .host import ACROSS, DECODER, Call, Host, Site, argument, config_field, padded
from .masks import valid_tokens


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
    """An attention that returns its heads: the projection after it applies to both branches."""
    options: dict[str, Any] = {"width": "query.in_features", "out": "all_head_size", "heads": "num_attention_heads"}
    options |= {"call": padded(1), "left": _decoder}
    return Host(f"{_MODELS}.{kind}", ("hidden_states", "attention_mask", *more), **(options | other))


def _sequence_host(kind: str, mask: int = 3) -> Host:
    """An attention of an encoder, a decoder or across both; `mask` is the position of the mask among its arguments."""
    past = ("past_key_values",) if mask == 3 else ()
    return Host(
        f"{_MODELS}.{kind}",
        ("hidden_states", "key_value_states", *past, "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        call=padded(mask),
        left=_decoder_layer,
    )


def _projecting_host(
    kind: str, width: str, heads: str, signature: tuple[str, ...], call: Callable[..., Call], **more: Any
) -> Host:
    return Host(f"{_MODELS}.{kind}", signature, width, heads, call, left=_decoder, **more)


_MODELS = "transformers.models"
HOSTS = (
    _heads_host("bert.modeling_bert:BertSelfAttention"),
    _heads_host("roberta.modeling_roberta:RobertaSelfAttention"),
    _heads_host("xlm_roberta.modeling_xlm_roberta:XLMRobertaSelfAttention"),
    _heads_host("xlm_roberta_xl.modeling_xlm_roberta_xl:XLMRobertaXLSelfAttention"),
    _heads_host("camembert.modeling_camembert:CamembertSelfAttention"),
    _heads_host("electra.modeling_electra:ElectraSelfAttention"),
    _heads_host("data2vec.modeling_data2vec_text:Data2VecTextSelfAttention"),
    _heads_host("ernie.modeling_ernie:ErnieSelfAttention"),
    _heads_host("deberta.modeling_deberta:DisentangledSelfAttention", (), width="all_head_size", call=_deberta),
    _heads_host("deberta_v2.modeling_deberta_v2:DisentangledSelfAttention", (), width="all_head_size", call=_deberta),
    _heads_host("reformer.modeling_reformer:LSHSelfAttention", (), width="hidden_size"),
    _heads_host("reformer.modeling_reformer:LocalSelfAttention", (), width="hidden_size"),
    _heads_host(
        "longformer.modeling_longformer:LongformerSelfAttention",
        ("is_index_masked",),
        width="embed_dim",
        out="embed_dim",
        heads="num_heads",
        call=_longformer,
    ),
    _heads_host(
        "big_bird.modeling_big_bird:BigBirdAttention",
        ("encoder_hidden_states",),
        width="self.query.in_features",
        out="self.all_head_size",
        heads="self.num_attention_heads",
        call=_big_bird,
        carrier="output",  # the attention inside is replaced when a sequence is short
    ),
    _heads_host(
        "albert.modeling_albert:AlbertAttention",
        (),
        carrier="dense",  # its own output includes the residual and a norm
    ),
    _projecting_host(
        "distilbert.modeling_distilbert:DistilBertSelfAttention",
        "dim",
        "n_heads",
        ("hidden_states", "attention_mask"),
        padded(1),
    ),
    _projecting_host(
        "mpnet.modeling_mpnet:MPNetSelfAttention",
        "q.in_features",
        "num_attention_heads",
        ("hidden_states", "attention_mask"),
        padded(1),
        out="o.out_features",
    ),
    _projecting_host(
        "modernbert.modeling_modernbert:ModernBertAttention",
        "Wqkv.in_features",
        "config.num_attention_heads",
        ("hidden_states", "position_embeddings", "attention_mask"),
        padded(2),
        out="Wo.out_features",
    ),
    _projecting_host("t5.modeling_t5:T5Attention", "d_model", "n_heads", ("hidden_states", "mask"), padded(1, "mask")),
    Host(
        f"{_MODELS}.moonshine.modeling_moonshine:MoonshineAttention",
        ("hidden_states", "position_embeddings", "attention_mask", "past_key_values", "key_value_states"),
        width="q_proj.in_features",
        out="o_proj.out_features",
        heads="config.encoder_num_attention_heads",
        call=padded(2),
        left=_speech_decoder,
    ),
    _sequence_host("marian.modeling_marian:MarianAttention"),
    _sequence_host("bart.modeling_bart:BartAttention"),
    _sequence_host("mbart.modeling_mbart:MBartAttention"),
    _sequence_host("pegasus.modeling_pegasus:PegasusAttention"),
    _sequence_host("m2m_100.modeling_m2m_100:M2M100Attention"),
    _sequence_host("plbart.modeling_plbart:PLBartAttention"),
    _sequence_host("whisper.modeling_whisper:WhisperAttention"),
    _sequence_host("wav2vec2.modeling_wav2vec2:Wav2Vec2Attention", mask=2),
    _sequence_host("hubert.modeling_hubert:HubertAttention", mask=2),
    _sequence_host("data2vec.modeling_data2vec_audio:Data2VecAudioAttention", mask=2),
)
