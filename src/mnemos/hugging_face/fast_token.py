"""A token of a recurrent layer of Transformers, after others: one call of a kernel between its projections.

In decoding most of a layer's time is the overhead of some eighty operations of PyTorch on a few numbers.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.ops.kernel_call import PLAIN, eager, loaded_kernels, pointers
from mnemos.ops.precision import autocasts

from .functional_cache import FunctionalCache
from .recurrent_layers import is_theirs

CALL = struct.Struct("43q")  # `struct Token` of native/token.h
NORM = struct.Struct("6q")  # `struct Norm` there
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


def _call(module: Any, x: Tensor) -> Tensor:
    """What the module returns, as the kernel reads it: hooks and adapters may give other types and strides."""
    y: Tensor = module(x)
    return y if _read_by_kernel(y) else y.to(x).contiguous()


def _rows(x: Tensor, heads: int) -> tuple[int, int, int]:
    """x [B, 1, N] without gaps, an equal part of the N numbers for each key head."""
    width = x.shape[-1]
    return x.data_ptr(), width, width // heads


def _together(layer: Any, x: Tensor) -> Inputs:
    """Qwen3-Next: all of a key head side by side."""
    heads, share = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    d, m = layer.head_k_dim, layer.head_v_dim
    inner, gates = _call(layer.in_proj_qkvz, x), _call(layer.in_proj_ba, x)
    (at, *strides), (gate, *spaces) = _rows(inner, heads), _rows(gates, heads)
    q, k, v, z = ((at + n * _FLOAT, *strides) for n in (0, d, 2 * d, 2 * d + share * m))
    b, a = (gate, *spaces), (gate + share * _FLOAT, *spaces)
    sizes, first = (heads, heads * share, d, m), (0, layer.key_dim, 2 * layer.key_dim)
    return Inputs(q, k, v, z, a, b, sizes, first, (inner, gates))  # type: ignore[arg-type]


def _apart(layer: Any, x: Tensor) -> Inputs:
    """Qwen3.5 and others: queries, keys and values together, and each gate apart."""
    parts = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
    inner, z, b, a = [_call(part, x) for part in parts]
    heads, d, n = layer.num_k_heads, layer.head_k_dim, layer.key_dim
    at, width = inner.data_ptr(), inner.shape[-1]
    q, k, v = (at, width, d), (at + n * _FLOAT, width, d), (at + 2 * n * _FLOAT, width, layer.value_dim // heads)
    sizes, kept = (heads, layer.num_v_heads, d, layer.head_v_dim), (inner, z, a, b)
    return Inputs(q, k, v, _rows(z, heads), _rows(a, heads), _rows(b, heads), sizes, (0, n, 2 * n), kept)


def _each(layer: Any, x: Tensor) -> Inputs:
    """OLMo Hybrid: a projection for each."""
    projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.a_proj, layer.b_proj
    parts = [_call(projection, x) for projection in projections]
    heads, n = layer.num_k_heads, layer.key_dim
    q, k, v, z, a, b = [_rows(part, heads) for part in parts]
    sizes, beta = (heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), 2.0 if layer.allow_neg_eigval else 1.0
    return Inputs(q, k, v, z, a, b, sizes, (0, n, 2 * n), tuple(parts), beta=beta)


def _channels(layer: Any, x: Tensor) -> Inputs:
    """Kimi Linear: a decay per channel, from a module of its own."""
    return _with_gate(layer, x, _call(layer.g_b_proj, layer.g_a_proj(x)))


def _whole_gate(layer: Any, x: Tensor) -> Inputs:
    """Bailing Hybrid: Kimi Linear with another output gate."""
    return _with_gate(layer, x, _call(layer.g_proj, x))


def _with_gate(layer: Any, x: Tensor, gate: Tensor) -> Inputs:
    heads, width, n = layer.num_heads, layer.head_dim, layer.qkv_dim
    projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj
    kept = *[_call(projection, x) for projection in projections], gate
    q, k, v, b, z = [_rows(part, heads) for part in kept]
    decay = _call(layer.forget_gate, x)
    return Inputs(q, k, v, z, _NONE, b, (heads, heads, width, width), (0, n, 2 * n), (*kept, decay), decay)


def _scalar(layer: Any, x: Tensor) -> Inputs:
    """Mamba-2: C, B and dt·x in place of queries, keys and values."""
    inner, groups, n, width = _call(layer.in_proj, x), layer.n_groups, layer.ssm_state_size, layer.intermediate_size
    at, row = inner.data_ptr(), inner.shape[-1]
    share, first = layer.num_heads // groups, (width + groups * n, width, 0)
    v = at + width * _FLOAT, row, width // groups
    k, q = ((at + (width + i) * _FLOAT, row, n) for i in first[1::-1])
    a = at + (width + layer.conv_dim) * _FLOAT, row, share
    sizes = groups, layer.num_heads, n, layer.head_dim
    return Inputs(q, k, v, (at, row, 0), a, _NONE, sizes, first, (inner,))


class Kind(NamedTuple):
    """How the layers of a class are read: their inputs, the names of the norm and of the last projection, the gates."""

    inputs: Callable[[Any, Tensor], Inputs]
    norm: str = "norm"
    output: str = "out_proj"
    gates: tuple[str, ...] = ("A_log", "dt_bias")
    scan: bool = False  # Mamba-2


_SCALAR = Kind(_scalar, gates=("A_log", "dt_bias", "D"), scan=True)
_CHANNELS = Kind(_channels, "o_norm", "o_proj", ())
LAYERS = {
    "Qwen3NextGatedDeltaNet": Kind(_together),
    "Qwen3_5GatedDeltaNet": Kind(_apart),
    "Qwen3_5MoeGatedDeltaNet": Kind(_apart),
    "Qwen4ExpTextGatedDeltaNet": Kind(_apart),
    "LaraMiniGatedDeltaNet": Kind(_apart),
    "OlmoHybridGatedDeltaNet": Kind(_each, "o_norm", "o_proj"),
    "KimiLinearDeltaAttention": _CHANNELS,
    "Glm5NextTextLinearAttention": _CHANNELS,
    "BailingHybridDeltaAttention": _CHANNELS._replace(inputs=_whole_gate),
    "Mamba2Mixer": _SCALAR,
    "BambaMixer": _SCALAR,
    "GraniteMoeHybridMambaLayer": _SCALAR,
    "NemotronHMamba2Mixer": _SCALAR,
    "Zamba2MambaMixer": _SCALAR,
}


def read_token(kind: Kind, layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor | None:
    """The layer's output [B, 1, D] for x [B, 1, D] after the tokens of the cache, whose states it writes.

    None: its forward has to run. That is so for the first tokens of a cache, with padding, gradients or autocast, for
    other types than float32, and where a call of the norm would be more than the class's own forward.
    """
    # `hasattr` of a module is slow where there is no such attribute.
    if x.dtype is not torch.float32 or torch.is_grad_enabled() or layer.activation != "silu" or autocasts("cpu"):
        return None
    if mask is not None and not mask.all():
        return None
    if cache is None or isinstance(cache, FunctionalCache) or cache.is_recording_past(layer.layer_idx):
        return None
    window, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    if window is None or state is None or not eager(x):
        return None
    # Transformers reads the convolution's weights, too, and calls accelerate's hooks for that.
    conv, norm = layer.conv1d, getattr(layer, kind.norm)
    if not is_theirs(norm) or "_hf_hook" in vars(conv):
        return None
    gate = "silu" if kind.scan else norm.activation
    weights = conv.weight, conv.bias, norm.weight, *[getattr(layer, name) for name in kind.gates]
    taps = weights[0].shape[-1]
    if gate not in ("silu", "sigmoid") or not _read_by_kernel(window, state, *weights) or window.shape[-1] < taps:
        return None
    # From here on every module is called once, as without `fast`; twice only if sizes do not fit, before the error.
    given = kind.inputs(layer, x)
    heads, values, d, m = given.sizes
    channels = 2 * heads * d + values * m
    sizes = channels * taps, channels, m * (values if kind.scan else 1), *[values] * len(kind.gates)
    inputs = channels + values * (m + (1 if kind.scan else 2 if given.decay is None else 1 + d))
    if (
        window.shape[:2] != (len(x), channels)
        or state.numel() != len(x) * values * d * m
        or any([w is not None and w.numel() != n for w, n in zip(weights, sizes, strict=True)])
        or sum([part.numel() for part in given.kept]) != len(x) * inputs
    ):
        return None  # Transformers tells what does not fit
    y = x.new_empty(len(x), 1, values * m)
    weight, bias, scale, *gates = pointers(*weights)
    call = CALL.pack(
        len(x), heads, values, d, m, torch.get_num_threads(), kind.scan, *given.q, *given.k, *given.v, *given.first,
        *window.shape[1:], taps, window.data_ptr(), weight, bias, *given.a, *given.b, *pointers(given.decay), *gates,
        *_NONE[len(gates) :], *given.z, scale, gate == "sigmoid", norm.group_size if kind.scan else 0,
        *pointers(state, y),
    )  # fmt: skip
    loaded = loaded_kernels()
    if loaded.mnemos_token(kernels.variant(loaded), call, given.beta, norm.variance_epsilon):
        raise MemoryError("fast: not enough memory for a token; use fewer rows")
    out: Tensor = getattr(layer, kind.output)(y)
    return out


# RMS norms of Transformers: what is added to the weight.
NORMS = dict.fromkeys(("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm"), 1.0)
NORMS |= dict.fromkeys(
    (
        "LaraMiniRMSNorm", "OlmoHybridRMSNorm", "KimiLinearRMSNorm", "Glm5NextTextRMSNorm", "BailingHybridRMSNorm",
        "Mamba2RMSNorm", "BambaRMSNorm", "FalconH1RMSNorm", "GraniteMoeHybridRMSNorm", "NemotronHRMSNorm",
        "Zamba2RMSNorm", "Lfm2RMSNorm", "Lfm3RMSNorm",
    ),
    0.0,
)  # fmt: skip


def normalise(norm: Any, x: Tensor, offset: float) -> Tensor | None:
    """x/√(mean x² + ε)·(offset + weight) along the last axis; None: the norm's forward has to run."""
    weight = norm.weight
    if torch.is_grad_enabled() or not _read_by_kernel(weight) or x.dtype is not torch.float32 or not eager(x):
        return None
    x, n = x.contiguous(), x.shape[-1]
    if weight.numel() != n:
        return None
    y = torch.empty_like(x)
    call = NORM.pack(x.numel() // max(n, 1), n, torch.get_num_threads(), *pointers(x, weight, y))
    loaded = loaded_kernels()
    eps = norm.variance_epsilon if offset == 0 else norm.eps
    loaded.mnemos_norm(kernels.variant(loaded), call, offset, eps)
    return y


def _read_by_kernel(*tensors: Tensor | None) -> bool:
    # A loop, and `is_cpu` in place of `device`: this is asked of some fifteen tensors a token and layer.
    for x in tensors:
        if x is None:
            continue
        if not (x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and type(x) in PLAIN):
            return False
    return True
