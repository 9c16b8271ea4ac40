"""Floating-point operations of a call, counted, attention on the CPU included.

The convention: a multiply-add is 2 operations; matrix products, convolutions and attention are counted, elementwise
work, norms and softmax are not; fused causal attention counts as if nothing were masked, as torch counts it.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

import mnemos.ops  # noqa: F401 - declares the operations of ours that are counted
from mnemos import generators
from mnemos._compat import operators
from mnemos.data.batch import Batch, pieces


def _product(_: Any, a: torch.Size, b: torch.Size, **__: Any) -> int:
    """x + a·b: a [.., n, k], b [.., k, m]."""
    return 2 * math.prod(a) * b[-1]


def _convolution_backward(g: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """One product for each gradient that is wanted; torch forgets the groups in that of the weights."""
    transposed, wanted = rest[4], rest[7]
    each = 2 * math.prod(x if transposed else g) * math.prod(weight[1:])
    return each * (wanted[0] + wanted[1])


def _linear_attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """S takes a product in and is read out; z is read out. q [B, T, H, D], v [B, T, H, M]."""
    return 2 * math.prod(q) * (2 * v[-1] + 1)


def _linear_attention_backward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """The same three times, for dq, dk and dv; in the first two z is one more column."""
    return 2 * math.prod(q) * (4 * (v[-1] + 1) + 2 * v[-1])


def _lstm(x: Any, w_in: Any, w_hidden: Any, *_: Any, **__: Any) -> int:
    """One direction of a layer: x [T, B, I] and the hidden state before each step, times the weights of four gates."""
    return 2 * math.prod(x[:2]) * (math.prod(w_in) + math.prod(w_hidden))


# torch counts these as nothing, or wrongly.
COUNTED: dict[Any, Any] = {
    **dict.fromkeys(
        operators("_scaled_dot_product_flash_attention_for_cpu"), lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    ),
    **dict.fromkeys(
        operators("_scaled_dot_product_flash_attention_for_cpu_backward"),
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
    ),
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *shapes, **_: 2 * _lstm(*shapes),  # gradients of both factors
    torch.ops.mnemos.linear_attention: _linear_attention,
    torch.ops.mnemos.linear_attention_compensated: _linear_attention,
    torch.ops.mnemos.linear_attention_backward: _linear_attention_backward,
}


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Inside, torch.nn's attention in eval mode is made of operations that can be seen."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Unpadded(TorchFunctionMode):
    """Computes fused attention without the zeros that its queries and keys were padded with, so counts the formula's.

    A caller may pad their width to that of the values, because the CPU's kernel needs equal widths; the zeros change no
    score. Only this counter knows: what it counts runs the same code as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what was padded with zeros, and how wide it was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and args[0] in self.before and args[1] in self.before:
            args = (*(x[..., : self.before[x]] for x in args[:2]), *args[2:])
        out = func(*args, **(kwargs or {}))
        if func is F.pad and len(args) == 2 and len(args[1]) == 2 and args[1][0] == 0 and not kwargs:
            self.before[out] = args[0].shape[-1]
        return out


def count_flops(function: Callable[[], object]) -> int:
    """What a call multiplies and adds in matrix products, convolutions and attention; a multiply-add counts 2.

    The call is made, once, with all that it does.
    """
    return sum(flops_by_operation(function).values())


def flops_by_operation(function: Callable[[], object]) -> dict[str, int]:
    """What `count_flops` counts, by the name of torch's operation: {"addmm": …, "bmm": …}."""
    with _Unpadded(), no_fast_path(), FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        function()
    return {str(name).rpartition(".")[2]: count for name, count in counter.get_flop_counts()["Global"].items()}


def forward_flops(model: nn.Module, inputs: Tensor, mask: Tensor | None = None, segment: int = 0) -> int:
    """FLOPs of `model(inputs, None, mask)`, without gradient, in the mode the model is in.

    segment: tokens [B, T] are read so many at a time, with the state handed on; 0: all at once.
    A copy of the model runs, and torch's random numbers stand where they stood: no cache, norm or draw is moved.
    """

    def forward() -> None:
        copied, state = copy.deepcopy(model), None
        for part in pieces([Batch(inputs, inputs, mask)], segment):
            state = copied(part.inputs, state, part.mask)[1]

    with torch.no_grad(), generators.kept():
        return count_flops(forward)


def step_flops(model: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> int:
    """FLOPs of `forward_flops`' forward with its backward: a training step but for the loss and the optimiser."""

    def step() -> None:
        copy.deepcopy(model)(inputs, None, mask)[0].float().sum().backward()

    with torch.enable_grad(), generators.kept():
        return count_flops(step)
