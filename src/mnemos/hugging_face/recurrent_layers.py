"""The recurrent layers of Transformers whose step is known: Mamba, Mamba-2 and gated delta rules.

Their own code writes states in place, lets padding change them, and in part ignores the given state for several tokens.
Here each layer is a step from a state to a state, with their weights. `add_steps` makes a layer's forward that step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos._compat import is_plain
from mnemos.attention.recurrent import l2_normalize
from mnemos.libraries import loaded_weights
from mnemos.ops import decayed_attention, delta_rule, selective_scan, short_convolution

from .fast_token import is_untouched
from .functional_cache import FunctionalCache


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
    Jamba normalise Δ, B and C. Cost O(T·C·N).
    """
    given = cache.take(MambaState)
    inner, gate = layer.in_proj(x).chunk(2, -1)
    u, window = convolve(layer, inner, given and given.window, cache)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    rank, b, c = _normalise(layer, layer.x_proj(u).split(sizes, -1))
    wide = memory_dtype(x)
    step, a = F.softplus(_project_step(layer.dt_proj, rank).to(wide)), -layer.A_log.to(wide).exp()
    y, h = selective_scan(u.to(wide), step, a, b, c, layer.D, given and given.memory, valid_tokens(x, cache))
    cache.new.append(MambaState(window, h))
    return layer.out_proj((y * F.silu(gate.to(wide))).to(x.dtype))


