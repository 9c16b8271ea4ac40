"""What the operators with C++ kernels share: how tensors are handed over, and how such an operator is registered."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import assume_constant, dispatch_mode_active, is_plain_tensor, transformed
from mnemos.native import library, why_not

PLAIN = (Tensor, torch.nn.Parameter)


@assume_constant
def runs_here() -> bool:
    """Whether the kernels are built and loaded."""
    return library() is not None


def loaded_kernels() -> ctypes.CDLL:
    """The kernels. Raises RuntimeError if there are none."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(why_not())
    return loaded


def dense(x: Tensor) -> Tensor:
    """x with stride 1 in the last axis; the kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor) -> tuple[int, int, int, int]:
    """`struct Rows` of native/call.h for x [B, T, H, width]."""
    b, t, h, _ = x.stride()
    return x.data_ptr(), b, t, h


def mask_address(mask: Tensor | None) -> tuple[int, ...]:
    """The address and the strides of a mask [B, T]; zeros for None."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses of contiguous tensors; 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def eager(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain and no compiler, tracer, transform or counter needs to see the operator."""
    if torch.compiler.is_compiling() or dispatch_mode_active():
        return False
    given = [x for x in tensors if x is not None]
    return all([type(x) in PLAIN and is_plain_tensor(x) for x in given]) and not transformed(*given)  # a list: faster


def present(inputs: Sequence[object], found: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of the inputs: an operator returns an empty tensor where an input is None."""
    return [None if x is None else grad for x, grad in zip(inputs, found, strict=True)]


def register_pair(
    name: str,
    schemas: tuple[str, str],
    compute: tuple[Callable[..., Any], Callable[..., Any]],
    like: tuple[Callable[..., Any], Callable[..., Any]],
    gradients: Callable[..., Any],
    save: Callable[..., Any],
    name_of: Callable[[Sequence[Any]], str] | None = None,
) -> None:
    """Register an operator of the CPU and its backward, which has no derivative.

    Of each pair the first is of `mnemos::NAME`, the second of `mnemos::NAME_backward`: schema, function and fake
    function. The second function may return None, for which the operator returns an empty tensor. name_of: the name of
    the operation from the inputs, where it is not NAME.
    """
    forward, backward = compute

    def filled(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(inputs[0].new_empty(0) if grad is None else grad for grad in backward(*inputs))

    def note_name(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.called = name if name_of is None else name_of(inputs)

    def refuse(ctx: Any, *_: object) -> None:
        raise RuntimeError(f"{ctx.called} is differentiable once; backend='native' has no derivative of its derivative")

    operators = f"mnemos::{name}", f"mnemos::{name}_backward"
    for operator, schema, function, fake in zip(operators, schemas, (forward, filled), like, strict=True):
        torch.library.define(operator, schema)
        torch.library.impl(operator, "CPU", function)
        torch.library.register_fake(operator, fake)
    torch.library.register_autograd(operators[0], gradients, setup_context=save)
    torch.library.register_autograd(operators[1], refuse, setup_context=note_name)
