"""Small models of Hugging Face with a causal state, one a family, and what their layers have of it."""

import functools
from typing import Any

import torch
from torch import Tensor

import mnemos
from mnemos.libraries import transformers
from mnemos.types import leaves

VOCABULARY = 17
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20}
_JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_MAMBA2 = {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_DELTA = {f"linear_{name}": n for name, n in {"num_value_heads": 4, "num_key_heads": 2, "value_head_dim": 6}.items()}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 3},
    "FalconMamba": {"state_size": 3},
    "Jamba": {**_HEADS, **_JAMBA, "num_hidden_layers": 3, "num_experts": 2, "mamba_d_state": 3, "mamba_dt_rank": 2},
    "Mamba2": _MAMBA2,
    "Bamba": {**_HEADS, **_BAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "Qwen3Next": {
        **_HEADS,
        **_DELTA,
        **_EXPERTS,
        "linear_key_head_dim": 4,
        "head_dim": 8,
        "shared_expert_intermediate_size": 8,
        **_HYBRID,
    },
    "GPT2": {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_attention_heads": 4},
    "Llama": _HEADS,
    "Mistral": {**_HEADS, "sliding_window": 4},
    "Gemma2": {**_HEADS, "sliding_window": 3, "head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
# Models whose recurrent layers take the same steps.
_NEMOTRON = {f"mamba_{name}": n for name, n in {"num_heads": 4, "head_dim": 8}.items()}
_ZAMBA = {"n_mamba_heads": 4, "mamba_d_state": 4, "chunk_size": 4}
FURTHER: dict[str, dict[str, Any]] = {
    "GraniteMoeHybrid": {**_HEADS, **_BAMBA, **_HYBRID, "shared_intermediate_size": 8, "num_local_experts": 2},
    "NemotronH": {
        **_HEADS,
        **_NEMOTRON,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "ssm_state_size": 4,
        "n_groups": 2,
        "head_dim": 4,
        "chunk_size": 4,
    },
    "Zamba2": {**_ZAMBA, "num_attention_heads": 4, "intermediate_size": 20, "layers_block_type": ["mamba", "hybrid"]},
    "Qwen3_5": {**_HEADS, **_DELTA, **_HYBRID, "linear_key_head_dim": 4, "head_dim": 8},
    "OlmoHybrid": {**_HEADS, **_DELTA, **_HYBRID, "linear_key_head_dim": 4},
}
# Models that `functional` does not serve.
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 8}
_KDA = {"linear_head_dim": 4, "linear_num_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "v_head_dim": 4}
_ROTARY = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
_KIMI = {**_HEADS, **_KDA, **_ROTARY, **_ROUTED, **_HYBRID, "mlp_layer_types": ["dense", "sparse", "dense"]}
_CONV = {**_HEADS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_BLOCKS = {f"indexer_{name}": n for name, n in {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8}.items()}
_INDEXER = {"index_topk": 4, "index_head_dim": 4, "index_n_heads": 2, "index_kpool": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": {**_HEADS, **_DELTA, **_HYBRID, **_SHARED, "linear_key_head_dim": 4, "head_dim": 8},
    "Qwen4Exp": {
        **_HEADS,
        **_DELTA,
        **_HYBRID,
        **_SHARED,
        **_BLOCKS,
        "linear_key_head_dim": 4,
        "head_dim": 8,
        "hc_lowrank": 4,
        "indexer_compress_ratio": 2,
    },
    "LaraMini": {
        **_HEADS,
        **_DELTA,
        **_SHARED,
        "linear_key_head_dim": 4,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention"],
    },
    "KimiLinear": _KIMI,
    "Glm5Next": {**_KIMI, **_INDEXER, "q_lora_rank": 8, "qk_rope_head_dim": 0, "n_routed_experts": 4, "hc_mult": 2},
    "BailingHybrid": {**_KIMI, "head_dim": 4},
    "FalconH1": {**_HEADS, **_BAMBA, "mamba_d_ssm": 32},
    "Zamba": {**_HEADS, "layers_block_type": ["hybrid"] * 2, "mamba_d_state": 3, "mamba_dt_rank": 2},
    "Lfm2": _CONV,
    "Lfm3": _CONV,
    "Rwkv": {"rescale_every": 1},
    "RecurrentGemma": {
        **_HEADS,
        "num_hidden_layers": 3,
        "attention_window_size": 4,
        "lru_width": 24,
        "head_dim": 4,
        "block_types": ("recurrent", "recurrent", "attention"),
    },
    "xLSTM": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 8, "num_blocks": 2, "chunk_size": 8},
}


def build(name: str, **options: Any) -> Any:
    """A new model in eval mode, with weights that do something."""
    library, sizes = transformers(), {**_COMMON, **{**FAMILIES, **FURTHER, **OTHERS}[name], **options}
    config = getattr(library, f"{name}TextConfig", getattr(library, f"{name}Config"))(**sizes)
    torch.manual_seed(0)
    kind = {"GPT2": "GPT2LMHeadModel", "Glm5Next": "Glm5NextTextModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(library, kind)(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@functools.cache
def step_of(name: str) -> Any:
    """`functional` of a model that the tests share and do not change."""
    return mnemos.functional(build(name))


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids that are not special."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(step: Any, x: Tensor, sizes: list[int], state: Any = None) -> tuple[Tensor, Any]:
    """The outputs of x, read in pieces."""
    outputs = []
    for piece in x.split(sizes, 1):
        y, state = step(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def copied(state: Any) -> list[Tensor]:
    """Copies of the tensors of a state."""
    return [x.clone() for x in leaves(state)]
