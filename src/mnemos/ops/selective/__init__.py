"""The selective scan of Mamba: a memory whose every number has a decay of its own. See README.md.

A backend computes run(x, dt, A, B, C, D, s, mask, resets) -> y in x's dtype, and the state after the call. It gets
checked tensors of any strides. x has the caller's dtype; all others but mask and resets are float32, or float64 if x,
dt, A, B or C is.
"""

import math

import torch
from torch import Tensor

from mnemos.errors import InputError
from mnemos.modes import reads_without_waiting
from mnemos.ops.backend import Backend, Backends
from mnemos.ops.kernel_call import why_no_kernels
from mnemos.ops.signature import Signature

from . import chunked, native

__all__ = ["BACKENDS", "selective_scan"]

BACKENDS = Backends(
    "selective_scan",
    Backend("native", native.scan, native.takes, why_no_kernels),
    Backend("chunked", chunked.scan),
)
CHECK = Signature(
    "selective_scan",
    "; of [B, C, T] use transpose(1, 2)",
    x="B T C",
    A="C N",
    dt="B T C",
    B="B T N",
    C="B T N",
    D="C ?",
    state="B C N ?",
    mask="B T bool ?",
    resets="B T bool ?",
)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    resets: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selective state space model of Mamba (Gu and Dao 2023, Algorithm 2): y, and the state after it.

        S_t = exp(dt_t A) ⊙ S_{t−1} + dt_t x_t B_t          y_t = C_t · S_t + D x_t

    per channel, whose state is a row of N numbers; B_t and C_t are shared by all channels. Every number of the state
    has a decay of its own, where `decayed_attention` has one per head or per key channel. A sequence may be split into
    calls anywhere.

    x, y [B, T, C], T ≥ 0. dt [B, T, C]: the steps, ≥ 0, after softplus. A [C, N], finite, ≤ 0: in Mamba −exp(A_log).
    B, C [B, T, N]. D [C]; None: no skip.
    state [B, C, N], never changed; gradients flow through it. None: zeros. It is returned in float32, or in float64 if
    x, dt, A, B or C is float64; one that is given in another floating dtype is converted to that first.
    mask [B, T] bool, True = valid. An invalid token does not change the state, even if its numbers are NaN; its y is 0.
    resets [B, T] bool: True sets the state to zeros before the token, also before an invalid one: the first tokens of
    packed sequences.
    backend: "auto", or one of `mnemos.ops.backends("selective_scan")`. float64 is computed by "chunked",
    in PyTorch's operations.

    Cost: O(B·T·C·N), with B·T·C·N exponentials, twice that with gradients; kept memory: README.md. Half precision is
    computed in float32, and y is rounded once. Differentiable once, and with all derivatives under `torch.func`
    and forward-mode AD, which use PyTorch's own operations. Raises InputError for shapes, dtypes, an A above 0 or of
    −∞, a valid token's dt below 0 or NaN in these (checked on a CPU) or a backend that do not fit.
    """
    sizes = CHECK(x=x, A=A, dt=dt, B=B, C=C, D=D, state=state, mask=mask, resets=resets)
    if not sizes["N"]:
        raise InputError(f"selective_scan: expected A [C, N] with N at least 1, found {list(A.shape)}")
    _check_exponents(dt, A, mask)
    run = BACKENDS.choose(backend, x, dt, A, B, C).run
    wide = torch.float64 if torch.float64 in (x.dtype, dt.dtype, A.dtype, B.dtype, C.dtype) else torch.float32
    numbers = [z if z is None else z.to(wide) for z in (dt, A, B, C, D, state)]
    return run(x, *numbers, mask, resets)


def _check_exponents(dt: Tensor, A: Tensor, mask: Tensor | None) -> None:
    """Refuse a valid dt below 0, an A above 0 and NaN, where they can be read without waiting for them."""
    if not reads_without_waiting(dt):
        return
    dt, A = dt.detach(), A.detach()
    least, largest = (x.item() for x in A.aminmax()) if A.numel() else (0.0, 0.0)  # NaN if any is
    if not (-math.inf < least and largest <= 0):
        advice = "use -A_log.exp()" if largest > 0 else "see what it is computed from"
        found = largest if not largest <= 0 else least
        raise InputError(f"expected a finite A of at most 0, the rate of a decay, found {found:.3g}; {advice}")
    if not dt.numel():
        return
    steps = dt.amin(-1)
    least = (steps if mask is None else steps.masked_fill(~mask, 0)).min().item()
    if not least >= 0:
        advice = "use softplus(dt)" if least < 0 else "see what it is computed from"
        raise InputError(f"expected steps dt of at least 0, found {least:.3g}; {advice}")
