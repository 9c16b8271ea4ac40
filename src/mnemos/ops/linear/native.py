"""Linear attention on the CPU, in C++ (mnemos/native): φ, sums and normaliser in one pass over the tokens.

`causal`: the forward accumulates S over the tokens. The backward accumulates it again for dq, and R from the end for dk
and dv (the formulas of chunked.py). It keeps q, k, v, the first state and one denominator per token and head.
`everything` (causal=False, any T and N): the forward sums S = Σ φ(k)·vᵀ over the keys and multiplies the queries with
it. The backward keeps q, k, v, the sums (which the forward returns as the new state) and the denominators.

Inputs have any strides and are float32, bfloat16 or float16; the sums are float32. The overhead of a small call is
allocations and checks in Python. So a state that is None stays None down to the kernels, which take null for zeros,
nothing is allocated that nothing will read, and tensors are checked in one pass.
"""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native import why_not
from mnemos.native.codes import TYPES
from mnemos.ops.kernel_call import address, dense, eager, loaded_kernels, mask_address, pointers, runs_here

from .feature_maps import Pointwise
from .operators import Gradients, keep, prepare, register

__all__ = ["FROM_NOTHING", "causal", "everything", "runs_here", "takes", "token", "why_not"]

CALL = struct.Struct("52q")  # `struct Call` of native/call.h
EVERYTHING = struct.Struct("53q")  # `struct Everything` of native/bidirectional.h
_NO_Y, _NO_ENDS, _NO_BACKWARD = (0,) * 4, (0,) * 2, (0,) * 20  # fields that a call leaves empty
# q, k, v, s, z, mask, kind, eps, and whether the denominators are wanted -> y, s_end, z_end and them (or None)
Forward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32, bfloat16 or float16 on the CPU."""
    return q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES and v.device.type == "cpu" and v.shape[-1] > 0


def check(status: int) -> None:
    """Raise MemoryError if a kernel found no memory."""
    if status:
        raise MemoryError("linear_attention: not enough memory for its states; use fewer rows or a smaller head width")


def allocate_results(q: Tensor, v: Tensor, kept: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Empty y, s and z after the call, and the denominators if they are `kept`."""
    (b, t, h, d), m, wide = q.shape, v.shape[-1], torch.float32
    den = v.new_empty(b, t, h, dtype=wide) if kept else None
    return v.new_empty(b, t, h, m), v.new_empty(b, h, d, m, dtype=wide), v.new_empty(b, h, d, dtype=wide), den