def _normalise(layer: Any, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Δ, B and C as the layer normalises them; FalconMamba's norms have no weight that counts."""
    if not hasattr(layer, "dt_layernorm"):
        return list(parts)
    norms = layer.dt_layernorm, layer.b_layernorm, layer.c_layernorm
    weighted = hasattr(norms[0], "variance_epsilon")
    found = []
    for x, norm in zip(parts, norms, strict=True):
        if not is_theirs(norm):
            found.append(norm(x))
        else:
            found.append((rms(x, norm.variance_epsilon, norm.weight) if weighted else rms(x, norm.eps)).to(x.dtype))
    return found


def _project_step(projection: Any, x: Tensor) -> Tensor:
    """The logits of Δ. Transformers reads these weights, too: what is around the module has no part in it."""
    with loaded_weights(projection):
        weight, bias = projection.weight, projection.bias
    quantised = not isinstance(weight, Tensor) or not weight.is_floating_point()
    return projection(x) if quantised else F.linear(x, weight, bias)


def mamba2(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """State space duality (Dao & Gu 2024): one decay per head and token. x [B, T, D] -> y [B, T, D]."""
    given = cache.take(MambaState)
    gate, inner, step = layer.in_proj(x).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    inner, window = convolve(layer, inner, given and given.window, cache)
    groups, n, wide = layer.n_groups, layer.ssm_state_size, memory_dtype(x)
    u, b, c = inner.to(wide).split([layer.intermediate_size, groups * n, groups * n], -1)
    u = u.unflatten(-1, (layer.num_heads, -1))
    b, c = (z.unflatten(-1, (groups, n)) for z in (b, c))
    step = F.softplus(step.to(wide) + layer.dt_bias).clamp(*layer.time_step_limit)
    h, decay = given and given.memory.to(wide), -step * layer.A_log.to(wide).exp()
    y, h = decayed_attention(c, b, u * step[..., None], decay, h, valid_tokens(x, cache), scale=1.0)
    y, norm = torch.addcmul(y, u, layer.D[:, None].to(wide)).flatten(2), layer.norm
    if is_theirs(norm):
        y = (y * F.silu(gate.to(wide))).unflatten(-1, (-1, norm.group_size))
        y = rms(y, norm.variance_epsilon).flatten(2) * norm.weight
    else:
        y = norm(y, gate)
    cache.new.append(MambaState(window, h))
    return layer.out_proj(y.to(x.dtype))


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
    given = cache.take(DeltaState)
    inner, gate, strength, rate = _project_delta(layer, x)
    inner, window = convolve(layer, inner, given and given.window, cache)
    wide = memory_dtype(x)
    q, k, v = inner.to(wide).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (l2_normalize(z.unflatten(-1, (layer.num_k_heads, -1))) for z in (q, k))
    v = v.unflatten(-1, (layer.num_v_heads, -1))
    decay = -layer.A_log.to(wide).exp() * F.softplus(rate.to(wide) + layer.dt_bias)
    s = given and given.memory.to(wide)
    y, s = delta_rule(q, k, v, strength, decay, s, valid_tokens(x, cache))
    cache.new.append(DeltaState(window, s))
    norm, output = (layer.o_norm, layer.o_proj) if hasattr(layer, "o_norm") else (layer.norm, layer.out_proj)
    y = rms(y, norm.variance_epsilon, norm.weight) * F.silu(gate.to(wide)) if is_theirs(norm) else norm(y, gate)
    return output(y.flatten(2).to(x.dtype))


def _project_delta(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def memory_dtype(x: Tensor) -> torch.dtype:
    """float32 at least: half precision does not hold a long sum."""
    return torch.promote_types(x.dtype, torch.float32)


def convolve(layer: Any, x: Tensor, window: Tensor | None, cache: FunctionalCache) -> tuple[Tensor, Tensor]:
    """A layer's depthwise causal convolution of x [B, T, C] and the last K − 1 inputs, which are the next window.

    window [B, K − 1, C]: zeros in new rows; None: a first call. As in Transformers, nobody calls the convolution.
    """
    window = window if window is None else window.to(x.dtype)
    activation = "silu" if layer.activation == "silu" else None
    with loaded_weights(layer.conv1d):
        weight, bias = layer.conv1d.weight[:, 0], layer.conv1d.bias
    y, window = short_convolution(x, weight, bias, window, valid_tokens(x, cache), activation=activation)
    if activation is None:
        from transformers.activations import ACT2FN

        y = ACT2FN[layer.activation](y)
    return y, window


def is_theirs(norm: Any) -> bool:
    """Whether a call of a layer's norm is what Transformers computes there, and nothing else."""
    return is_plain(norm) and is_untouched(type(norm))


def valid_tokens(x: Tensor, cache: FunctionalCache) -> Tensor | None:
    """[B, T] bool: which tokens of the call are no padding; None: all."""
    return None if cache.valid is None else cache.valid.to(x.device)


def rms(x: Tensor, eps: float, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x / √(mean x² + ε) over the last axis, times a weight; computed in `dtype`, by default memory's type."""
    wide = x.to(dtype or memory_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


Step = Callable[..., Any]  # (layer, cache, its input x) -> what the layer's forward returns
STEPS: dict[str, Step] = {
    "MambaMixer": mamba,
    "FalconMambaMixer": mamba,
    "JambaMambaMixer": mamba,
    "Mamba2Mixer": mamba2,
    "BambaMixer": mamba2,
    "GraniteMoeHybridMambaLayer": mamba2,
    "NemotronHMamba2Mixer": mamba2,
    "Zamba2MambaMixer": mamba2,
    "Qwen3NextGatedDeltaNet": gated_delta,
    "Qwen3_5GatedDeltaNet": gated_delta,
    "Qwen3_5MoeGatedDeltaNet": gated_delta,
    "OlmoHybridGatedDeltaNet": gated_delta,
}


def add_steps(model: nn.Module) -> None:
    """Let the recurrent layers of a model run the step of `STEPS` when they are called with a `FunctionalCache`.

    With any other cache, and with none, a layer runs its own forward. The forward of the class is wrapped, once per
    process: instances stay as they are, so copies, pickles, hooks and threads need no care. The layers' own forwards
    cannot serve, whatever their arguments: they change states in place, and padding changes the states.
    """
    for kind in {of for layer in model.modules() for of in type(layer).__mro__}:
        if kind.__name__ in STEPS and kind.__module__.startswith("transformers.") and "_functional" not in vars(kind):
            _dispatch(kind, STEPS[kind.__name__])


def _dispatch(kind: Any, step: Step) -> None:
    theirs = kind.forward

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        cache = next((x for x in (*args, *options.values()) if isinstance(x, FunctionalCache)), None)
        if cache is None:
            return theirs(self, *args, **options)
        return step(self, cache, args[0] if args else options["hidden_states"])

    kind.forward, kind._functional = forward, True
