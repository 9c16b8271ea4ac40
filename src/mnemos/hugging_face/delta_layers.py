"""The step of Qwen3-Next's layers of linear attention: the gated delta rule after a convolution."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_cache import FunctionalCache
from .layer_parts import convolved, memory_dtype, only_valid, rms
from .recurrences import delta


class DeltaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, H, D, M], float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "gated delta"


def gated_delta(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024), x [B, T, D] -> y [B, T, D]; keys and queries of length 1."""
    given = cache.take()
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    q, k, v, gate, strength, rate = parts
    joined, window = convolved(
        torch.cat([z.flatten(2) for z in (q, k, v)], -1), given and given.window, layer.conv1d, cache
    )
    wide, heads = memory_dtype(x), layer.num_v_heads
    q, k, v = F.silu(joined).to(wide).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (_unit(z.unflatten(-1, (layer.num_k_heads, -1))) for z in (q, k))
    q, k = (z.repeat_interleave(heads // layer.num_k_heads, 2) for z in (q * q.shape[-1] ** -0.5, k))
    v = v.unflatten(-1, (heads, -1))
    decay = -layer.A_log.to(wide).exp() * F.softplus(rate.to(wide) + layer.dt_bias)
    s = v.new_zeros(len(x), heads, q.shape[-1], v.shape[-1]) if given is None else given.memory.to(wide)
    y, s = delta(q, k, v, only_valid(decay, cache), only_valid(strength.sigmoid(), cache), s)
    cache.new.append(DeltaState(window, s))
    y = rms(y, layer.norm.variance_epsilon, layer.norm.weight) * F.silu(gate.to(wide))
    return layer.out_proj(y.flatten(2).to(x.dtype))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