def attend(
    forward: Forward, function: Any, operator: Any, tensors: tuple[Tensor | None, ...], kind: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y and the state after the call, in the cheapest way that the tensors q, k, v, s, z, mask allow.

    Plain tensors go to the kernel directly (`forward`), or where a gradient may be wanted by `function`, which
    `eager_function` made; others by the dispatcher (`operator`). s and z may be None: zeros.
    """
    if not eager(*tensors):
        q, k, v, s, z, mask = tensors
        start = _nothing(k, v) if s is None else (s, z)  # type: ignore[arg-type]
        y, s, z, _ = operator(q, k, v, *start, mask, kind, eps)
        return y, s, z
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors]):
        found: tuple[Tensor, Tensor, Tensor] = function(*tensors, kind, eps)
        return found
    return forward(*tensors, kind, eps, False)[:3]


def _nothing(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """s and z of zeros: one expanded number."""
    b, _, h, d = k.shape
    zero = v.new_zeros((), dtype=torch.float32)
    return zero.expand(b, h, d, v.shape[-1]), zero.expand(b, h, d)


def eager_function(forward: Forward, backward: Callable[..., Any], operator: str, after: bool = False) -> Any:
    """The operator without the dispatcher, whose overhead is the time of a hundred tokens, for autograd.

    It takes q, k, v, s, z, mask, kind, eps and returns y, s_end, z_end. backward: of the operator of that name plus
    "_backward", with a further argument for whether the gradients of s and z are wanted. after: it needs the state
    after the call in place of that before. The saved tensors were checked before the forward, so the backward checks
    incoming gradients alone.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
            q, k, v, s, z, mask, ctx.kind, _ = inputs
            y, s_end, z_end, den = forward(*inputs, True)
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, *((s_end, z_end) if after else (s, z)), mask, den)
            return y, s_end, z_end

        @staticmethod
        def backward(ctx: Any, gy: Any, gs: Any, gz: Any) -> tuple[Tensor | None, ...]:
            q, k, v, s, z, mask, den = ctx.saved_tensors
            starts = any(ctx.needs_input_grad[3:5])
            direct = not torch.is_grad_enabled() and eager(gy, gs, gz)
            if gy is None:
                gy = v.new_zeros(*q.shape[:3], v.shape[-1])
            if not direct or (gs is None) != (gz is None):  # the operator takes no None, the kernel two or none
                zeros = _nothing(k, v)
                s, z, gs, gz = (n if x is None else x for x, n in zip((s, z, gs, gz), (*zeros, *zeros), strict=True))
            if direct:
                found = backward(q, k, v, s, z, mask, ctx.kind, den, gy, gs, gz, starts)
            else:
                found = getattr(torch.ops.mnemos, operator)(q, k, v, s, z, mask, ctx.kind, den, gy, gs, gz)
            return *found[:3], *(found[3:] if starts else (None, None)), None, None, None

    return Eager


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    s and z may be None: zeros. Cost: O(B·T·H·D·M), on `torch.get_num_threads()` threads. If there are more threads than
    rows times heads, the sequence is divided among them too, which adds a third to a half of the work.
    """
    (q, k, v, kind), wanted = prepare(q, k, v, mask, phi), v.dtype
    operator = torch.ops.mnemos.linear_attention
    y, s_end, z_end = attend(_kernel, _EAGER, operator, (q, k, v, s, z, mask), kind, eps)
    return y if y.dtype is wanted else y.to(wanted), s_end, z_end


FROM_NOTHING = ("causal", "token", "everything")
token = causal  # the kernel has a faster path for a single token


def _sizes(q: Tensor, v: Tensor, kind: int) -> tuple[int, ...]:
    return *q.shape, v.shape[-1], TYPES[v.dtype], kind, torch.get_num_threads()


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    kind: int,
    eps: float,
    kept: bool = True,
) -> tuple[Any, ...]:
    """y, the new s and z, and the denominators if they are `kept`."""
    q, k, v = dense(q), dense(k), dense(v)
    y, s_end, z_end, den = allocate_results(q, v, kept)
    s, z = (x if x is None else x.contiguous() for x in (s, z))
    call = CALL.pack(
        *_sizes(q, v, kind), *address(q), *address(k), *address(v), *address(y), *mask_address(mask),
        *pointers(s, z, s_end, z_end, den), *_NO_BACKWARD,
    )  # fmt: skip
    loaded = loaded_kernels()
    check(loaded.mnemos_forward(kernels.variant(loaded), call, eps))
    return y, s_end, z_end, den


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    kind: int,
    den: Tensor,
    gy: Tensor,
    gs: Tensor | None,
    gz: Tensor | None,
    starts: bool = True,
) -> tuple[Any, ...]:
    """The gradients; s and z, and gs and gz, may be None: zeros. starts: whether those of s and z are wanted."""
    q, k, v, gy, den = dense(q), dense(k), dense(v), dense(gy), den.contiguous()
    b, t, h, d = q.shape
    m = v.shape[-1]
    dq, dk, dv = q.new_empty(b, t, h, d), k.new_empty(b, t, h, d), v.new_empty(b, t, h, m)
    ds, dz = (den.new_empty(b, h, d, m), den.new_empty(b, h, d)) if starts else (None, None)
    s, z, gs, gz = (x if x is None else x.contiguous() for x in (s, z, gs, gz))
    call = CALL.pack(
        *_sizes(q, v, kind), *address(q), *address(k), *address(v), *_NO_Y, *mask_address(mask),
        *pointers(s, z), *_NO_ENDS, den.data_ptr(), *address(gy), *address(dq), *address(dk), *address(dv),
        *pointers(gs, gz, ds, dz),
    )  # fmt: skip
    loaded = loaded_kernels()
    check(loaded.mnemos_backward(kernels.variant(loaded), call))
    return dq, dk, dv, ds, dz


def _derivative(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return _backward(*inputs) if direct else torch.ops.mnemos.linear_attention_backward(*inputs)


_EAGER = eager_function(_kernel, _backward, "linear_attention_backward").apply


def _denominators(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> Tensor:
    return s.new_empty(q.shape[:3])


register("linear_attention", _kernel, _backward, _denominators, _derivative)


def everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s, z -> y, s, z.

    s and z may be None: zeros. Cost: 2·(T + N)·B·H·D·M operations, 4·(T + N)·B·H·D·M for the backward, on
    `torch.get_num_threads()` threads.
    """
    (q, k, v, kind), wanted = prepare(q, k, v, mask, phi), v.dtype
    operator = torch.ops.mnemos.linear_attention_bidirectional
    y, s_end, z_end = attend(_kernel_everything, _EAGER_EVERYTHING, operator, (q, k, v, s, z, mask), kind, eps)
    return y if y.dtype is wanted else y.to(wanted), s_end, z_end


