"""The step of linear attention in Qwen3-Next, Qwen3.5 and OLMo Hybrid: the gated delta rule after a convolution."""

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
    inner, gate, strength, rate = _projected(layer, x)
    inner, window = convolved(inner, given and given.window, layer.conv1d, cache)
    wide, heads = memory_dtype(x), layer.num_v_heads
    q, k, v = F.silu(inner).to(wide).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (_unit(z.unflatten(-1, (layer.num_k_heads, -1))) for z in (q, k))
    q, k = (z.repeat_interleave(heads // layer.num_k_heads, 2) for z in (q * q.shape[-1] ** -0.5, k))
    v = v.unflatten(-1, (heads, -1))
    decay = -layer.A_log.to(wide).exp() * F.softplus(rate.to(wide) + layer.dt_bias)
    s = v.new_zeros(len(x), heads, q.shape[-1], v.shape[-1]) if given is None else given.memory.to(wide)
    y, s = delta(q, k, v, only_valid(decay, cache), only_valid(strength, cache), s)
    cache.new.append(DeltaState(window, s))
    norm, output = (layer.o_norm, layer.o_proj) if hasattr(layer, "o_norm") else (layer.norm, layer.out_proj)
    y = rms(y, norm.variance_epsilon, norm.weight) * F.silu(gate.to(wide))
    return output(y.flatten(2).to(x.dtype))


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as one tensor; the output gate [B, T, H, M]; β and the decay's logits [B, T, H]."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        q, k, v, gate, beta, rate = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        return torch.cat([z.flatten(2) for z in (q, k, v)], -1), gate, beta.sigmoid(), rate
    if hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        inner, gate, beta, rate = (p(x) for p in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
        beta = beta.sigmoid()
    else:  # OLMo Hybrid, where β may be up to 2
        inner = torch.cat([p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
        gate, rate = layer.g_proj(x), layer.a_proj(x)
        beta = layer.b_proj(x).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    return inner, gate.unflatten(-1, (layer.num_v_heads, -1)), beta, rate


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
