"""Adapters for PyTorch: `torch.nn.MultiheadAttention`, and torchvision's ViT, Swin, Swin v2, MaxViT and MViT."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import assert_in_graph
from mnemos.types import InputError

from .host import (
    ACROSS,
    DECODER,
    PART,
    AttentionInput,
    Call,
    Host,
    Site,
    TokenReader,
    add_paper,
    any_length,
    argument,
    in_a_part,
)
from .masks import CAUSAL, combine, refuse_mask
from .timm_hosts import IMAGE, POOLED_QUERIES

_OTHER_KEYS = (
    "a cached MultiheadAttention: expected the same values as query and key, found others; an attention across two "
    "sequences cannot have a cache: leave it out with where="
)


def _multihead(module: nn.MultiheadAttention, args: tuple, kwargs: dict) -> Call:
    query, key = (argument(args, kwargs, i, name) for i, name in enumerate(("query", "key")))
    if query.is_nested:
        raise InputError("a cached MultiheadAttention: expected padded tensors, found nested tensors; pad them")
    if key is not query:
        _same(query, key)
    if argument(args, kwargs, 7, "is_causal"):
        raise InputError(CAUSAL)
    padding = argument(args, kwargs, 3, "key_padding_mask")
    valid = None if padding is None else _valid(padding)
    attended = argument(args, kwargs, 5, "attn_mask")
    if query.dim() == 2:  # no batch
        x = query[None]
        valid = None if valid is None else valid[None]
        return Call(x, combine(valid, refuse_mask(attended, x, hides=True)))
    x = query if module.batch_first else query.transpose(0, 1)
    if valid is not None and valid.shape != x.shape[:2]:
        raise InputError(
            f"expected a key_padding_mask {tuple(x.shape[:2])}, found {tuple(valid.shape)}; pass one value per token"
        )
    return Call(x, combine(valid, refuse_mask(attended, x, hides=True)), "batch" if module.batch_first else "time")


def _same(query: Tensor, key: Tensor) -> None:
    """Raise InputError unless two tensors have equal values, as where a model adds its positions to each anew.

    In a graph, whose values are not known, an assertion raises RuntimeError at run time.
    """
    if query.shape != key.shape:
        raise InputError(_OTHER_KEYS)
    if query.is_meta:
        return
    equal = ((query == key) | (query.isnan() & key.isnan())).all()
    if torch.compiler.is_compiling():
        assert_in_graph(equal, _OTHER_KEYS)
    elif not equal:
        raise InputError(_OTHER_KEYS)


def _valid(padding: Tensor) -> Tensor:
    """The valid tokens: PyTorch marks padding by True, or by −∞."""
    return ~padding if padding.dtype == torch.bool else padding > -1


def _cross_attention(site: Site) -> str | None:
    parent = site.above[-1] if site.above else None
    if isinstance(parent, nn.TransformerDecoderLayer):
        if site.name.endswith("self_attn"):
            return DECODER
        return ACROSS
    part = site.name.rpartition(".")[2]
    if "Pool" in type(parent).__name__ or "cross" in part or part == "encoder_attn":
        return ACROSS
    return None


def _patches(site: Site, seen: int | None) -> AttentionInput:
    """64 slots, or one per token of an example. torchvision's ViT: one per patch, without its class token."""
    model = next((m for m in site.above if _is_torchvision_vit(m)), None)
    if model is None:
        inside = any(type(m).__module__ == "torchvision.models.vision_transformer" for m in site.above)
        return any_length(site, seen)._replace(warning=PART if inside else "")
    side = model.image_size // model.patch_size
    tokens = seen or side * side + 1
    return AttentionInput(tokens, tokens - 1, 1, (side, side) if tokens == side * side + 1 else None, tokens)


def _is_torchvision_vit(module: object) -> bool:
    cls = getattr(sys.modules.get("torchvision.models.vision_transformer"), "VisionTransformer", None)
    return cls is not None and isinstance(module, cls)


def _swin(site: Site, seen: int | None) -> AttentionInput:
    """Swin: the tokens are the whole grid of a stage, which the attention divides into windows by itself.

    One slot per token of a window. The model declares no image size: the grid is that of 224 × 224 pixels, or the
    square of an example's T.
    """
    before = _before(site)
    if not before and not seen:
        return in_a_part(site, seen)
    stage = sum(type(module).__name__.startswith("PatchMerging") for module in before)
    patch = before[0][0].stride[0] if before else 4
    tokens = seen or (-(-IMAGE[0] // patch) // 2**stage) ** 2
    side = round(tokens**0.5)
    grid = (side, side) if side * side == tokens else None
    area = site.module.window_size[0] * site.module.window_size[1]
    return add_paper(AttentionInput(tokens, min(area, tokens), 0, grid, tokens), stage)


def _before(site: Site) -> list[Any]:
    """The parts of the model's `features` before the one with the attention: stages and merging layers alternate."""
    features = next((m.features for m in site.above if hasattr(m, "features")), ())
    found = []
    for module in features:
        if module in site.above:
            break
        found.append(module)
    return found


def _groups(module: object, args: tuple, kwargs: dict) -> Call:
    """MaxViT: [B, groups, T, D]; each group is a row."""
    return Call(argument(args, kwargs, 0, "x").flatten(0, 1))


def _partition(site: Site, seen: int | None) -> AttentionInput:
    """MaxViT: one slot per token of a group."""
    tokens = int(site.module.max_seq_len)
    parent = next((m for m in reversed(site.above) if hasattr(m, "grid_size")), None)
    area = tokens if parent is None else parent.grid_size[0] * parent.grid_size[1]
    return AttentionInput(tokens, tokens, 0, None, tokens, area // tokens)


def _video(site: Site, seen: int | None) -> AttentionInput:
    """MViT: 64 slots, or one per token of an example; its class token is not summarised."""
    place = any_length(site, seen)
    return place._replace(prefix=1, slots=seen - 1 if seen else place.slots)


def _pooled(site: Site) -> str | None:
    pool = site.module.pool_q
    return POOLED_QUERIES if pool is not None and any(stride != 1 for stride in pool.pool.stride) else None


HOSTS = (
    Host(
        "torch.nn.modules.activation:MultiheadAttention",
        ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"),
        width="embed_dim",
        heads="num_heads",
        call=_multihead,
        place=_patches,
        left=_cross_attention,
    ),
    Host(
        "torchvision.models.swin_transformer:ShiftedWindowAttention",
        ("x",),
        width="qkv.in_features",
        out="proj.out_features",
        heads="num_heads",
        call=TokenReader("x"),
        place=_swin,
    ),
    Host(
        "torchvision.models.maxvit:RelativePositionalMultiHeadAttention",
        ("x",),
        width="to_qkv.in_features",
        out="merge.out_features",
        heads="n_heads",
        call=_groups,
        place=_partition,
        projection="merge",
    ),
    Host(
        "torchvision.models.video.mvit:MultiscaleAttention",
        ("x", "thw"),
        width="embed_dim",
        out="output_dim",
        heads="num_heads",
        call=TokenReader("x"),
        place=_video,
        projection="project.0",
        left=_pooled,
    ),
)