def _call_everything(backward: bool, eps: float, *words: int) -> None:
    loaded = loaded_kernels()
    check(loaded.mnemos_bidirectional(kernels.variant(loaded), backward, EVERYTHING.pack(*words), eps))


def _sizes_everything(q: Tensor, k: Tensor, v: Tensor, kind: int) -> tuple[int, ...]:
    (b, t, h, d), n, m = q.shape, k.shape[1], v.shape[-1]
    return b, t, n, h, d, m, TYPES[v.dtype], kind, torch.get_num_threads()


def _kernel_everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    kind: int,
    eps: float,
    kept: bool = True,
) -> tuple[Any, ...]:
    """y, the new s and z, and the denominators if they are `kept`."""
    q, k, v = dense(q), dense(k), dense(v)
    y, s_end, z_end, den = allocate_results(q, v, kept)
    s, z = (x if x is None else x.contiguous() for x in (s, z))
    sums = pointers(s, z, s_end, z_end, den)
    rows = *address(q), *address(k), *address(v), *address(y)
    _call_everything(False, eps, *_sizes_everything(q, k, v, kind), *rows, *mask_address(mask), *sums, *_NO_BACKWARD)
    return y, s_end, z_end, den


def _backward_everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_end: Tensor,
    z_end: Tensor,
    mask: Tensor | None,
    kind: int,
    den: Tensor,
    gy: Tensor,
    gs: Tensor | None,
    gz: Tensor | None,
    starts: bool = True,
) -> tuple[Any, ...]:
    """The gradients; gs and gz may be None: zeros. starts: whether those of the first state are wanted."""
    q, k, v, gy = dense(q), dense(k), dense(v), dense(gy)
    s_end, z_end, den = s_end.contiguous(), z_end.contiguous(), den.contiguous()
    dq, dk, dv = q.new_empty(*q.shape), k.new_empty(*k.shape), v.new_empty(*v.shape)
    ds, dz = (s_end.new_empty(*s_end.shape), z_end.new_empty(*z_end.shape)) if starts else (None, None)
    gs, gz = (x if x is None else x.contiguous() for x in (gs, gz))
    sums = pointers(s_end, z_end, None, None, den)
    rows = *address(q), *address(k), *address(v), *_NO_Y
    found = *address(gy), *address(dq), *address(dk), *address(dv)
    _call_everything(
        True,
        0.0,
        *_sizes_everything(q, k, v, kind),
        *rows,
        *mask_address(mask),
        *sums,
        *found,
        *pointers(gs, gz, ds, dz),
    )
    return dq, dk, dv, ds, dz


def _derivative_everything(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return (
        _backward_everything(*inputs) if direct else torch.ops.mnemos.linear_attention_bidirectional_backward(*inputs)
    )


def _keep_everything(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Like `keep`, with the new state in the place of the given one: the backward needs S and z of all keys."""
    q, k, v, _, _, *rest = inputs
    keep(ctx, (q, k, v, *output[1:3], *rest), output)


_EAGER_EVERYTHING = eager_function(
    _kernel_everything, _backward_everything, "linear_attention_bidirectional_backward", after=True
).apply


register(
    "linear_attention_bidirectional",
    _kernel_everything,
    _backward_everything,
    _denominators,
    _derivative_everything,
    setup=_keep_everything,
)
