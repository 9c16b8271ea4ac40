"""The short causal convolution on the CPU, in C++ (native/convolution.cpp), forward and backward, with its activation.

The backward keeps the inputs alone and computes z again. Inputs have any strides and are float32, bfloat16 or float16;
weights, bias and all sums are float32. Padding and resets are read where they are given: nothing is copied for them.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native import why_not
from mnemos.native.codes import TYPES
from mnemos.ops.kernel_call import (
    dense,
    eager,
    loaded_kernels,
    mask_address,
    pointers,
    present,
    register_pair,
    runs_here,
)
from mnemos.ops.once import differentiable_once

__all__ = ["convolve", "runs_here", "takes", "why_not"]

CALL = struct.Struct("37q")  # `struct Convolution` of native/convolution.h
WIDEST = 8  # of convolution.cpp
_NO_BACKWARD, _NO_ROWS = (0,) * 12, (0,) * 4
Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, the weight no float64, and W at most 8."""
    typed = x.dtype in TYPES and weight.dtype in TYPES
    return typed and x.device.type == "cpu" and 0 < weight.shape[1] <= WIDEST


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """x [B, T, C], weight [C, W], bias [C], state [B, W − 1, C], mask, resets [B, T] -> y, state.

    Cost: B·T·C·W multiply-adds and one pass over x and y, with gradients 4·B·T·C·W. Threads: `torch.get_num_threads()`.
    """
    tensors = x, weight, bias, state, mask, resets
    silu = activation is not None
    if not eager(*tensors):
        y, end = torch.ops.mnemos.short_convolution(*tensors, silu)
    elif torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors]):
        y, end = _Eager.apply(*tensors, silu)
    else:
        y, end = _forward(*tensors, silu)
    return y, end


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """`struct Rows` of native/call.h for x [B, T, C]."""
    b, t, _ = x.stride()
    return x.data_ptr(), b, t, 0


def _ready(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors as the kernel reads them."""
    weight, bias = weight.float().contiguous(), bias if bias is None else bias.float().contiguous()
    return dense(x), weight, bias, state if state is None else state.contiguous()


def _sizes(x: Tensor, weight: Tensor, silu: bool) -> tuple[int, ...]:
    return *x.shape, weight.shape[1], TYPES[x.dtype], torch.get_num_threads(), silu


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    x, weight, bias, state = _ready(x, weight, bias, state)
    (b, _, c), w = x.shape, weight.shape[1]
    # The kernel writes the valid tokens' rows.
    y = x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape)
    end = x.new_empty(b, w - 1, c)
    call = CALL.pack(
        *_sizes(x, weight, silu), *_rows(x), *_rows(y), *pointers(weight, bias), *mask_address(mask),
        *mask_address(resets), *pointers(state, end), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call)
    return y, end


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    silu: bool,
    gy: Tensor,
    gs: Tensor | None,
) -> Gradients:
    """The gradients of x, weight, bias and state."""
    kinds = weight.dtype, None if bias is None else bias.dtype
    x, weight, bias, state = _ready(x, weight, bias, state)
    gy, gs = dense(gy), gs if gs is None else gs.contiguous()
    (b, _, c), w = x.shape, weight.shape[1]
    dx = x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape)
    dweight, dbias, ds = weight.new_empty(w, c), weight.new_empty(c), x.new_empty(b, w - 1, c)
    call = CALL.pack(
        *_sizes(x, weight, silu), *_rows(x), *_NO_ROWS, *pointers(weight, bias), *mask_address(mask),
        *mask_address(resets), *pointers(state, None), *_rows(gy), *_rows(dx), *pointers(dweight, dbias, gs, ds),
    )  # fmt: skip
    _run(True, call)
    grads = dweight.t().to(kinds[0]), None if kinds[1] is None else dbias.to(kinds[1])
    return dx, *grads, None if state is None else ds


def _run(backward: bool, call: bytes) -> None:
    loaded = loaded_kernels()
    if loaded.mnemos_convolution(kernels.variant(loaded), backward, call):
        raise MemoryError("short_convolution: not enough memory for its buffers; use fewer rows or channels")


class _Eager(torch.autograd.Function):
    """The operator without the dispatcher, whose overhead is the time of many tokens."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.silu = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return _forward(*inputs)

    @staticmethod
    @differentiable_once("short_convolution")
    def backward(ctx: Any, saved: tuple[Any, ...], gy: Tensor | None, gs: Tensor | None) -> tuple[Tensor | None, ...]:
        gy = saved[0].new_zeros(saved[0].shape) if gy is None else gy
        if eager(gy, gs):
            x, weight, bias, state, mask, resets = saved
            return *_backward(x, weight, bias, state, mask, resets, ctx.silu, gy, gs), None, None, None
        found = torch.ops.mnemos.short_convolution_backward(*saved, ctx.silu, gy, gs)
        return *present(saved[:4], found), None, None, None


def _like_results(x: Tensor, weight: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    b, _, c = x.shape
    return x.new_empty(x.shape), x.new_empty(b, weight.shape[1] - 1, c)


def _like_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    x, weight, *others = inputs[:4]
    turned = weight.new_empty(weight.shape[::-1]).t()
    return x.new_empty(x.shape), turned, *(x.new_empty(0) if i is None else i.new_empty(i.shape) for i in others)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.silu = inputs[6]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gy: Tensor | None, gs: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gy = saved[0].new_zeros(saved[0].shape) if gy is None else gy
    found = torch.ops.mnemos.short_convolution_backward(*saved, ctx.silu, gy, gs)
    return *present(saved[:4], found), None, None, None


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? mask, Tensor? resets, bool silu"
register_pair(
    "short_convolution",
    (
        f"({_TENSORS}) -> (Tensor, Tensor)",
        f"({_TENSORS}, Tensor gy, Tensor? gs) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    (_forward, _backward),
    (_like_results, _like_gradients),
    _gradients,
    _save,
)
