"""Small models of Hugging Face with a causal state, one a family, and what their layers have of it."""

import functools
from typing import Any

import torch
from torch import Tensor

import mnemos
from mnemos.libraries import timm, transformers
from mnemos.types import leaves

VOCABULARY = 17
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
_COMMON = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
_COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 20}
_JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_MAMBA2 = {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_DELTA = {f"linear_{name}": n for name, n in {"num_value_heads": 4, "num_key_heads": 2, "value_head_dim": 6}.items()}
_DELTA |= {**_HEADS, "linear_key_head_dim": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_EXPERTS |= {"shared_expert_intermediate_size": 8}
_HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 3},
    "FalconMamba": {"state_size": 3},
    "Jamba": {**_HEADS, **_JAMBA, "num_hidden_layers": 3, "num_experts": 2, "mamba_d_state": 3, "mamba_dt_rank": 2},
    "Mamba2": _MAMBA2,
    "Bamba": {**_HEADS, **_BAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "Qwen3Next": {**_DELTA, **_EXPERTS, **_HYBRID, "head_dim": 8},
    "GPT2": {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "num_attention_heads": 4},
    "Llama": _HEADS,
    "Mistral": {**_HEADS, "sliding_window": 4},
    "Gemma2": {**_HEADS, "sliding_window": 3, "head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
# The same with gated caches, in double precision.
CACHED = ("GPT2, cached", "Mistral, cached")
# Models whose recurrent layers take the same steps.
_NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 8, "head_dim": 4}
_NEMOTRON |= {"ssm_state_size": 4, "n_groups": 2, "chunk_size": 4}
_ZAMBA = {"n_mamba_heads": 4, "mamba_d_state": 4, "chunk_size": 4}
FURTHER: dict[str, dict[str, Any]] = {
    "GraniteMoeHybrid": {**_HEADS, **_BAMBA, **_HYBRID, "shared_intermediate_size": 8, "num_local_experts": 2},
    "NemotronH": {**_HEADS, **_NEMOTRON, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "Zamba2": {**_ZAMBA, "num_attention_heads": 4, "intermediate_size": 20, "layers_block_type": ["mamba", "hybrid"]},
    "Qwen3_5": {**_DELTA, **_HYBRID, "head_dim": 8},
    "OlmoHybrid": {**_DELTA, **_HYBRID},
}
# Models of other classes. Of the latter three positions cannot be set.
_ENCODER = {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": 32}
_ENCODER |= {"num_attention_heads": 2, "intermediate_size": 24}
_PICTURES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
# num_hidden_layers: another name of `encoder_layers`.
_BART = {"num_hidden_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24}
CAUSAL: dict[str, dict[str, Any]] = {
    "Roberta": _ENCODER,
    "Bloom": {"n_head": 2},
    "Bart": {**_BART, "is_decoder": True, "is_encoder_decoder": False, "max_position_embeddings": 32},
    "RoFormer": {**_ENCODER, "embedding_size": 16},
    "Git": {**_ENCODER, "vision_config": {**_PICTURES, "image_size": 32, "patch_size": 16}},
}
TOGETHER = ("Bart", "RoFormer", "Git")
# Models that `functional` does not serve.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_KDA = {"linear_head_dim": 4, "linear_num_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "v_head_dim": 4}
_ROTARY = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
_KIMI = {**_HEADS, **_KDA, **_ROTARY, **_ROUTED, **_HYBRID, "mlp_layer_types": ["dense", "sparse", "dense"]}
_CONV = {**_HEADS, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_BLOCKS = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 2}
_BLOCKS = {f"indexer_{name}": n for name, n in _BLOCKS.items()}
_INDEXER = {"index_topk": 4, "index_head_dim": 4, "index_n_heads": 2, "index_kpool": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": {**_DELTA, **_EXPERTS, **_HYBRID, "head_dim": 8},
    "Qwen4Exp": {**_DELTA, **_EXPERTS, **_HYBRID, **_BLOCKS, "head_dim": 8, "hc_lowrank": 4},
    "LaraMini": {
        **{**_DELTA, **_EXPERTS, "num_hidden_layers": 3, "head_dim": 8},
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention"],
    },
    "Bert": {"num_attention_heads": 2, "hidden_size": 20, "intermediate_size": 28, **_NO_DROPOUT},
    "KimiLinear": _KIMI,
    "Glm5Next": {**_KIMI, **_INDEXER, "q_lora_rank": 8, "qk_rope_head_dim": 0, "n_routed_experts": 4, "hc_mult": 2},
    "BailingHybrid": {**_KIMI, "head_dim": 4},
    "FalconH1": {**_HEADS, **_BAMBA, "mamba_d_ssm": 32},
    "Zamba": {**_HEADS, "layers_block_type": ["hybrid"] * 2, "mamba_d_state": 3, "mamba_dt_rank": 2},
    "Lfm2": _CONV,
    "Lfm3": _CONV,
    "Rwkv": {"rescale_every": 1},
    "RecurrentGemma": {
        **{**_HEADS, "num_hidden_layers": 3, "attention_window_size": 4, "lru_width": 24, "head_dim": 4},
        "block_types": ("recurrent", "recurrent", "attention"),
    },
    "xLSTM": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 8, "num_blocks": 2, "chunk_size": 8},
}


def build(name: str, **options: Any) -> Any:
    """A new model in eval mode, with weights that do something."""
    name, _, cached = name.partition(", ")
    library, sizes = transformers(), {**_COMMON, **{**FAMILIES, **FURTHER, **CAUSAL, **OTHERS}[name], **options}
    config = getattr(library, f"{name}TextConfig", getattr(library, f"{name}Config"))(**sizes)
    torch.manual_seed(0)
    kinds = {"GPT2": "GPT2LMHeadModel", "Glm5Next": "Glm5NextTextModel", "Bert": "BertForMaskedLM"}
    model = getattr(library, kinds.get(name, f"{name}ForCausalLM"))(config).eval()
    if cached:
        mnemos.cache(model, mnemos.GRC(length=4, block=3, scope="stream"))
        model.double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for part in model.modules():
            if isinstance(part, mnemos.hosts.HostBranch):
                part.mix.fill_(0.5)  # the cache counts
    return model


def short(name: str) -> Any:
    """A new model of its first layer, or of two where they are of several kinds, for tests that try much."""
    sizes = {**FAMILIES, **FURTHER, **OTHERS}[name]
    kinds = {key: value[:2] for key, value in sizes.items() if key.endswith(("layer_types", "block_type"))}
    return build(name, num_hidden_layers=2 if kinds or name in ("Bamba", "Jamba") else 1, **kinds)


@functools.cache
def step_of(name: str) -> Any:
    """`functional` of a model that the tests share and do not change."""
    return mnemos.functional(build(name))


def vit(depth: int = 2) -> Any:
    """A model of pictures [B, 3, 32, 32] of timm."""
    torch.manual_seed(0)
    return timm().create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=depth, num_classes=7).eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids that are not special."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(step: Any, x: Tensor, sizes: list[int], state: Any = None) -> tuple[Tensor, Any]:
    """The outputs of x, read in pieces, and the last state."""
    outputs = []
    for piece in x.split(sizes, 1):
        y, state = step(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def cached(model: Any, x: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """The outputs of x, read in pieces with a cache of Transformers, and that cache."""
    outputs, name, cache, end = [], "", None, 0  # its name: that in the outputs
    for piece in x.split(sizes, 1):
        options, end = {} if cache is None else {name: cache}, end + piece.shape[1]
        # Mamba-1 takes a mask of the first call alone.
        if mask is not None and (cache is None or model.config.model_type not in ("mamba", "falcon_mamba")):
            options["attention_mask"] = mask[:, :end]
        found = model(piece, use_cache=True, **options)
        name = next(key for key in ("cache", "past_key_values", "cache_params") if key in found)
        cache = found[name]
        outputs.append(found[0])
    return torch.cat(outputs, 1), cache


def run(model: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs of valid tokens, and gradients of their mean square."""
    model.zero_grad()
    y = model(x, **options) if mask is None else model(x, attention_mask=mask, **options)[0][mask.bool()]
    y = y if isinstance(y, Tensor) else y[0]
    y.square().mean().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def agree(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """What `run` found twice, to the rounding of single precision; gradients by the largest number of each."""
    torch.testing.assert_close(found[0], wanted[0], **CLOSE)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        bar = 2e-5 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=bar, msg=lambda text, name=name: name + text)


def copied(state: Any) -> list[Tensor]:
    """Copies of the tensors of a state."""
    return [x.clone() for x in leaves(state)]
