"""A token of a recurrent layer of Transformers, after others: one call of a kernel between its projections.

In decoding most of a layer's time is the overhead of some eighty operations of PyTorch on a few numbers.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.ops.linear.native import eager, loaded_kernels, pointers

from .functional_cache import FunctionalCache

CALL = struct.Struct("43q")  # `struct Token` of native/token.h
_NONE = (0, 0, 0)
_FLOAT = 4  # bytes


class Inputs(NamedTuple):
    """What a layer's projections give the kernel: rows of numbers as (address, stride of rows, stride of key heads)."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    z: tuple[int, int, int]
    a: tuple[int, int, int]
    b: tuple[int, int, int]
    sizes: tuple[int, int, int, int]  # key heads, value heads, widths of keys and of values
    first: tuple[int, int, int]  # channels of the convolution where q, k and v begin
    kept: tuple[Tensor, ...]  # what the addresses are of
    decay: Tensor | None = None  # its logarithm, if no other gate gives it
    beta: float = 1.0


def _rows(x: Tensor, heads: int) -> tuple[int, int, int]:
    """x [B, 1, N] without gaps, an equal part of the N numbers for each key head."""
    width = x.shape[-1]
    return x.data_ptr(), width, width // heads


def _together(layer: Any, x: Tensor) -> Inputs:
    """Qwen3-Next: all of a key head side by side."""
    heads, share = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    d, m = layer.head_k_dim, layer.head_v_dim
    inner, gates = layer.in_proj_qkvz(x), layer.in_proj_ba(x)
    (at, *strides), (gate, *spaces) = _rows(inner, heads), _rows(gates, heads)
    q, k, v, z = ((at + n * _FLOAT, *strides) for n in (0, d, 2 * d, 2 * d + share * m))
    b, a = (gate, *spaces), (gate + share * _FLOAT, *spaces)
    sizes, first = (heads, heads * share, d, m), (0, layer.key_dim, 2 * layer.key_dim)
    return Inputs(q, k, v, z, a, b, sizes, first, (inner, gates))  # type: ignore[arg-type]


