"""Private operators of PyTorch, and how operators are looked up; the part of `_compat` that is about operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def packed_products() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor, Tensor | None], Tensor]] | None:
    """oneDNN's (pack, product) of linear layers in float32 on a CPU: product(x, pack(weight), bias) = x·weightᵀ + bias.

    torch.compile uses the same operators for frozen weights. Fallback: None, and layers are computed as usual.
    """
    space: Any = getattr(torch.ops, "mkldnn", None)
    pack, product = (getattr(space, name, None) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    if pack is None or product is None or not torch.backends.mkldnn.is_available():
        return None
    return pack, lambda x, weight, bias: product(x, weight, bias, "none", [], "")


def operators(*names: str) -> list[Any]:
    """The operators aten::NAME that exist in this PyTorch. Those of fused attention and of unsafe views are private.

    Fallback: a missing operator is omitted; without the operator there are no calls to count.
    """
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def operator_of(overload: Any) -> Any:
    """The operator (torch.ops.aten.add) of one of its overloads (torch.ops.aten.add.Tensor).

    Fallback: look it up by its public name, "aten::add.Tensor".
    """
    found = getattr(overload, "_overloadpacket", None)
    if found is None:
        space, _, name = overload.name().partition("::")
        found = getattr(getattr(torch.ops, space), name.partition(".")[0])
    return found


def schema_of(overload: Any) -> Any:
    """An operator's schema: the names of its arguments, and which results alias or overwrite them.

    Fallback: RuntimeError, because a roofline cannot be computed without the schema.
    """
    found = getattr(overload, "_schema", None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} has no schema for {overload}; measure with torch 2.13")
    return found


def flop_mode() -> Any:
    """The mode inside PyTorch's FlopCounterMode, which sees every operator. Importing it imports Triton where it is.

    Fallback: None, and the whole FlopCounterMode is used.
    """
    from torch.utils import flop_counter

    return getattr(flop_counter, "_FlopCounterMode", None)


def is_elementary(overload: Any) -> bool:
    """Whether a dispatched operator is itself, and not made of others. Fallback: False, and PyTorch's mode decides."""
    decomposes = getattr(overload, "_can_decompose", None)
    return decomposes is not None and overload.namespace != "prim" and not decomposes()
