"""Adapters for causal decoders of Hugging Face: GPT-2, OPT, GPT-NeoX, Falcon, and Llama, Qwen and models like them."""

from .decoder_host import DecoderHost
from .host import ACROSS, Site

_MODELS = "transformers.models"
# Decoders with rotary positions, whose attentions have the same forward and configuration: package, class.
_ROTARY = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "ministral": "Ministral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi": "Phi",
    "phi3": "Phi3",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "glm4": "Glm4",
    "starcoder2": "Starcoder2",
}


def _across(site: Site) -> str | None:
    return ACROSS if site.module.is_cross_attention else None


def _both_ways(site: Site) -> str | None:
    """Gemma 3 may be an encoder (use_bidirectional_attention), whose tokens would read earlier ones only."""
    return None if getattr(site.module, "is_causal", True) else "it attends in both directions, and is no decoder"


def _rotary_host(package: str, name: str) -> DecoderHost:
    return DecoderHost(
        f"{_MODELS}.{package}.modeling_{package}:{name}Attention",
        ("hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        left=_both_ways,
    )


HOSTS = (
    DecoderHost(
        f"{_MODELS}.gpt2.modeling_gpt2:GPT2Attention",
        ("hidden_states", "past_key_values", "attention_mask"),
        width="embed_dim",
        heads="num_heads",
        left=_across,
    ),
    DecoderHost(
        f"{_MODELS}.opt.modeling_opt:OPTAttention",
        ("hidden_states", "past_key_values", "attention_mask"),
        width="embed_dim",
        heads="num_heads",
    ),
    DecoderHost(
        f"{_MODELS}.gpt_neox.modeling_gpt_neox:GPTNeoXAttention",
        ("hidden_states", "attention_mask", "layer_past"),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        past="layer_past",
    ),
    DecoderHost(
        f"{_MODELS}.falcon.modeling_falcon:FalconAttention",
        ("hidden_states", "alibi", "attention_mask", "position_ids", "layer_past"),
        width="hidden_size",
        heads="num_heads",
        past="layer_past",
    ),
    *(_rotary_host(package, name) for package, name in _ROTARY.items()),
)
