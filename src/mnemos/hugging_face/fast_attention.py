"""Attentions of Transformers and timm on the kernels of `mnemos.ops.softmax_attention`, where a call fits these.

Layers of Transformers find the function that attends by its name in a table. In a forward of `fast` `attend` stands in
front of "sdpa", PyTorch's fused kernel. The configuration, by which Transformers makes the masks, stays as it is.
Attentions of timm call the fused kernel themselves; `_attend` takes its place there.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.attention import softmax
from mnemos.hosts.masks import read_once
from mnemos.libraries import ATTENTIONS, AttentionTable, with_globals
from mnemos.modes import in_graph
from mnemos.ops.softmax_attention import softmax_attention

_READ = "_mnemos_visible"  # attribute of a mask that has its `_Visible`
_PYTORCHS = F.scaled_dot_product_attention
_OTHERS = ("position_bias", "softcap", "cache")  # options that change the result, and that the kernels do not have


def attention_forward(cls: type[nn.Module]) -> Any:
    """For a class of attentions of Transformers or timm, its forward with our kernels; None for other classes."""
    forward: Any = getattr(cls, "forward", None)
    if not isinstance(forward, FunctionType):
        return None
    package, called, names = cls.__module__.partition(".")[0], forward.__code__.co_names, forward.__globals__
    if package == "transformers" and ATTENTIONS in called and ATTENTIONS in names:
        return with_globals(forward, {ATTENTIONS: AttentionTable(names[ATTENTIONS], _around)})
    if package == "timm" and "scaled_dot_product_attention" in called and names.get("F") is F:
        return with_globals(forward, {"F": SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": _attend})})
    return None


def _around(function: Any) -> Any:
    # By where it is from: a model, or a user, may have registered another one under its name.
    usual = getattr(function, "__module__", None) == "transformers.integrations.sdpa_attention"
    return partial(attend, function) if usual else function


def attend(
    theirs: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> Any:
    """(y [B, T, H, M], None) of queries [B, H, T, D], keys and values [B, K, S, ·]. theirs: computes other calls."""
    fits = not dropout and all(options.get(name) is None for name in _OTHERS)
    if fits and not in_graph() and query.shape[2] >= softmax.FEWEST_QUERIES:  # cheap tests first, for single tokens
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        visible = None
        if not softmax.fits_kernels(q, k, v):
            pass
        elif attention_mask is not None:
            # Other shapes, such as [B, 1, 1, S], are repeated by PyTorch.
            if attention_mask.shape[1:] == (1, q.shape[1], k.shape[1]) and len(attention_mask) in (1, len(q)):
                window = options.get("sliding_window")
                visible = read_once(attention_mask, _READ, (window,), partial(_visible, attention_mask, window))
                if visible is not None and visible.valid is not None:
                    visible = visible._replace(valid=visible.valid.expand(len(q), -1))
        elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            visible = _Visible(False, None, None)
        elif q.shape[1] == k.shape[1]:  # else (a static cache) PyTorch aligns the queries with the first keys
            visible = _Visible(True, None, None)
        if visible is not None:
            return softmax_attention(q, k, v, *visible, scaling), None
    named = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **options}
    return theirs(module, query, key, value, attention_mask, **named)


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` as timm calls it, not causal: y [B, H, T, M]."""
    usual = F.scaled_dot_product_attention is _PYTORCHS  # else another library has set its own
    if usual and attn_mask is None and query.dim() == 4 and not any(options.values()):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if softmax.fits_kernels(q, k, v):
            return softmax_attention(q, k, v, False).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


# --- what a mask says ---


class _Visible(NamedTuple):
    """The keys that queries see: those up to their own, or all; the last `window` of these; and which are valid."""

    causal: bool
    window: int | None
    valid: Tensor | None  # [B, S]; None: all


def _visible(mask: Tensor, window: int | None) -> _Visible | None:
    """What a mask [B, 1, T, S] of booleans says; None: more than causality, a window and padding."""
    if mask.dtype is not torch.bool:
        return None
    seen = mask[:, 0]
    t, s = seen.shape[1:]
    valid = seen.any(1)
    query, key = torch.arange(s - t, s)[:, None], torch.arange(s)
    past = key <= query if window is None else (key <= query) & (key > query - window)
    if torch.equal(seen, past & valid[:, None]):
        return _Visible(True, window, None if bool(valid.all()) else valid)
    return _Visible(False, None, valid) if torch.equal(seen, valid[:, None].expand_as(seen)) else None