def _apart(layer: Any, x: Tensor) -> Inputs:
    """Qwen3.5 and OLMo Hybrid."""
    heads, key_dim = layer.num_k_heads, layer.key_dim
    if hasattr(layer, "in_proj_qkv"):
        inner, z, b, a = (f(x) for f in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
        at, width = inner.data_ptr(), inner.shape[-1]
        d, m = layer.head_k_dim, layer.value_dim // heads
        q, k, v = (at, width, d), (at + key_dim * _FLOAT, width, d), (at + 2 * key_dim * _FLOAT, width, m)
        kept, beta = (inner, z, a, b), 1.0
    else:
        kept = tuple(f(x) for f in (layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.a_proj, layer.b_proj))
        q, k, v = (_rows(part, heads) for part in kept[:3])
        z, a, b = kept[3:]
        beta = 2.0 if layer.allow_neg_eigval else 1.0
    sizes = heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    gates = (_rows(part, heads) for part in (z, a, b))
    return Inputs(q, k, v, *gates, sizes, (0, key_dim, 2 * key_dim), kept, beta=beta)


def _channels(layer: Any, x: Tensor) -> Inputs:
    """Kimi Linear and its relatives: a decay per channel, from a module of its own."""
    heads, width, n = layer.num_heads, layer.head_dim, layer.qkv_dim
    gate = layer.g_proj(x) if hasattr(layer, "g_proj") else layer.g_b_proj(layer.g_a_proj(x))
    parts = tuple(f(x) for f in (layer.q_proj, layer.k_proj, layer.v_proj)) + (gate, layer.b_proj(x))
    q, k, v, z, b = (_rows(part, heads) for part in parts)
    decay = layer.forget_gate(x).contiguous()
    return Inputs(q, k, v, z, _NONE, b, (heads, heads, width, width), (0, n, 2 * n), parts, decay)


def _scalar(layer: Any, x: Tensor) -> Inputs:
    """Mamba-2: C, B and dt·x in place of queries, keys and values."""
    inner, groups, n, width = layer.in_proj(x), layer.n_groups, layer.ssm_state_size, layer.intermediate_size
    at, row = inner.data_ptr(), inner.shape[-1]
    share, first = layer.num_heads // groups, (width + groups * n, width, 0)
    v = at + width * _FLOAT, row, width // groups
    k, q = ((at + (width + i) * _FLOAT, row, n) for i in first[1::-1])
    a = at + (width + layer.conv_dim) * _FLOAT, row, share
    sizes = groups, layer.num_heads, n, layer.head_dim
    return Inputs(q, k, v, (at, row, 0), a, _NONE, sizes, first, (inner,))


Projections = Callable[[Any, Tensor], Inputs]
LAYERS: dict[str, Projections] = {
    "Qwen3NextGatedDeltaNet": _together,
    "Qwen3_5GatedDeltaNet": _apart,
    "Qwen3_5MoeGatedDeltaNet": _apart,
    "Qwen4ExpTextGatedDeltaNet": _apart,
    "LaraMiniGatedDeltaNet": _apart,
    "OlmoHybridGatedDeltaNet": _apart,
    "KimiLinearDeltaAttention": _channels,
    "Glm5NextTextLinearAttention": _channels,
    "BailingHybridDeltaAttention": _channels,
    "Mamba2Mixer": _scalar,
    "BambaMixer": _scalar,
    "GraniteMoeHybridMambaLayer": _scalar,
    "NemotronHMamba2Mixer": _scalar,
    "Zamba2MambaMixer": _scalar,
}


def read_token(layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor | None:
    """The layer's output [B, 1, D] for x [B, 1, D] after the tokens of the cache, whose states it writes.

    None: its forward has to run. That is so for the first tokens of a cache, with padding or gradients, and for other
    types than float32.
    """
    if mask is not None or x.dtype is not torch.float32 or torch.is_grad_enabled() or layer.activation != "silu":
        return None
    if cache is None or isinstance(cache, FunctionalCache) or cache.is_recording_past(layer.layer_idx):
        return None
    window, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    conv, scan = layer.conv1d, hasattr(layer, "ssm_state_size")
    norm = layer.norm if hasattr(layer, "norm") else layer.o_norm
    gate = "silu" if scan else norm.activation
    rate, shift = (layer.A_log, layer.dt_bias) if hasattr(layer, "A_log") else (None, None)
    weights = conv.weight, conv.bias, rate, shift, layer.D if scan else None, norm.weight
    if window is None or state is None or gate not in ("silu", "sigmoid") or hasattr(conv, "_hf_hook"):
        return None
    if not _read_by_kernel(window, state, *weights) or not eager(x, window, state, *weights):
        return None
    given = LAYERS[type(layer).__name__](layer, x)
    if not _read_by_kernel(*given.kept, given.decay):
        return None
    heads, values, d, m = given.sizes
    y = x.new_empty(len(x), 1, values * m)
    weight, bias, rate, shift, skip, scale = pointers(*weights)
    call = CALL.pack(
        len(x), heads, values, d, m, torch.get_num_threads(), scan, *given.q, *given.k, *given.v, *given.first,
        *window.shape[1:], conv.weight.shape[-1], window.data_ptr(), weight, bias, *given.a, *given.b,
        *pointers(given.decay), rate, shift, skip, *given.z, scale, gate == "sigmoid",
        norm.group_size if scan else 0, *pointers(state, y),
    )  # fmt: skip
    loaded = loaded_kernels()
    if loaded.mnemos_token(kernels.variant(loaded), call, given.beta, norm.variance_epsilon):
        raise MemoryError("fast: not enough memory for a token; use fewer rows")
    out: Tensor = (layer.out_proj if hasattr(layer, "out_proj") else layer.o_proj)(y)
    return out


def _read_by_kernel(*tensors: Tensor | None) -> bool:
    return all([x is None or (x.dtype is torch.float32 and x.is_contiguous()) for x in tensors])
