"""What the calls of the C++ kernels share (native.py, native_bidirectional.py): addresses, and which tensors fit.

The overhead of a small call is allocations and checks in Python. So a state that is None stays None down to the
kernels, which take null for zeros, nothing is allocated that nothing will read, and tensors are checked in one pass.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import dispatch_mode_active, literal, transformed
from mnemos.native import library, why_not

__all__ = [
    "address",
    "attend",
    "check",
    "dense",
    "eager",
    "eager_function",
    "loaded_kernels",
    "mask_address",
    "pointers",
    "results",
]

_PLAIN = (Tensor, torch.nn.Parameter)
# q, k, v, s, z, mask, kind, eps, and whether the denominators are wanted -> y, s_end, z_end and them (or None)
Forward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def loaded_kernels() -> ctypes.CDLL:
    """The kernels. Raises RuntimeError if there are none."""
    loaded = library()
    if loaded is None:
        raise RuntimeError(why_not())
    return loaded


def check(status: int) -> None:
    """Raise MemoryError if a kernel found no memory."""
    if status:
        raise MemoryError("linear_attention: not enough memory for its states; use fewer rows or a smaller head width")


def dense(x: Tensor) -> Tensor:
    """x with stride 1 in the last axis; the kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor) -> tuple[int, int, int, int]:
    """`struct Rows` of native/call.h for x [B, T, H, width]."""
    b, t, h, _ = x.stride()
    return x.data_ptr(), b, t, h


def mask_address(mask: Tensor | None) -> tuple[int, ...]:
    """The address and the strides of a mask [B, T]; zeros for None."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def results(q: Tensor, v: Tensor, kept: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Empty y, s and z after the call, and the denominators if they are `kept`."""
    (b, t, h, d), m, wide = q.shape, v.shape[-1], torch.float32
    den = v.new_empty(b, t, h, dtype=wide) if kept else None
    return v.new_empty(b, t, h, m), v.new_empty(b, h, d, m, dtype=wide), v.new_empty(b, h, d, dtype=wide), den


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses of contiguous tensors; 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def eager(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain and no compiler, tracer, transform or counter needs to see the operator."""
    if torch.compiler.is_compiling() or dispatch_mode_active():
        return False
    given = [x for x in tensors if x is not None]
    return all([type(x) in _PLAIN and literal(x) for x in given]) and not transformed(*given)  # a list: faster


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
