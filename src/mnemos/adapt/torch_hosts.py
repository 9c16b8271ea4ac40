"""Hosts of PyTorch itself: `torch.nn.MultiheadAttention`, in encoder layers or alone."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .host import Call, Host, Site, argument, hides_the_future


def _call(module: Any, args: tuple, kwargs: dict) -> Call:
    query, key = (argument(args, kwargs, i, name) for i, name in enumerate(("query", "key")))
    if key is not query:
        raise InputError(
            "a cached MultiheadAttention was called with a query and a key that are not one tensor; where they are two "
            "sequences, leave it out with where="
        )
    if argument(args, kwargs, 7, "is_causal") or hides_the_future(argument(args, kwargs, 5, "attn_mask"), hidden=True):
        raise InputError("a cached MultiheadAttention was called causally, where a shared cache would show the future")
    if query.is_nested:
        raise InputError("a cached MultiheadAttention takes no nested tensors; pad them")
    padding = argument(args, kwargs, 3, "key_padding_mask")
    if query.dim() == 2:  # no batch
        return Call(query[None], None if padding is None else _valid(padding)[None], flipped=False)
    x = query if module.batch_first else query.transpose(0, 1)
    mask = None if padding is None else _valid(padding)
    if mask is not None and mask.shape != x.shape[:2]:
        raise InputError(f"expected a key_padding_mask of shape {tuple(x.shape[:2])}, found {tuple(mask.shape)}")
    return Call(x, mask, flipped=not module.batch_first)


def _valid(padding: Tensor) -> Tensor:
    """PyTorch says True, or −∞, of what is padding."""
    return ~padding if padding.dtype == torch.bool else padding > -1


def _left(site: Site) -> str | None:
    parent = site.above[-1] if site.above else None
    if isinstance(parent, nn.TransformerDecoderLayer):
        if site.name.endswith("self_attn"):
            return "of a decoder: a shared cache would show it the future"
        return "across two sequences: it has no input of its own to remember"
    return None


HOSTS = (
    Host(
        "torch.nn.modules.activation:MultiheadAttention",
        ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal"),
        width="embed_dim",
        heads="num_heads",
        call=_call,
        left=_left,
    ),
)
