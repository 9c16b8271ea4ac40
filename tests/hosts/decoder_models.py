"""Small causal decoders of Hugging Face, for their own tests and for the matrix of hosts."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.hosts.adapters import ROTARY
from mnemos.libraries import cache_name, transformers

_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
_ROTARY = {**_SIZES, "num_key_value_heads": 2, "head_dim": 6}
_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 128}
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_GEMMA3 = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "final_logit_softcapping": 2.0}
_GEMMA3 |= {"hidden_size": 16}  # its square root, by which it scales embeddings, is the same in every precision
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": ("LlamaForCausalLM", _ROTARY),
    "mistral": ("MistralForCausalLM", {**_ROTARY, "sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", _ROTARY),
    "qwen3": ("Qwen3ForCausalLM", _ROTARY),
    "opt": ("OPTForCausalLM", {**_SIZES, "ffn_dim": 20, "word_embed_proj_dim": 24, "dropout": 0.0}),
    "gpt_neox": ("GPTNeoXForCausalLM", _SIZES),
    "phi": ("PhiForCausalLM", {**_SIZES, "num_attention_heads": 3}),
    "gemma3": ("Gemma3ForCausalLM", {**_ROTARY, **_GEMMA3}),
    "cohere": ("CohereForCausalLM", {**_ROTARY, "logit_scale": 0.3, "use_qk_norm": True}),
    "falcon": ("FalconForCausalLM", {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("FalconForCausalLM", {**_SIZES, "alibi": True}),
}
FEW = ("gpt2", "mistral", "opt", "gpt_neox", "gemma3", "falcon")  # families whose attentions or caches differ
_COMMON = {"vocab_size": 60, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config(name: str, **options: Any) -> tuple[type, Any]:
    """The class and the configuration of a decoder: one of FAMILIES, or the name of a further class."""
    kind, sizes = FAMILIES.get(name) or (f"{name}ForCausalLM", {**_ROTARY, **_EXPERTS})
    library = transformers()
    of = getattr(library, kind)
    options = {**sizes, **_COMMON, **options}
    if "layer_types" in options:  # one per layer
        options["layer_types"] = options["layer_types"][: options["num_hidden_layers"]]
    return of, of.config_class(**options)


def plain(name: str, **options: Any) -> nn.Module:
    """A decoder in double precision, with weights that do something, in eval mode."""
    torch.manual_seed(0)
    kind, sizes = config(name, **options)
    model = kind(sizes).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


FURTHER = [name for name in ROTARY.values() if f"{name}ForCausalLM" not in dict(FAMILIES.values())]


def ids(rows: int = 2, t: int = 33, seed: int = 2) -> Tensor:
    return torch.randint(3, 40, (rows, t), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, x: Tensor, mask: Tensor | None = None, past: Any = None, **options: Any) -> Tensor:
    """The logits of new tokens, with positions that count a row's valid tokens; past: the host's cache."""
    if mask is not None:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -x.shape[1] :]
        options["attention_mask"] = mask.long()
    found: Tensor = model(x, use_cache=past is not None, **{cache_name(): past}, **options).logits
    return found


def in_parts(model: Any, x: Tensor, ends: Iterable[int], mask: Tensor | None = None, past: Any = None) -> Tensor:
    """The logits of x in calls with one cache, which end at these tokens and at the last."""
    past = transformers().DynamicCache(config=model.config) if past is None else past
    parts, start = [], 0
    for end in (*ends, x.shape[1]):
        parts.append(logits(model, x[:, start:end], None if mask is None else mask[:, :end], past))
        start = end
    return torch.cat(parts, 1)
