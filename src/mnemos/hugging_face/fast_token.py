"""A token of a recurrent layer of Transformers, after others: one call of a kernel between its projections.

In decoding most of a layer's time is the overhead of some eighty operations of PyTorch on a few numbers.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos._compat import is_plain
from mnemos.ops.kernel_call import PLAIN, can_skip_dispatcher, pointers
from mnemos.ops.precision import autocasts

# The fields of RECORD(Token, …) and RECORD(Norm, …) in native/decoder/token.h, which says what they are; compared with
# those when the kernels are loaded.
CALL = kernels.layout(
    "Token",
    "B heads H D M threads scan q:3 k:3 v:3 at_q at_k at_v C K W window weight bias a:3 b:3 decay rate shift skip "
    "z:3 norm sigmoid group s y",
)
NORM = kernels.layout("Norm", "rows n threads x weight y")
# Numbers of each row and key head, the `Part` of token.h: their address, and the strides of rows and of key heads.
Part = tuple[int, int, int]
_NONE = (0, 0, 0)
_FLOAT = 4  # bytes


class Inputs(NamedTuple):
    """What a layer's projections give the kernel."""

    q: Part
    k: Part
    v: Part
    z: Part  # of the output gate
    a: Part  # of the decay
    b: Part  # of β
    sizes: tuple[int, int, int, int]  # key heads, value heads, widths of keys and of values
    first_channels: tuple[int, int, int]  # of q, k and v in the convolution
    tensors: tuple[Tensor, ...]  # whose addresses they are
    decay: Tensor | None = None  # its logarithm, if no other gate gives it
    beta: float = 1.0


# --- the projections of each family, called as its own forward calls them ---


def qwen3_next(layer: Any, x: Tensor) -> Inputs:
    """All of a key head side by side: its q, k, v and z in one projection, its b and a in the other."""
    heads, share = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    d, m = layer.head_k_dim, layer.head_v_dim
    qkvz, ba = _call(layer.in_proj_qkvz, x), _call(layer.in_proj_ba, x)
    (address, *strides), (ba_address, *ba_strides) = _rows(qkvz, heads), _rows(ba, heads)
    q, k, v, z = ((address + offset * _FLOAT, *strides) for offset in (0, d, 2 * d, 2 * d + share * m))
    b, a = (ba_address, *ba_strides), (ba_address + share * _FLOAT, *ba_strides)
    sizes, first_channels = (heads, heads * share, d, m), (0, layer.key_dim, 2 * layer.key_dim)
    return Inputs(q, k, v, z, a, b, sizes, first_channels, (qkvz, ba))  # type: ignore[arg-type]


def qwen3_5(layer: Any, x: Tensor) -> Inputs:
    """Queries, keys and values together, and each gate apart."""
    projections = layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a
    qkv, z, b, a = [_call(projection, x) for projection in projections]
    heads, d = layer.num_k_heads, layer.head_k_dim
    address, row = qkv.data_ptr(), qkv.shape[-1]
    first_channels = _, at_k, at_v = 0, layer.key_dim, 2 * layer.key_dim
    q, k = (address, row, d), (address + at_k * _FLOAT, row, d)
    v = address + at_v * _FLOAT, row, layer.value_dim // heads
    sizes, tensors = (heads, layer.num_v_heads, d, layer.head_v_dim), (qkv, z, a, b)
    return Inputs(q, k, v, _rows(z, heads), _rows(a, heads), _rows(b, heads), sizes, first_channels, tensors)


def olmo_hybrid(layer: Any, x: Tensor) -> Inputs:
    """A projection for each."""
    projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.g_proj, layer.a_proj, layer.b_proj
    tensors = [_call(projection, x) for projection in projections]
    heads, first_channels = layer.num_k_heads, (0, layer.key_dim, 2 * layer.key_dim)
    q, k, v, z, a, b = [_rows(tensor, heads) for tensor in tensors]
    sizes, beta = (heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), 2.0 if layer.allow_neg_eigval else 1.0
    return Inputs(q, k, v, z, a, b, sizes, first_channels, tuple(tensors), beta=beta)


def kimi_linear(layer: Any, x: Tensor) -> Inputs:
    """A decay per channel, from a module of its own."""
    return _with_channels(layer, x, _call(layer.g_b_proj, layer.g_a_proj(x)))


def bailing_hybrid(layer: Any, x: Tensor) -> Inputs:
    """Kimi Linear with another output gate."""
    return _with_channels(layer, x, _call(layer.g_proj, x))


