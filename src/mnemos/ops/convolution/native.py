"""The short causal convolution on the CPU, in C++ (native/convolution/), forward and backward, with its activation.

The backward keeps the inputs alone and computes z again. Inputs have any strides and are float32, bfloat16 or float16;
weights, bias and all sums are float32. Padding and resets are read where they are given: nothing is copied for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Kernel, Outputs, kernel_operator

from . import chunked

KERNEL = Kernel(
    "short_convolution",
    "convolution",
    "Convolution",
    "B T C width type threads silu x:4 y:4 weight bias valid:3 resets:3 s s_end g:4 dx:4 d_weight d_bias gs ds",
)
WIDEST = 8  # of convolution.cpp


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, the weight no float64, and W at most 8."""
    typed = x.dtype in TYPES and weight.dtype in TYPES
    return typed and x.device.type == "cpu" and 0 < weight.shape[1] <= WIDEST


def _sizes(x: Tensor, weight: Tensor, activation: str | None) -> tuple[int, ...]:
    return *x.shape, weight.shape[1], TYPES[x.dtype], torch.get_num_threads(), activation is not None


def _allocate(keeps: bool, *inputs: Any) -> Outputs:
    """y and the window after the call. The kernel writes the valid tokens' rows of y alone."""
    x, weight, _, _, mask, *_ = inputs
    b, _, c = x.shape
    return x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape), x.new_empty(b, weight.shape[1] - 1, c)


def _forward(keeps: bool, *inputs: Any) -> Outputs:
    x, weight, bias, state, mask, resets, activation = inputs
    y, end = outputs = _allocate(keeps, *inputs)
    weights = weight.float(), None if bias is None else bias.float()
    KERNEL((False,), (*_sizes(x, weight, activation), x, y, *weights, mask, resets, state, end))
    return outputs


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    x, weight, bias, state, mask, resets, activation, gy, gs = inputs
    gy = x.new_zeros(x.shape) if gy is None else gy
    (b, _, c), w = x.shape, weight.shape[1]
    weights = weight.float(), None if bias is None else bias.float()
    dx = x.new_empty(x.shape) if mask is None else x.new_zeros(x.shape)
    dweight, dbias, ds = weights[0].new_empty(w, c), weights[0].new_empty(c), x.new_empty(b, w - 1, c)
    read = *_sizes(x, weight, activation), x, None, *weights, mask, resets, state, None
    KERNEL((True,), (*read, gy, dx, dweight, dbias, gs, ds))
    dbias = None if bias is None else dbias.to(bias.dtype)
    return dx, dweight.t().contiguous().to(weight.dtype), dbias, None if state is None else ds


# Cost: B·T·C·W multiply-adds and one pass over x and y, with gradients 4·B·T·C·W; `torch.get_num_threads()` threads.
convolve = kernel_operator(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? state, Tensor? mask, Tensor? resets, str? activation",
    _allocate,
    _forward,
    _backward,
    chunked.convolve,
    results=2,
    gradients=4,
)
