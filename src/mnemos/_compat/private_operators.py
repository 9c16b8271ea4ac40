"""Private operators of PyTorch, and how operators are looked up; the part of `_compat` that is about operators."""

import importlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

try:
    _scan: Callable[..., Any] | None = importlib.import_module("torch._higher_order_ops.scan").scan
except (ImportError, AttributeError):
    _scan = None


def scanned(
    step: Callable[[list[Tensor], tuple[Tensor, ...]], tuple[list[Tensor], Tensor]],
    carry: list[Tensor],
    inputs: tuple[Tensor, ...],
) -> tuple[list[Tensor], Tensor]:
    """`carry, y = step(carry, x)` for the entries x of inputs [T, ..] in turn: the last carry, and all y [T, ..].

    An exported program has one loop for any T; there is no public operator for it. Fallback: a loop in Python, whose
    program is of one T.
    """
    if _scan is not None:
        found: tuple[list[Tensor], Tensor] = _scan(step, carry, inputs, dim=0)
        return found
    outputs = []
    for given in zip(*inputs, strict=True):
        carry, y = step(carry, given)
        outputs.append(y)
    return carry, torch.stack(outputs)


def forget_control_flow() -> None:
    """Discard the code that torch.compile made of `scan` and `torch.cond` for earlier programs.

    Both compile a function of their own for each program. The guards of an older program, tested with the sizes of a
    new one, would fix sizes that the new one leaves open. Fallback: discard all compiled code of the process.
    """
    reset = getattr(getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None), "reset_code", None)
    if reset is None:
        torch.compiler.reset()
        return
    for operator in (torch.cond, _scan):
        for code in getattr(getattr(operator, "__code__", None), "co_consts", ()):
            if isinstance(code, CodeType):
                reset(code)


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
