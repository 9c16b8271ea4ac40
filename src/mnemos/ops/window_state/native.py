"""A single token of attention with a window, sinks and a state: one call of a kernel that changes a ring's buffers.

In decoding, the time of such a layer is mostly the overhead of some fifty operations of PyTorch on a few numbers.
"""

import math
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos._compat import forward_differentiated
from mnemos.ops.kernel_call import can_skip_dispatcher, loaded_kernels, pointers, why_no_kernels
from mnemos.ops.linear.feature_maps import Hedgehog, elu

from .state import Far

if TYPE_CHECKING:
    from .ring import Ring

CALL = struct.Struct("28q")  # `struct WindowToken` of native/window.h
NO_STATE, EXPONENTIAL, HEDGEHOG = range(3)


def step(
    ring: "Ring", q: Tensor, k: Tensor, v: Tensor, far: Far | None, sink_q: Tensor, raw: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """y [B, H, 1, M] of a token, the ring's buffers are changed; None: PyTorch has to compute it, nothing is changed.

    q, sink_q and raw[0] [B, H, 1, D], k and raw[1] [B, Hk, 1, D], v [B, Hk, 1, M]. None where the kernels were not
    built, for float64, other devices than a CPU, other feature maps than `Hedgehog` and `elu`, gradients, shapes that
    PyTorch may broadcast or refuse, and where a compiler or tracer has to see the operations.
    """
    if ring.s.dtype is not torch.float32 or why_no_kernels():
        return None
    features: int = NO_STATE
    maps: tuple[Tensor | None, Tensor | None] = (None, None)
    if far is not None:
        if isinstance(far.query, Hedgehog) and isinstance(far.key, Hedgehog):
            features, maps = HEDGEHOG, (far.query.weight, far.key.weight)
        elif far.query is elu and far.key is elu:
            features = EXPONENTIAL
        else:
            return None
    (b, heads, _, d), (kv_heads, _, m), sinks, window = q.shape, v.shape[1:], ring.sizes.sinks, ring.sizes.window
    width, f = 0 if raw is None else d, 0 if far is None else ring.s.shape[2]
    gamma, beta = (None, None) if far is None else (far.gamma, far.beta)
    from_q, from_k = (q, k) if raw is None else raw
    few, many, value = (b, kv_heads, 1, d), (b, heads, 1, d), (b, kv_heads, 1, m)
    given = (
        (q, many), (sink_q, many), (k, few), (v, value), (from_q, many), (from_k, few), (maps[0], (heads, f // 2, d)),
        (maps[1], (kv_heads, f // 2, d)), (gamma, (heads,)), (beta, (kv_heads,)),
    )  # fmt: skip
    buffers = (
        (ring.keys, (b, kv_heads, window, d)), (ring.values, (b, kv_heads, sinks + window, m)),
        (ring.raw, (b, kv_heads, window, width)), (ring.s, (b, kv_heads, f, m)),
    )  # fmt: skip
    if any([x is not None and (x.shape != shape or not x.is_cpu) for x, shape in (*given, *buffers)]):
        return None
    if not _is_computed_here([x for x, _ in given]):
        return None
    floats = [x if x is None else x.to(torch.float32).contiguous() for x, _ in given]
    y = q.new_empty(b, heads, 1, m, dtype=torch.float32)
    call = CALL.pack(
        b, kv_heads, heads // kv_heads, d, m, f, window, sinks, ring.place,
        torch.get_num_threads(), features, *pointers(*floats), *pointers(ring.keys, ring.values),
        0 if raw is None else ring.raw.data_ptr(), *pointers(ring.s, ring.z, ring.sink_k, y),
    )  # fmt: skip
    kept = 1.0 if far is None else math.exp(far.decay)
    loaded = loaded_kernels()
    if loaded.mnemos_window(kernels.variant(loaded), call, ring.sizes.scale, ring.sizes.softcap or 0.0, kept):
        raise MemoryError("not enough memory for a token; use fewer rows")
    return y


def _is_computed_here(given: list[Tensor | None]) -> bool:
    """Whether no derivative, compiler, tracer or transform has to see the operations."""
    if torch.jit.is_tracing() or forward_differentiated():
        return False
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in given]):
        return False
    return can_skip_dispatcher(*given[:4])