def _with_channels(layer: Any, x: Tensor, output_gate: Tensor) -> Inputs:
    heads, width = layer.num_heads, layer.head_dim
    projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.b_proj
    tensors = *[_call(projection, x) for projection in projections], output_gate
    q, k, v, b, z = [_rows(tensor, heads) for tensor in tensors]
    decay = _call(layer.forget_gate, x)
    sizes, first_channels = (heads, heads, width, width), (0, layer.qkv_dim, 2 * layer.qkv_dim)
    return Inputs(q, k, v, z, _NONE, b, sizes, first_channels, (*tensors, decay), decay)


def mamba2(layer: Any, x: Tensor) -> Inputs:
    """C, B and dt·x in place of queries, keys and values. A row has z, then x, B and C (the convolution's), and dt."""
    zxbcdt, groups, n, width = _call(layer.in_proj, x), layer.n_groups, layer.ssm_state_size, layer.intermediate_size
    address, row = zxbcdt.data_ptr(), zxbcdt.shape[-1]
    convolved = address + width * _FLOAT
    first_channels = at_q, at_k, _ = width + groups * n, width, 0
    q, k = (convolved + at_q * _FLOAT, row, n), (convolved + at_k * _FLOAT, row, n)
    v, z = (convolved, row, width // groups), (address, row, 0)
    a = convolved + layer.conv_dim * _FLOAT, row, layer.num_heads // groups
    sizes = groups, layer.num_heads, n, layer.head_dim
    return Inputs(q, k, v, z, a, _NONE, sizes, first_channels, (zxbcdt,))


def _call(module: Any, x: Tensor) -> Tensor:
    """What the module returns, as the kernel reads it: hooks and adapters may give other types and strides."""
    y: Tensor = module(x)
    return y if _kernel_can_read(y) else y.to(x).contiguous()


def _rows(x: Tensor, heads: int) -> Part:
    """x [B, 1, N] without gaps, an equal share of the N numbers for each key head."""
    width = x.shape[-1]
    return x.data_ptr(), width, width // heads


class LayerNames(NamedTuple):
    """How the layers of a class are read: their inputs, the names of the norm and of the last projection, the gates."""

    inputs: Callable[[Any, Tensor], Inputs]
    norm: str = "norm"
    output: str = "out_proj"
    gates: tuple[str, ...] = ("A_log", "dt_bias")
    scan: bool = False  # Mamba-2


_MAMBA2 = LayerNames(mamba2, gates=("A_log", "dt_bias", "D"), scan=True)
_KIMI = LayerNames(kimi_linear, "o_norm", "o_proj", ())
LAYERS = {
    "Qwen3NextGatedDeltaNet": LayerNames(qwen3_next),
    "Qwen3_5GatedDeltaNet": LayerNames(qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": LayerNames(qwen3_5),
    "Qwen4ExpTextGatedDeltaNet": LayerNames(qwen3_5),
    "LaraMiniGatedDeltaNet": LayerNames(qwen3_5),
    "OlmoHybridGatedDeltaNet": LayerNames(olmo_hybrid, "o_norm", "o_proj"),
    "KimiLinearDeltaAttention": _KIMI,
    "Glm5NextTextLinearAttention": _KIMI,
    "BailingHybridDeltaAttention": _KIMI._replace(inputs=bailing_hybrid),
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
}


def compute_token(names: LayerNames, layer: Any, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor | None:
    """The layer's output [B, 1, D] for x [B, 1, D] after the tokens of the cache, whose states it writes.

    None: its forward has to run. That is so for the first tokens of a cache, with padding, gradients or autocast, for
    other types than float32, and where a call of the norm would be more than the class's own forward.
    """
    # --- whether the kernel may compute it ---
    if x.dtype is not torch.float32 or torch.is_grad_enabled() or layer.activation != "silu" or autocasts("cpu"):
        return None
    if mask is not None and not mask.all():
        return None
    # Assisted generation lets caches of Transformers record their past, which has to stay as it is.
    if cache is None or cache.is_recording_past(layer.layer_idx):
        return None
    window, state = cache.get_conv_state(layer.layer_idx), cache.get_recurrent_state(layer.layer_idx)
    if window is None or state is None or not can_skip_dispatcher(x):
        return None
    # Transformers reads the convolution's weights, too, and calls accelerate's hooks for that. `vars`: `hasattr` of a
    # module is slow where there is no such attribute.
    conv, norm = layer.conv1d, getattr(layer, names.norm)
    if not (is_plain(norm) and is_untouched(type(norm))) or "_hf_hook" in vars(conv):
        return None
    activation = "silu" if names.scan else norm.activation
    weights = conv.weight, conv.bias, norm.weight, *[getattr(layer, name) for name in names.gates]
    taps = weights[0].shape[-1]
    if (
        activation not in ("silu", "sigmoid")
        or not _kernel_can_read(window, state, *weights)
        or window.shape[-1] < taps
    ):
        return None

    # --- projections; from here on every module is called once, as without `fast` ---
    inputs = names.inputs(layer, x)

    # --- sizes: where they do not fit, the forward calls the modules again, and Transformers tells what is wrong ---
    heads, value_heads, d, m = inputs.sizes
    channels = 2 * heads * d + value_heads * m
    norm_size = m * (value_heads if names.scan else 1)
    weight_sizes = channels * taps, channels, norm_size, *[value_heads] * len(names.gates)
    gates = 1 if names.scan else 2 if inputs.decay is None else 1 + d  # of a value head: a; a and b; b and d decays
    row = channels + value_heads * (m + gates)  # q, k and v; z and the gates
    if (
        window.shape[:2] != (len(x), channels)
        or state.numel() != len(x) * value_heads * d * m
        # Lists: quicker than generators here.
        or any([w is not None and w.numel() != n for w, n in zip(weights, weight_sizes, strict=True)])
        or sum([tensor.numel() for tensor in inputs.tensors]) != len(x) * row
    ):
        return None

    # --- convolution, recurrence, norm and gate ---
    y = x.new_empty(len(x), 1, value_heads * m)
    weight, bias, norm_weight, *gate_weights = pointers(*weights)
    call = CALL.pack(
        len(x), heads, value_heads, d, m, torch.get_num_threads(), names.scan, *inputs.q, *inputs.k, *inputs.v,
        *inputs.first_channels, *window.shape[1:], taps, window.data_ptr(), weight, bias, *inputs.a, *inputs.b,
        *pointers(inputs.decay), *gate_weights, *_NONE[len(gate_weights) :], *inputs.z, norm_weight,
        activation == "sigmoid", norm.group_size if names.scan else 0, *pointers(state, y),
    )  # fmt: skip
    loaded, instructions = kernels.load_kernels()
    if loaded.mnemos_token(instructions, call, inputs.beta, norm.variance_epsilon):
        raise MemoryError("fast: not enough memory for a token; use fewer rows")
    out: Tensor = getattr(layer, names.output)(y)
    return out


# --- RMS norms ---

# Of Transformers, those whose forwards the others repeat: their models, and what each adds to its weight.
_NORMS = ("llama", "LlamaRMSNorm", 0.0), ("olmo2", "Olmo2RMSNorm", 0.0), ("gemma", "GemmaRMSNorm", 1.0)


def norm_offset(cls: type) -> float | None:
    """What the RMS norms of this class add to their weight; None: a class with another forward, or another class."""
    if not (cls.__name__.endswith("RMSNorm") and is_untouched(cls)):
        return None
    for model, name, offset in _NORMS:
        norm = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
        if all(_instructions(cls, method) == _instructions(norm, method) for method in ("forward", "_norm")):
            return offset
    return None


def _instructions(cls: type, method: str) -> tuple[Any, ...] | None:
    """What a method does, whatever its line numbers, annotations and names of local variables are."""
    code = getattr(getattr(cls, method, None), "__code__", None)
    return None if code is None else (code.co_code, code.co_consts, code.co_names)


def normalise(norm: Any, x: Tensor, offset: float) -> Tensor | None:
    """x/√(mean x² + ε)·(offset + weight) along the last axis; None: the norm's forward has to run."""
    weight = norm.weight
    if (
        torch.is_grad_enabled()
        or not _kernel_can_read(weight)
        or x.dtype is not torch.float32
        or not can_skip_dispatcher(x)
    ):
        return None
    x, n = x.contiguous(), x.shape[-1]
    if weight.numel() != n:
        return None
    y = torch.empty_like(x)
    call = NORM.pack(x.numel() // max(n, 1), n, torch.get_num_threads(), *pointers(x, weight, y))
    loaded, instructions = kernels.load_kernels()
    eps = norm.variance_epsilon if offset == 0 else norm.eps  # the two families name it so
    loaded.mnemos_norm(instructions, call, offset, eps)
    return y


def is_untouched(cls: Any) -> bool:
    """Whether a class and its forward are those of Transformers: other code may have set another forward."""
    module: str = cls.__module__
    return module.startswith("transformers.models.") and cls.forward.__module__ == module


def _kernel_can_read(*tensors: Tensor | None) -> bool:
    # A loop, and `is_cpu` in place of `device`: this is asked of some fifteen tensors a token and layer.
    for x in tensors:
        if x is None:
            continue
        if not (x.dtype is torch.float32 and x.is_cpu and x.is_contiguous() and type(x) in PLAIN):
            return False
    return True
