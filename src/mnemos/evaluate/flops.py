"""Floating-point operations of a call, counted, attention on the CPU included.

The convention: a multiply-add is 2 operations; matrix products, convolutions and attention are counted, elementwise
work, norms and softmax are not; fused causal attention counts as if nothing were masked, as torch counts it.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from mnemos.attention.softmax import as_written


def _product(_: Any, a: torch.Size, b: torch.Size, **__: Any) -> int:
    """x + a·b: a [.., n, k], b [.., k, m]."""
    return 2 * math.prod(a) * b[-1]


# torch counts these as nothing.
_UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
}


def count_flops(function: Callable[[], Any]) -> int:
    """What a call multiplies and adds in matrix products, convolutions and attention; a multiply-add counts 2.

    The call is made, once, with all that it does.
    """
    with as_written(), FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        function()
    return counter.get_total_flops()


def forward_flops(model: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> int:
    """FLOPs of `model(inputs, None, mask)`, without gradient, in the mode the model is in.

    A copy of the model runs, and torch's random numbers stand where they stood: no cache, norm or draw is moved.
    """
    with torch.no_grad(), torch.random.fork_rng():
        return count_flops(lambda: copy.deepcopy(model)(inputs, None, mask))


def step_flops(model: nn.Module, inputs: Tensor, mask: Tensor | None = None) -> int:
    """FLOPs of `forward_flops`' forward with its backward: a training step but for the loss and the optimiser."""

    def step() -> None:
        copy.deepcopy(model)(inputs, None, mask)[0].float().sum().backward()

    with torch.enable_grad(), torch.random.fork_rng():
        return count_flops(step)
