"""Memories that forget and correct: the delta rule and decayed attention. One recurrence, see README.md.

A backend is a module of this package, listed in `BACKENDS`, best first. Its functions:

    runs_here()                                      whether it can run on this machine; importing it must be cheap
    takes(q, k, v)                                   whether it can compute these tensors
    recurrence(q, k, v, beta, decay, s, scale)       the computation: y in v's dtype, and the state after the call
    why_not()             optional                   why it cannot run on this machine

`recurrence` gets checked tensors with any strides, and no mask or resets: invalid tokens have k = v = 0, beta = 0 and
decay = 0, and a token with a reset before it has the decay −∞. q, k [B, T, Hk, D] and v [B, T, H, M] have the caller's
dtypes; beta [B, T, H] (None: decayed attention), decay [B, T, H] or [B, T, H, D] (None: no decay) and s [B, H, D, M]
(None: zeros) are float32, or float64 if q, k or v is.

"auto" chooses the first backend that runs on this machine and takes the tensors.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, transformed
from mnemos.modes import reads_without_waiting
from mnemos.ops import choice
from mnemos.ops.checks import check_mask
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.rewind import note
from mnemos.types import InputError

from . import chunked, native, reference

__all__ = ["backends", "decayed_attention", "delta_rule", "which"]

BACKENDS: dict[str, ModuleType] = {"native": native, "chunked": chunked, "reference": reference}
KEY_EPS = 1e-6  # added to the squared length of a key by normalise_keys


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    normalise_keys: bool = False,
    resets: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The (gated) delta rule: a memory that forgets by `decay` and replaces what a key held. y, and the state after it.

        S' = e^{g_t} S_{t−1}     u_t = β_t (v_t − S'ᵀ k_t)     S_t = S' + k_t u_tᵀ     y_t = scale · S_tᵀ q_t

    decay None: DeltaNet (Yang et al. 2024). decay per head: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, eq. 10).
    decay per channel, e^{g_t} a diagonal matrix: KDA (Kimi Linear, 2025). A sequence may be split into calls anywhere.

    q, k [B, T, Hk, D], v [B, T, H, M], T ≥ 0; y [B, T, H, M] in v's dtype. Hk divides H: value head h has the query and
    key head h // (H / Hk), as transformers repeats them.
    beta [B, T, H], in 0 … 1, in some models up to 2. decay [B, T, H] or [B, T, H, D]: the natural logarithm of the
    factor, ≤ 0; −inf forgets all that is finite. None: no decay.
    state [B, H, D, M], never changed; gradients flow through it. None: zeros. It is returned in float32, or in float64
    if q, k or v is float64; one that is given in another floating dtype is converted to that first.
    mask [B, T] bool, True = valid: an invalid token leaves the state alone, whatever its q, k, v, beta and decay are;
    its y is 0.
    resets [B, T] bool: True sets the state to zeros before the token, also before an invalid one: the first tokens of
    packed sequences. It is a decay of −inf, so a state or token that is not finite reaches past it: 0·∞ is NaN.
    scale: None is D^-½. normalise_keys: k becomes k·rsqrt(Σk² + 1e-6); normalise q outside.
    backend: "auto", one of `mnemos.ops.backends("delta_rule")`, or "reference". float64 is computed by "chunked", in
    PyTorch's operations, which is several times slower than the kernels for float32.

    Keys: the state is bounded where 0 ≤ β‖k‖² ≤ 2, which β ≤ 2 and keys of length 1 ensure. Beyond it every token
    multiplies what the key reads by 1 − β‖k‖², so the state may grow exponentially until it is infinite. This is
    not refused: the result is what the equations say, as accurate as a loop over the tokens.

    Cost and kept memory: README.md. Differentiable once, but for backend "reference", and under `torch.func` and
    forward-mode AD, which use PyTorch's own operations. Raises InputError for shapes, dtypes, a valid token's decay
    above 0 or NaN (checked on a CPU) or a backend that do not fit.
    """
    if beta is None:
        raise InputError("expected a tensor beta [B, T, H], found None; use decayed_attention, or torch.ones")
    _check(q, k, v, {"beta": beta, "decay": decay}, state, mask, resets, scale)
    q, k = zero_invalid(q, mask), zero_invalid(k, mask)
    if normalise_keys:
        with full_precision(k.device.type):
            # The gradient of a single channel is 1e-6 of the two parts whose difference it is.
            wide = k.to(torch.float64 if k.shape[-1] == 1 and k.device.type == "cpu" else _wide(q, k, v))
            k = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_EPS)).to(_wide(q, k, v))
    return _recurrence(q, k, v, beta, decay, state, mask, scale, resets, backend)


def decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    resets: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Linear attention that forgets, without a normaliser. y, and the state after it.

        S_t = e^{g_t} S_{t−1} + k_t v_tᵀ     y_t = scale · S_tᵀ q_t

    RetNet (g constant per head), Mamba-2 (g = −e^A·softplus(dt), v·dt, scale 1), GLA (g per channel: decay
    [B, T, H, D]). decay None: no decay, the state is the sum. Arguments, results and errors as in `delta_rule`.
    """
    _check(q, k, v, {"decay": decay}, state, mask, resets, scale)
    q, k = zero_invalid(q, mask), zero_invalid(k, mask)
    return _recurrence(q, k, v, None, decay, state, mask, scale, resets, backend)


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    state: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    resets: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The mask and the resets as values, decays and betas, for the backend."""
    backend = choose(q, k, v, backend)
    chosen = BACKENDS[backend]
    if chosen is not reference and not torch.compiler.is_compiling() and (transformed() or forward_differentiated()):
        chosen = chunked
    wide = _wide(q, k, v)
    v = zero_invalid(v, mask)
    if decay is None and resets is not None:
        decay = v.new_zeros(v.shape[:3], dtype=wide)
    decay, beta, state = _as(wide, decay), _as(wide, beta), _as(wide, state)
    if decay is not None and (mask is not None or resets is not None):
        per_token = (slice(None), slice(None), *[None] * (decay.dim() - 2))
        if mask is not None:
            decay = decay.masked_fill(~mask[per_token], 0)
        _check_decay(decay)
        if resets is not None:
            decay = decay.masked_fill(resets[per_token], -torch.inf)
    elif decay is not None:
        _check_decay(decay)
    if beta is not None and mask is not None:
        beta = beta.masked_fill(~mask[..., None], 0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with full_precision(v.device.type):
        y, end = chosen.recurrence(q, k, v, beta, decay, state, scale)
    note((end,), v.shape[1], functools.partial(_again, (k, v, beta, decay), state, backend))
    return y, end


def _as(dtype: torch.dtype, x: Tensor | None) -> Tensor | None:
    """x in a dtype. For one token the conversions that do nothing would take as long as the kernel."""
    return x if x is None or x.dtype is dtype else x.to(dtype)


def _again(
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    state: Tensor | None,
    backend: str,
    n: int,
    valid: Tensor | None,
) -> tuple[Tensor]:
    """The state after the first n tokens of k, v, beta and decay; see `mnemos.ops.rewind.note`."""
    k, v, *gates = given
    beta, decay = (x if x is None else x[:, :n] for x in gates)
    k = zero_invalid(k[:, :n], valid)
    return (_recurrence(k, k, v[:, :n], beta, decay, state, valid, 1.0, None, backend)[1],)


def backends() -> list[str]:
    """The backends that can run on this machine, best first, without the slow "reference", which always can."""
    return choice.runnable(BACKENDS)


def which(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> str:
    """The backend that computes these tensors: the choice of "auto", or the named one.

    Raises InputError for a backend that does not exist, cannot run on this machine or does not take the tensors.
    """
    return choose(q, k, v, backend)


def choose(q: Tensor, k: Tensor, v: Tensor, backend: str) -> str:
    return choice.choose("delta_rule", BACKENDS, backend, (q, k, v))


def _wide(*tensors: Tensor) -> torch.dtype:
    for x in tensors:
        if x.dtype is torch.float64:
            return torch.float64
    return torch.float32


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor | None],
    state: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
    scale: float | None,
) -> None:
    given = [q, k, v, *[x for x in (*gates.values(), state, mask, resets) if x is not None]]
    if not all([isinstance(x, Tensor) for x in given]):  # lists: faster
        named = {"q": q, "k": k, "v": v, **gates, "state": state, "mask": mask, "resets": resets}
        found = ", ".join(f"{name} {type(x).__name__}" for name, x in named.items() if x is not None or name in "qkv")
        raise InputError(f"expected tensors, found {found}; use torch.as_tensor, a decay in full: [B, T, H]")
    if scale is not None and not isinstance(scale, int | float):
        raise InputError(f"expected a number or None as scale, found {scale!r}; None is D^-½")
    floating = q.is_floating_point() and k.is_floating_point() and v.is_floating_point()
    if not (floating and q.dim() == k.dim() == v.dim() == 4):
        found = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"expected floating q, k [B, T, Hk, D] and v [B, T, H, M], found {found}")
    (b, t, shared, d), (h, m) = q.shape, v.shape[2:]
    if k.shape != q.shape or v.shape[:2] != (b, t) or not shared or h % shared or not d:
        found = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        raise InputError(
            f"expected q, k [B, T, Hk, D] and v [B, T, H, M], H a multiple of Hk and D at least 1, found {found}; "
            "of [B, H, T, D] use transpose(1, 2)"
        )
    for name, x in gates.items():
        if x is None or (x.shape == (b, t, h) and x.is_floating_point()):
            continue
        shapes = [(b, t, h), (b, t, h, d)][: 2 if name == "decay" else 1]
        if x.shape not in shapes or not x.is_floating_point():
            wanted, shape = " or ".join(map(str, shapes)), tuple(x.shape)
            raise InputError(
                f"expected a floating {name} {wanted} for these q and v, found {x.dtype} {shape}; it has a number for "
                "each head of v: expand() it, and squeeze() axes of 1; of [B, heads, T, ..] use transpose(1, 2)"
            )
    if state is not None and (state.shape != (b, h, d, m) or not state.is_floating_point()):
        raise InputError(f"expected a floating state {(b, h, d, m)}, found {state.dtype} {tuple(state.shape)}")
    check_mask(mask, (b, t))
    if resets is not None and (resets.shape != (b, t) or resets.dtype != torch.bool):
        raise InputError(f"expected resets of booleans {(b, t)}, found {resets.dtype} {tuple(resets.shape)}")
    place = v.device
    if any([x.device != place for x in given]):
        where = ", ".join(str(x.device) for x in given)
        raise InputError(f"expected all tensors on one device, found {where}; move them with .to(device)")


def _check_decay(decay: Tensor) -> None:
    """Refuse a decay above 0 or NaN, where it can be read without waiting for it."""
    if decay.numel() and reads_without_waiting(decay):
        largest = decay.max().item()  # NaN if any is
        if not largest <= 0:
            advice = "see what it is computed from"
            if largest > 0:
                advice = "use factor.log(), at most 0 by .clamp(max=0), and see that beta comes before decay"
            raise InputError(f"expected a decay of at most 0, the logarithm of a factor, found {largest:.3g}; {advice}")
