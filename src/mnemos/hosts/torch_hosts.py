"""The adapter for `torch.nn.MultiheadAttention`: in encoder layers, in torchvision's ViT, or alone."""

import sys

import torch
from torch import Tensor, nn

from mnemos._compat import assert_in_graph
from mnemos.types import InputError

from .host import ACROSS, DECODER, PART, AttentionInput, Call, Host, Site, argument, nowhere
from .masks import CAUSAL, both, refuse_mask

_OTHER_KEYS = (
    "a cached MultiheadAttention: expected the same values as query and key, found others; an attention across two "
    "sequences cannot have a cache: leave it out with where="
)


def _call(module: nn.MultiheadAttention, args: tuple, kwargs: dict) -> Call:
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
        return Call(x, both(valid, refuse_mask(attended, x, hides=True)))
    x = query if module.batch_first else query.transpose(0, 1)
    if valid is not None and valid.shape != x.shape[:2]:
        raise InputError(
            f"expected a key_padding_mask {tuple(x.shape[:2])}, found {tuple(valid.shape)}; pass one value per token"
        )
    return Call(x, both(valid, refuse_mask(attended, x, hides=True)), "batch" if module.batch_first else "time")


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


def _left(site: Site) -> str | None:
    parent = site.above[-1] if site.above else None
    if isinstance(parent, nn.TransformerDecoderLayer):
        if site.name.endswith("self_attn"):
            return DECODER
        return ACROSS
    part = site.name.rpartition(".")[2]
    if "Pool" in type(parent).__name__ or "cross" in part or part == "encoder_attn":
        return ACROSS
    return None


def _place(site: Site, seen: int | None) -> AttentionInput:
    """64 slots, or one per token of an example. torchvision's ViT: one per patch, without its class token."""
    model = next((m for m in site.above if _is_torchvision_vit(m)), None)
    if model is None:
        inside = any(type(m).__module__ == "torchvision.models.vision_transformer" for m in site.above)
        return nowhere(site, seen)._replace(warning=PART if inside else "")
    side = model.image_size // model.patch_size
    tokens = seen or side * side + 1
    return AttentionInput(tokens, tokens - 1, 1, (side, side) if tokens == side * side + 1 else None, tokens)


def _is_torchvision_vit(module: object) -> bool:
    cls = getattr(sys.modules.get("torchvision.models.vision_transformer"), "VisionTransformer", None)
    return cls is not None and isinstance(module, cls)


HOSTS = (
    Host(
        "torch.nn.modules.activation:MultiheadAttention",
        ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"),
        width="embed_dim",
        heads="num_heads",
        call=_call,
        place=_place,
        left=_left,
    ),
)
