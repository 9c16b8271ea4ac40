"""The step of RecurrentGemma's recurrent blocks, whose own code keeps the state in the module."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_cache import FunctionalCache
from .layer_parts import convolved, memory_dtype, only_valid

_LEAST = 2.5e-7  # of 1 − a²: the derivative of its root is then at most 1000, as in the authors' code


class GriffinState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, C], float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "RG-LRU"


def recurrent_block(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, None]:
    """Griffin's recurrent block (De et al. 2024, §2.4), x [B, T, D] -> y [B, T, D], in a loop over tokens.

    h_t = a_t·h_{t−1} + √(1 − a_t²)·(i_t·u_t) with log a_t = −8·softplus(Λ)·r_t and gates i, r; the first token of a row
    is not scaled.
    """
    given, unit = cache.take(), layer.rg_lru
    u, window = convolved(layer.linear_x(x), given and given.window, layer.conv_1d, cache)
    heads = u.unflatten(-1, (unit.num_attention_heads, -1))
    wide = memory_dtype(x)
    enters = _gate(heads, unit.input_gate_weight, unit.input_gate_bias)
    decays = _gate(heads, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_a = -8.0 * decays.to(wide) * F.softplus(unit.recurrent_param.to(wide))
    first = (cache.positions == 0).to(x.device)[..., None]
    scale = torch.where(first, 1.0, (-torch.expm1(2 * log_a)).clamp(min=_LEAST).sqrt())
    a = only_valid(log_a, cache).exp()
    new = only_valid((u * enters).to(wide) * scale, cache)
    h = new.new_zeros(len(x), new.shape[-1]) if given is None else given.memory.to(wide)
    outputs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + new[:, t]
        outputs.append(h)
    cache.new.append(GriffinState(window, h))
    y = torch.stack(outputs, 1).to(x.dtype) * layer.act_fn(layer.linear_y(x))
    return layer.linear_out(y), None


def _gate(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """σ(W u + b), one matrix per head: [B, T, H, C] -> [B, T, H·C]."""
    return torch.sigmoid(torch.einsum("bthc,hcd->bthd", heads, weight) + bias).flatten(2)
