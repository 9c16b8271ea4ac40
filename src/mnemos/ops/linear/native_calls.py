"""What the calls of the C++ kernels share (native.py, native_bidirectional.py): addresses, and which tensors fit."""

import ctypes

import torch
from torch import Tensor

from mnemos._compat import dispatch_mode_active, literal, transformed
from mnemos.native import library, why_not


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


def packed(x: Tensor) -> Tensor:
    """x with stride 1 in the last axis; the kernels take any other strides."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def address(x: Tensor) -> tuple[int, int, int, int]:
    """`struct Rows` of native/call.h for x [B, T, H, width]."""
    b, t, h, _ = x.stride()
    return x.data_ptr(), b, t, h


def mask_address(mask: Tensor | None) -> tuple[int, ...]:
    """The address and the strides of a mask [B, T]; zeros for None."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def eager(*tensors: Tensor | None) -> bool:
    """Whether the tensors are plain and no compiler, tracer, transform or counter needs to see the operator."""
    given = [x for x in tensors if x is not None]
    return (
        not torch.compiler.is_compiling()
        and not dispatch_mode_active()
        and all(type(x) in (Tensor, torch.nn.Parameter) and literal(x) for x in given)
        and not transformed(*given)
    )
