"""The selective scan of Mamba: a memory whose every number has a decay of its own. See README.md.

A backend is a module of this package, listed in `BACKENDS`, best first. Its functions:

    runs_here()                                     whether it can run on this machine; importing it must be cheap
    takes(x, dt, A, B, C)                           whether it can compute these tensors
    scan(x, dt, A, B, C, D, s, mask, resets)        y in x's dtype, and the state after the call
    why_not()      optional                         why it cannot run on this machine

`scan` gets checked tensors with any strides. x has the caller's dtype; all others but mask and resets are float32, or
float64 if x, dt, A, B or C is. "auto" chooses the first backend that runs on this machine and takes the tensors.
"""

import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, transformed
from mnemos.modes import reads_without_waiting
from mnemos.ops import choice
from mnemos.ops.checks import check_mask
from mnemos.ops.precision import full_precision
from mnemos.ops.rewind import note
from mnemos.types import InputError

from . import chunked, native, reference

__all__ = ["backends", "selective_scan", "which"]

BACKENDS: dict[str, ModuleType] = {"native": native, "chunked": chunked, "reference": reference}


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
    backend: "auto", one of `mnemos.ops.backends("selective_scan")`, or "reference". float64 is computed by "chunked",
    in PyTorch's operations.

    Cost: O(B·T·C·N), with B·T·C·N exponentials, twice that with gradients; kept memory: README.md. Half precision is
    computed in float32, and y is rounded once. Differentiable once, but for backend "reference", and under `torch.func`
    and forward-mode AD, which use PyTorch's own operations. Raises InputError for shapes, dtypes, an A above 0 or of
    −∞, a valid token's dt below 0 or NaN in these (checked on a CPU) or a backend that do not fit.
    """
    _check(x, dt, A, B, C, D, state, mask, resets)
    chosen = BACKENDS[choose(x, dt, A, B, C, backend)]
    if chosen is not reference and not torch.compiler.is_compiling() and (transformed() or forward_differentiated()):
        chosen = chunked
    _check_exponents(dt, A, mask)
    wide = torch.float64 if torch.float64 in (x.dtype, dt.dtype, A.dtype, B.dtype, C.dtype) else torch.float32
    dt, A, B, C = (z.to(wide) for z in (dt, A, B, C))
    D, state = (z if z is None else z.to(wide) for z in (D, state))
    with full_precision(x.device.type):
        y, end = chosen.scan(x, dt, A, B, C, D, state, mask, resets)
    note((end,), x.shape[1], functools.partial(_again, (x, dt, A, B), (state, mask, resets), backend))
    return y, end


def _again(
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    rest: tuple[Tensor | None, Tensor | None, Tensor | None],
    backend: str,
    n: int,
    valid: Tensor | None,
) -> tuple[Tensor]:
    """The state after the first n tokens; see `mnemos.ops.rewind.note`."""
    (x, dt, A, B), (state, mask, resets) = given, rest
    mask = valid if mask is None else mask[:, :n] if valid is None else mask[:, :n] & valid
    if resets is not None:
        resets = resets[:, :n] if valid is None else resets[:, :n] & valid  # one before an invalid token counts too
    write = B[:, :n]
    return (selective_scan(x[:, :n], dt[:, :n], A, write, write, None, state, mask, resets, backend)[1],)


def backends() -> list[str]:
    """The backends that can run on this machine, best first, without the slow "reference", which always can."""
    return choice.runnable(BACKENDS)


def which(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, backend: str = "auto") -> str:
    """The backend that computes these tensors: the choice of "auto", or the named one.

    Raises InputError for a backend that does not exist, cannot run on this machine or does not take the tensors.
    """
    return choose(x, dt, A, B, C, backend)


def choose(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, backend: str) -> str:
    return choice.choose("selective_scan", BACKENDS, backend, (x, dt, A, B, C))


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise InputError(f"expected a floating x [B, T, C], found {x.dtype} {tuple(x.shape)}")
    b, t, c = x.shape
    if A.dim() != 2 or A.shape[0] != c or not A.shape[1] or not A.is_floating_point():
        raise InputError(
            f"expected a floating A ({c}, N), N at least 1, for x {tuple(x.shape)}, found {A.dtype} {tuple(A.shape)}; "
            "x is [B, T, C]: of [B, C, T] use transpose(1, 2)"
        )
    n = A.shape[1]
    shapes = (
        ("dt", dt, (b, t, c)),
        ("B", B, (b, t, n)),
        ("C", C, (b, t, n)),
        ("D", D, (c,)),
        ("state", state, (b, c, n)),
    )
    for name, given, shape in shapes:
        if given is not None and (given.shape != shape or not given.is_floating_point()):
            raise InputError(
                f"expected a floating {name} {shape} for x {(b, t, c)} and A {(c, n)}, found {given.dtype} "
                f"{tuple(given.shape)}"
            )
    check_mask(mask, (b, t))
    if resets is not None and (resets.shape != (b, t) or resets.dtype != torch.bool):
        raise InputError(f"expected resets of booleans {(b, t)}, found {resets.dtype} {tuple(resets.shape)}")
    given_tensors = [z for z in (x, dt, A, B, C, D, state, mask, resets) if z is not None]
    if any([z.device != x.device for z in given_tensors]):
        where = ", ".join(str(z.device) for z in given_tensors)
        raise InputError(f"expected all tensors on one device, found {where}; move them with .to(device)")


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
