"""The short causal convolution on the CPU, in C++ (native/convolution/), forward and backward, with its activation.

The backward keeps the inputs alone and computes z again. Inputs have any strides and are float32, bfloat16 or float16;
weights, bias and all sums are float32. Padding and resets are read where they are given: nothing is copied for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import (
    Outputs,
    contiguous,
    dense,
    kernel_operator,
    mask_address,
    pointers,
    rows,
)

CALL = kernels.layout(
    "Convolution",
    "B T C width type threads silu x:4 y:4 weight bias valid:3 resets:3 s s_end g:4 dx:4 d_weight d_bias gs ds",
)
WIDEST = 8  # of convolution.cpp
_NO_BACKWARD = (0,) * 12


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, the weight no float64, and W at most 8."""
    typed = x.dtype in TYPES and weight.dtype in TYPES
    return typed and x.device.type == "cpu" and 0 < weight.shape[1] <= WIDEST


def _allocate(kept: bool, *inputs: Any) -> Outputs:
    """y and the window after the call. The kernel writes the valid tokens' rows of y alone."""
    x, weight, _, _, mask, *_ = inputs
    b, _, c = x.shape
    return x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape), x.new_empty(b, weight.shape[1] - 1, c)


def _forward(outputs: Outputs, *inputs: Any) -> None:
    y: Any
    (y, end), (x, weight, bias, state, mask, resets, activation) = outputs, inputs
    x, weight, bias, state = _ready(x, weight, bias, state)
    call = CALL.pack(
        *_sizes(x, weight, activation), *rows(x, y), *pointers(weight, bias), *mask_address(mask),
        *mask_address(resets), *pointers(state, end), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call)


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    x, weight, bias, state, mask, resets, activation, gy, gs = inputs
    dtypes = weight.dtype, None if bias is None else bias.dtype
    x, weight, bias, state = _ready(x, weight, bias, state)
    (gy,), (gs,) = dense(x.new_zeros(x.shape) if gy is None else gy), contiguous(gs)
    (b, _, c), w = x.shape, weight.shape[1]
    dx = x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape)
    dweight, dbias, ds = weight.new_empty(w, c), weight.new_empty(c), x.new_empty(b, w - 1, c)
    call = CALL.pack(
        *_sizes(x, weight, activation), *rows(x, None), *pointers(weight, bias), *mask_address(mask),
        *mask_address(resets), *pointers(state, None), *rows(gy, dx), *pointers(dweight, dbias, gs, ds),
    )  # fmt: skip
    _run(True, call)
    grads = dweight.t().contiguous().to(dtypes[0]), None if dtypes[1] is None else dbias.to(dtypes[1])
    return dx, *grads, None if state is None else ds


def _ready(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> list[Any]:
    """The tensors as the kernels read them."""
    bias, state = bias if bias is None else bias.float().contiguous(), state if state is None else state.contiguous()
    return [*dense(x), weight.float().contiguous(), bias, state]


def _sizes(x: Tensor, weight: Tensor, activation: str | None) -> tuple[int, ...]:
    return *x.shape, weight.shape[1], TYPES[x.dtype], torch.get_num_threads(), activation is not None


def _run(backward: bool, call: bytes) -> None:
    loaded, instructions = kernels.load_kernels()
    if loaded.mnemos_convolution(instructions, backward, call):
        raise MemoryError("short_convolution: not enough memory for its buffers; use fewer rows or channels")


# Cost: B·T·C·W multiply-adds and one pass over x and y, with gradients 4·B·T·C·W; `torch.get_num_threads()` threads.
convolve = kernel_operator(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? mask, Tensor? resets, str? activation",
    _allocate,
    _forward,
    _backward,
    results=2,
    gradients=4,
)
