"""Linear attention on the CPU, in C++ (mnemos/native): φ, sums and normaliser in one pass over the tokens.

Causal: the forward accumulates S over the tokens. The backward accumulates it again for dq, and R from the end for dk
and dv (the formulas of chunked.py). It keeps q, k, v, the first state and one denominator per token and head.
Not causal (any T and N): the forward sums S = Σ φ(k)·vᵀ over the keys and multiplies the queries with it. The backward
keeps q, k, v, the sums (which the forward returns as the new state) and the denominators.

Inputs have any strides and are float32, bfloat16 or float16; the sums are float32. The overhead of a small call is
allocations and checks in Python. So a state that is None stays None down to the kernels, which take null for zeros, and
nothing is allocated that nothing will read.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mnemos.native import codes
from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Kernel, Outputs, kernel_operator
from mnemos.ops.padding import zero_invalid

from . import chunked
from .feature_maps import FEATURE_MAPS, Pointwise

_FIELDS = "q:4 k:4 v:4 y:4 mask mask_b mask_t s z s_end z_end den g:4 dq:4 dk:4 dv:4 gs gz ds dz"
_CAUSAL = f"B T H D M type map threads {_FIELDS}"
_FORWARD, _BACKWARD = (Kernel("linear_attention", name, "Call", _CAUSAL) for name in ("forward", "backward"))
_BOTH_WAYS = Kernel("linear_attention", "bidirectional", "Everything", f"B T N H D M type map threads {_FIELDS}")


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32, bfloat16 or float16 on the CPU."""
    return q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES and v.device.type == "cpu" and v.shape[-1] > 0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s [B, H, D, M], z -> y, s, z.

    s and z may be None: zeros. Cost: O(B·(T + N)·H·D·M), on `torch.get_num_threads()` threads. If there are more
    threads than rows times heads, a causal sequence is divided among them too, which adds a third to half of the work.
    """
    code, wanted = codes.FEATURE_MAPS["identity"], v.dtype
    if phi is not None and FEATURE_MAPS.get(phi.name) is phi and phi.name in codes.FEATURE_MAPS:
        code = codes.FEATURE_MAPS[phi.name]
    elif phi is not None:
        q, k = phi(q), phi(zero_invalid(k, mask))
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    y, s_end, z_end = (_causal if causal else _bidirectional)(q, k, v, s, z, mask, code, eps)
    return y if y.dtype is wanted else y.to(wanted), s_end, z_end


def _sizes(causal: bool, q: Tensor, k: Tensor, v: Tensor, code: int) -> tuple[int, ...]:
    b, t, h, d = q.shape
    tokens = (b, t) if causal else (b, t, k.shape[1])
    return *tokens, h, d, v.shape[-1], TYPES[v.dtype], code, torch.get_num_threads()


def _allocate(keeps: bool, *inputs: Any) -> Outputs:
    """y, s and z after the call, and the denominators."""
    q, _, v, *_ = inputs
    (b, t, h, d), m, wide = q.shape, v.shape[-1], torch.float32
    den = v.new_empty(b, t, h, dtype=wide) if keeps else None
    return v.new_empty(b, t, h, m), v.new_empty(b, h, d, m, dtype=wide), v.new_empty(b, h, d, dtype=wide), den


def _forward(causal: bool, keeps: bool, *inputs: Any) -> Outputs:
    q, k, v, s, z, mask, code, eps = inputs
    y, s_end, z_end, den = outputs = _allocate(keeps, *inputs)
    values = *_sizes(causal, q, k, v, code), q, k, v, y, mask, s, z, s_end, z_end, den
    if causal:
        _FORWARD((), values, eps)
    else:
        _BOTH_WAYS((False,), values, eps)
    return outputs


def _backward(causal: bool, needs: Sequence[bool], *inputs: Any) -> Gradients:
    q, k, v, s, z, mask, code, eps, *saved, den, gy, gs, gz = inputs
    if saved:  # not causal: the sums of all keys
        s, z = saved
    b, t, h, d = q.shape
    m = v.shape[-1]
    gy = v.new_zeros(b, t, h, m) if gy is None else gy
    if (gs is None) != (gz is None):  # the kernels take both or none
        gs = den.new_zeros(b, h, d, m) if gs is None else gs
        gz = den.new_zeros(b, h, d) if gz is None else gz
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds, dz = (den.new_empty(b, h, d, m), den.new_empty(b, h, d)) if needs[3] or needs[4] else (None, None)
    read = *_sizes(causal, q, k, v, code), q, k, v, None, mask, s, z, None, None, den
    values = *read, gy, dq, dk, dv, gs, gz, ds, dz
    if causal:
        _BACKWARD((), values)
    else:
        _BOTH_WAYS((True,), values, eps)
    return dq, dk, dv, ds, dz


def _in_pytorch(causal: bool, *inputs: Any) -> tuple[Tensor, ...]:
    q, k, v, s, z, mask, code, eps = inputs
    maps: dict[int, Any] = {number: FEATURE_MAPS.get(name) for name, number in codes.FEATURE_MAPS.items()}
    return chunked.attend(q, k, v, s, z, mask, maps[code], eps, causal)


def _operator(name: str, causal: bool, saves: Sequence[int]) -> Any:
    return kernel_operator(
        name,
        "Tensor q, Tensor k, Tensor v, Tensor? s, Tensor? z, Tensor? mask, int code, float eps",
        _allocate,
        partial(_forward, causal),
        partial(_backward, causal),
        partial(_in_pytorch, causal),
        results=3,
        gradients=5,
        saves=saves,
        name_of=lambda inputs: "linear_attention",
    )


_causal = _operator("linear_attention", True, [3])
_bidirectional = _operator("linear_attention_bidirectional", False, [1, 2, 3])
