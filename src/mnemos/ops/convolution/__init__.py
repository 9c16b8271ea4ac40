"""Short causal convolutions along the tokens, one a channel, with a window that is the state. See README.md.

A backend is a module of this package, listed in `BACKENDS`, best first. Its functions:

    runs_here()                  whether it can run on this machine; importing it must be cheap
    takes(x, weight)             whether it can compute these tensors
    convolve(x, weight, bias, state, mask, resets, activation)     y and the state after the call, in x's dtype
    why_not()      optional      why it cannot run on this machine

`convolve` gets checked tensors with any strides. "auto" chooses the first backend that runs on this machine and takes
the tensors.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, transformed
from mnemos.ops import choice
from mnemos.ops.checks import check_mask
from mnemos.ops.precision import full_precision
from mnemos.ops.rewind import note
from mnemos.types import InputError

from . import chunked, native, reference

__all__ = ["backends", "short_convolution", "which"]

BACKENDS: dict[str, ModuleType] = {"native": native, "chunked": chunked, "reference": reference}
ACTIVATIONS = (None, "silu")


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    resets: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution over the last W valid tokens: y, and the state after it.

        y_t = a(bias + Σ_i weight[:, i] ⊙ x_{t − W + 1 + i})          i = 0 … W − 1, a the activation

    It is `torch.nn.Conv1d(C, C, W, groups=C, padding=W − 1)` without its last W − 1 outputs, and weight is that layer's
    `weight[:, 0]`. A sequence may be split into calls anywhere.

    x, y [B, T, C], T ≥ 0. weight [C, W], W ≥ 1. bias [C]. activation: None or "silu", z·σ(z).
    state [B, W − 1, C], the last W − 1 valid inputs, the latest one last, in x's dtype; never changed, and gradients
    flow through it. None: zeros, as the window is padded where a sequence starts.
    mask [B, T] bool, True = valid: an invalid token is not read, and its y is 0.
    resets [B, T] bool: True empties the window before the token, also before an invalid one: the first tokens of
    packed sequences.
    backend: "auto", one of `mnemos.ops.backends("short_convolution")`, or "reference".

    Half precision is computed in float32, and y is rounded once. Cost O(B·T·C·W) and kept memory: README.md. Raises
    InputError for shapes, dtypes, an activation or a backend that do not fit.
    """
    _check(x, weight, bias, state, mask, resets, activation)
    chosen = BACKENDS[choose(x, weight, backend)]
    if chosen is not reference and not torch.compiler.is_compiling() and (transformed() or forward_differentiated()):
        chosen = chunked
    state = state if state is None else state.to(x.dtype)
    with full_precision(x.device.type):
        y, end = chosen.convolve(x, weight, bias, state, mask, resets, activation)
    note((end,), x.shape[1], functools.partial(_again, x, weight, (state, mask, resets), backend))
    return y, end


def _again(
    x: Tensor,
    weight: Tensor,
    rest: tuple[Tensor | None, Tensor | None, Tensor | None],
    backend: str,
    n: int,
    valid: Tensor | None,
) -> tuple[Tensor]:
    """The window after the first n tokens; see `mnemos.ops.rewind.note`."""
    state, mask, resets = rest
    mask = valid if mask is None else mask[:, :n] if valid is None else mask[:, :n] & valid
    if resets is not None:
        resets = resets[:, :n] if valid is None else resets[:, :n] & valid  # one before an invalid token counts too
    return (short_convolution(x[:, :n], weight, None, state, mask, resets, None, backend)[1],)


def backends() -> list[str]:
    """The backends that can run on this machine, best first, without the slow "reference", which always can."""
    return choice.runnable(BACKENDS)


def which(x: Tensor, weight: Tensor, backend: str = "auto") -> str:
    """The backend that computes these tensors: the choice of "auto", or the named one.

    Raises InputError for a backend that does not exist, cannot run on this machine or does not take the tensors.
    """
    return choose(x, weight, backend)


def choose(x: Tensor, weight: Tensor, backend: str) -> str:
    return choice.choose("short_convolution", BACKENDS, backend, (x, weight))


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    activation: str | None,
) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise InputError(f"expected a floating x [B, T, C], found {x.dtype} {tuple(x.shape)}")
    b, t, c = x.shape
    if weight.dim() != 2 or weight.shape[0] != c or not weight.shape[1] or not weight.is_floating_point():
        raise InputError(
            f"expected a floating weight ({c}, W), W at least 1, for x {tuple(x.shape)}, found {weight.dtype} "
            f"{tuple(weight.shape)}; of a Conv1d it is weight[:, 0]"
        )
    for name, given, shape in (("bias", bias, (c,)), ("state", state, (b, weight.shape[1] - 1, c))):
        if given is not None and (given.shape != shape or not given.is_floating_point()):
            raise InputError(f"expected a floating {name} {shape}, found {given.dtype} {tuple(given.shape)}")
    check_mask(mask, (b, t))
    if resets is not None and (resets.shape != (b, t) or resets.dtype != torch.bool):
        raise InputError(f"expected resets of booleans {(b, t)}, found {resets.dtype} {tuple(resets.shape)}")
    if activation not in ACTIVATIONS:
        raise InputError(f"expected an activation of None or 'silu', found {activation!r}")
    given_tensors = [x for x in (x, weight, bias, state, mask, resets) if x is not None]
    if len({x.device for x in given_tensors}) > 1:
        where = ", ".join(str(x.device) for x in given_tensors)
        raise InputError(f"expected all tensors on one device, found {where}; move them with .to(device)")
