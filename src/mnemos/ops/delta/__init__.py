"""Memories that forget and correct: the delta rule and decayed attention. One recurrence, see README.md.

Read `_recurrence` here, then chunked.py (PyTorch) and native.py (C++); reference.py has the equations.

A backend computes run(q, k, v, beta, decay, s, scale) -> y in v's dtype, and the state after the call. It gets checked
tensors of any strides, with mask and resets already in the values: an invalid token has q = k = v = beta = decay = 0,
and a token with a reset before it has the decay −∞. q, k [B, T, Hk, D] and v [B, T, H, M] have the caller's dtypes;
beta [B, T, H] (None: decayed attention), decay [B, T, H] or [B, T, H, D] (None: no decay) and s [B, H, D, M] (None:
zeros) are float32, or float64 if q, k or v is.
"""

import torch
from torch import Tensor

from mnemos.errors import InputError
from mnemos.modes import reads_without_waiting
from mnemos.ops.backend import Backend, Backends
from mnemos.ops.kernel_call import why_no_kernels
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.signature import Signature

from . import chunked, native

__all__ = ["BACKENDS", "decayed_attention", "delta_rule"]

BACKENDS = Backends(
    "delta_rule",
    Backend("native", native.recurrence, native.takes, why_no_kernels),
    Backend("chunked", chunked.recurrence),
)
TENSORS = {
    "advice": "; H is a multiple of K, beta and decay have a number for each of the H heads; of [B, H, T, D] use "
    "transpose(1, 2)",
    "q": "B T K D",
    "k": "B T K D",
    "v": "B T H M",
    "beta": "B T H",
    "decay": "B T H | B T H D ?",
    "state": "B H D M ?",
    "mask": "B T bool ?",
    "resets": "B T bool ?",
}
CHECK_DELTA, CHECK_DECAYED = Signature("delta_rule", **TENSORS), Signature("decayed_attention", **TENSORS)
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
    if q, k or v is float64; one in another floating dtype is converted to that first.
    mask [B, T] bool, True = valid: an invalid token leaves the state alone, whatever its q, k, v, beta and decay are;
    its y is 0.
    resets [B, T] bool: True sets the state to zeros before the token, also before an invalid one: the first tokens of
    packed sequences. It is a decay of −inf, so a state or token that is not finite reaches past it: 0·∞ is NaN.
    scale: None is D^-½. normalise_keys: k becomes k·rsqrt(Σk² + 1e-6); normalise q outside.
    backend: "auto", or one of `mnemos.ops.backends("delta_rule")`. float64 is computed by "chunked", in
    PyTorch's operations, which is several times slower than the kernels for float32.

    Keys: the state is bounded where 0 ≤ β‖k‖² ≤ 2, which β ≤ 2 and keys of length 1 ensure. Beyond it every token
    multiplies what the key reads by 1 − β‖k‖², so the state may grow exponentially until it is infinite. This is
    not refused: the result is what the equations say, as accurate as a loop over the tokens.

    Cost and kept memory: README.md. Differentiable once, and with all derivatives under `torch.func` and
    forward-mode AD, which use PyTorch's own operations. Raises InputError for shapes, dtypes, a valid token's decay
    above 0 or NaN (checked on a CPU) or a backend that do not fit.
    """
    if beta is None:
        raise InputError("delta_rule: expected beta [B, T, H], found None; use decayed_attention, or torch.ones")
    sizes = CHECK_DELTA(q=q, k=k, v=v, beta=beta, decay=decay, state=state, mask=mask, resets=resets)
    if normalise_keys:
        with full_precision(k.device.type):
            # The gradient of a single channel is 1e-6 of the two parts whose difference it is.
            k = zero_invalid(k, mask)
            wide = k.to(torch.float64 if k.shape[-1] == 1 and k.device.type == "cpu" else _wide(q, k, v))
            k = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + KEY_EPS)).to(_wide(q, k, v))
    return _recurrence(sizes, q, k, v, beta, decay, state, mask, scale, resets, backend)


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
    sizes = CHECK_DECAYED(q=q, k=k, v=v, decay=decay, state=state, mask=mask, resets=resets)
    return _recurrence(sizes, q, k, v, None, decay, state, mask, scale, resets, backend)


def _recurrence(
    sizes: dict[str, int],
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
    """Either operator on checked tensors: mask and resets become values, then the backend runs."""
    d, shared, h = sizes["D"], sizes["K"], sizes["H"]
    if not d or not shared or h % shared:
        raise InputError(f"expected q with D at least 1 and H a multiple of K, found D {d}, H {h} and K {shared}")
    if scale is not None and not isinstance(scale, int | float):
        raise InputError(f"expected a number or None as scale, found {scale!r}; None is D^-½")

    # --- one dtype, no mask, no resets ---
    wide, q, k, v = _wide(q, k, v), zero_invalid(q, mask), zero_invalid(k, mask), zero_invalid(v, mask)
    if decay is None and resets is not None:
        decay = v.new_zeros(v.shape[:3], dtype=wide)
    # For one token a conversion that does nothing would take as long as the kernel.
    decay, beta, state = [x if x is None or x.dtype is wide else x.to(wide) for x in (decay, beta, state)]
    beta = beta if beta is None else zero_invalid(beta, mask)
    if decay is not None:
        decay = zero_invalid(decay, mask)
        _check_decay(decay)
        if resets is not None:
            decay = decay.masked_fill(resets[(..., *[None] * (decay.dim() - 2))], -torch.inf)

    # --- y and the state ---
    run = BACKENDS.choose(backend, q, k, v).run
    return run(q, k, v, beta, decay, state, d**-0.5 if scale is None else scale)


def _wide(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32


def _check_decay(decay: Tensor) -> None:
    """Refuse a decay above 0 or NaN, where it can be read without waiting for it."""
    if decay.numel() and reads_without_waiting(decay):
        largest = decay.max().item()  # NaN if any is
        if not largest <= 0:
            advice = "see what it is computed from"
            if largest > 0:
                advice = "use factor.log(), at most 0 by .clamp(max=0), and see that beta comes before decay"
            raise InputError(f"expected a decay of at most 0, the logarithm of a factor, found {largest:.3g}; {advice}")
