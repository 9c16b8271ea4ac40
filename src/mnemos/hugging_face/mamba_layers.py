"""Steps of the Mamba layers of Transformers: Mamba, FalconMamba and Jamba; Mamba-2, Bamba and others.

Their own code ignores the given state for several tokens (Mamba), lets the state decay at padding, and writes states in
place. The weights are theirs.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .functional_cache import FunctionalCache
from .layer_parts import convolved, memory_dtype, only_valid, rms
from .recurrences import CHUNK, decayed


class MambaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, C, N]; in Mamba-2 [B, H, N, D]. float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "state space"


def mamba(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """The selective state space model (Gu & Dao 2023, Algorithm 2), x [B, T, D] -> y [B, T, D].

    h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t u_t, y_t = C_t h_t + D u_t, of channels u after a convolution. FalconMamba and
    Jamba normalise Δ, B and C. Cost O(T·C·N), in a loop over tokens.
    """
    given = cache.take()
    inner, gate = layer.in_proj(x).chunk(2, -1)
    u, window = convolved(inner, given and given.window, layer.conv1d, cache)
    u = layer.act(u)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    rank, b, c = _normalised(layer, layer.x_proj(u).split(sizes, -1))
    wide = memory_dtype(x)
    step = only_valid(F.softplus(layer.dt_proj(rank).to(wide)), cache)
    a, u = -layer.A_log.to(wide).exp(), u.to(wide)
    h = u.new_zeros(len(x), u.shape[-1], sizes[1]) if given is None else given.memory.to(wide)
    outputs = []
    for dt, part, write, read in zip(*(z.split(CHUNK, 1) for z in (step, u, b.to(wide), c.to(wide))), strict=True):
        decay = (dt[..., None] * a).exp()
        new = (dt * part)[..., None] * write[:, :, None]
        for t in range(dt.shape[1]):
            h = decay[:, t] * h + new[:, t]
            outputs.append((h @ read[:, t, :, None])[..., 0])
    y = (torch.stack(outputs, 1) + u * layer.D) * F.silu(gate.to(wide))
    cache.new.append(MambaState(window, h))
    return layer.out_proj(y.to(x.dtype))


def _normalised(layer: Any, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Δ, B and C as the layer normalises them; FalconMamba's norms have no weight that counts."""
    if not hasattr(layer, "dt_layernorm"):
        return list(parts)
    norms = layer.dt_layernorm, layer.b_layernorm, layer.c_layernorm
    weighted = hasattr(norms[0], "variance_epsilon")
    return [
        rms(x, norm.variance_epsilon, norm.weight).to(x.dtype) if weighted else rms(x, norm.eps).to(x.dtype)
        for x, norm in zip(parts, norms, strict=True)
    ]


def mamba2(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """State space duality (Dao & Gu 2024): one decay per head and token. x [B, T, D] -> y [B, T, D]."""
    given = cache.take()
    gate, inner, step = layer.in_proj(x).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    inner, window = convolved(inner, given and given.window, layer.conv1d, cache)
    groups, n, wide = layer.n_groups, layer.ssm_state_size, memory_dtype(x)
    u, b, c = layer.act(inner).to(wide).split([layer.intermediate_size, groups * n, groups * n], -1)
    u = u.unflatten(-1, (layer.num_heads, -1))
    b, c = (z.unflatten(-1, (groups, n)).repeat_interleave(layer.num_heads // groups, 2) for z in (b, c))
    step = only_valid(F.softplus(step.to(wide) + layer.dt_bias).clamp(*layer.time_step_limit), cache)
    h = u.new_zeros(len(x), layer.num_heads, n, u.shape[-1]) if given is None else given.memory.to(wide)
    y, h = decayed(c, b, u * step[..., None], -step * layer.A_log.to(wide).exp(), h)
    y = (y + u * layer.D[:, None]).flatten(2) * F.silu(gate.to(wide))
    y = rms(y.unflatten(-1, (-1, layer.norm.group_size)), layer.norm.variance_epsilon).flatten(2) * layer.norm.weight
    cache.new.append(MambaState(window, h))
    return layer.out_proj(y.to(x.dtype))
