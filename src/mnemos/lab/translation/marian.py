"""Translation models of Marian (opus-mt), as transformers loads them, as an `EncoderDecoder` of this library."""

from typing import Any

import torch
from torch import nn

from mnemos.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from mnemos.models.transformer import Ungated
from mnemos.types import InputError

_ACTIVATIONS: dict[str, Ungated] = {"swish": "silu", "silu": "silu", "relu": "relu", "gelu": "gelu"}


@torch.no_grad()
def from_marian(host: Any) -> EncoderDecoder:
    """An `EncoderDecoder` with the weights of a `transformers.MarianMTModel`, in eval mode; the host is not changed.

        host = transformers.MarianMTModel.from_pretrained("Helsinki-NLP/opus-mt-en-de")
        model = mnemos.lab.translation.marian.from_marian(host)

    Its logits equal the host's to rounding. Marian has sines in the first half of the channels and cosines in the
    second, this library has them in pairs; the channels of the residual stream are permuted, which changes nothing
    else. Marian's decoder begins with the padding token, which it never produces: search with
    BeamConfig(eos=host.config.eos_token_id, forbidden=(host.config.pad_token_id,)) and that token as prefix.
    Cost: one copy of the weights. Raises InputError for other models, and for a Marian model whose encoder and decoder
    differ in heads or MLP width.
    """
    c: Any = getattr(host, "config", None)
    if getattr(c, "model_type", None) != "marian" or not hasattr(host, "lm_head"):
        raise InputError(f"from_marian: expected a transformers.MarianMTModel, found {type(host).__name__}")
    sizes = (c.encoder_attention_heads, c.encoder_ffn_dim), (c.decoder_attention_heads, c.decoder_ffn_dim)
    if sizes[0] != sizes[1] or c.d_model % 2 or c.activation_function not in _ACTIVATIONS:
        raise InputError(
            f"from_marian: expected an even width, the same heads and MLP width in encoder and decoder and one of the "
            f"activations {', '.join(_ACTIVATIONS)}, found width {c.d_model}, {sizes[0]}, {sizes[1]} and "
            f"{c.activation_function}; use another checkpoint"
        )
    body, head = host.model, host.lm_head.weight
    tables = body.encoder.embed_tokens.weight, body.decoder.embed_tokens.weight
    shared, tied = (head.data_ptr() == tables[1].data_ptr() == x.data_ptr() for x in (tables[0], head))
    config = EncoderDecoderConfig(
        vocab_size=len(tables[1]),
        source_vocab_size=0 if shared else len(tables[0]),
        dim=c.d_model,
        encoder_layers=c.encoder_layers,
        decoder_layers=c.decoder_layers,
        num_heads=c.encoder_attention_heads,
        mlp=c.encoder_ffn_dim,
        max_length=c.max_position_embeddings,
        norm="post",
        activation=_ACTIVATIONS[c.activation_function],
        dropout=c.dropout,
        share="all" if shared else "target" if tied else "none",
        scale_embedding=bool(c.scale_embedding),
        head_bias=True,
    )
    model = EncoderDecoder(config).to(head)
    half = c.d_model // 2
    # Channel i of our residual stream is channel order[i] of the host's.
    order = torch.stack([torch.arange(half), half + torch.arange(half)], 1).flatten().to(head.device)
    model.source_embedding.weight.copy_(body.encoder.embed_tokens.weight[:, order])
    model.embedding.weight.copy_(body.decoder.embed_tokens.weight[:, order])
    model.head.weight.copy_(host.lm_head.weight[:, order])
    model.head.bias.copy_(host.final_logits_bias[0])

    def reads(ours: nn.Linear, *theirs: Any) -> None:
        """A map from the residual stream."""
        ours.weight.copy_(torch.cat([x.weight for x in theirs])[:, order])
        ours.bias.copy_(torch.cat([x.bias for x in theirs]))

    def writes(ours: Any, theirs: Any) -> None:
        """A map to the residual stream, or a norm of it."""
        ours.weight.copy_(theirs.weight[order])
        ours.bias.copy_(theirs.bias[order])

    def block(ours: Any, theirs: Any) -> None:
        attention = theirs.self_attn
        reads(ours.attention.qkv, attention.q_proj, attention.k_proj, attention.v_proj)
        writes(ours.attention.output, attention.out_proj)
        writes(ours.attention_norm, theirs.self_attn_layer_norm)
        reads(ours.mlp.expand, theirs.fc1)
        writes(ours.mlp.contract, theirs.fc2)
        writes(ours.mlp_norm, theirs.final_layer_norm)

    for ours, theirs in zip(model.encoder, body.encoder.layers, strict=True):
        block(ours, theirs)
    for one, other in zip(model.decoder, body.decoder.layers, strict=True):
        block(one, other)
        attention = other.encoder_attn
        reads(one.reads[0].query, attention.q_proj)
        reads(one.reads[0].key_value, attention.k_proj, attention.v_proj)
        writes(one.reads[0].output, attention.out_proj)
        writes(one.read_norms[0], other.encoder_attn_layer_norm)
    return model.eval()
