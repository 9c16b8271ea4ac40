"""Linear attention (Katharopoulos et al. 2020): one function for training, prefill and decoding. See README.md.

Read `linear_attention` here, then chunked.py (PyTorch) and native.py (C++); reference.py has the equations.

A backend computes run(q, k, v, s, z, mask, phi, eps, causal) -> y in v's dtype, and s and z after the call. It gets
checked tensors of any strides. phi: a `Pointwise` map, which it applies; None where another map was applied before. s
and z are float32, or float64 if q, k or v is; None for zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable, rewritten
from mnemos.errors import InputError
from mnemos.ops.backend import Backend, Backends, on_cpu
from mnemos.ops.delta import decayed_attention
from mnemos.ops.kernel_call import why_no_kernels
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.rewind import first_tokens, record_call
from mnemos.ops.signature import Signature

from . import chunked, native, reference
from .feature_maps import FeatureMap, Pointwise, find

__all__ = ["BACKENDS", "LinearState", "linear_attention"]


def _equations(
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
    """The equations as a backend, to compare the others with; "auto" never chooses it."""
    maps = {"elu": reference.reference_elu, "relu": reference.reference_relu}
    features = (lambda x: x) if phi is None else maps.get(phi.name, phi)
    schedule = reference.reference_causal if causal else reference.reference_bidirectional
    state = None if s is None or z is None else (s, z)
    y, s, z = reference.reference_linear_attention(q, k, v, schedule, features, state, mask, eps)
    wide = _wide(q, k, v)
    return y.to(v.dtype), s.to(wide), z.to(wide)


BACKENDS = Backends(
    "linear_attention",
    Backend("native", native.attend, native.takes, why_no_kernels),
    Backend("chunked", chunked.attend, differentiable=True),
    Backend("reference", _equations, on_cpu, differentiable=True),
)
TENSORS = {
    "q": "B T H D",
    "state_s": "B H D M ?",
    "state_z": "B H D ?",
    "resets": "B T bool ?",
}
CHECK_CAUSAL = Signature(
    "linear_attention",
    "; of [B, H, T, D] use transpose(1, 2); another length than q's needs causal=False",
    **TENSORS,
    k="B T H D",
    v="B T H M",
    mask="B T bool ?",
)
CHECK = Signature(
    "linear_attention", "; of [B, H, T, D] use transpose(1, 2)", **TENSORS, k="B N H D", v="B N H M", mask="B N bool ?"
)


@exportable
class LinearState(NamedTuple):
    """The state of linear attention: s [B, H, D', M] = Σ φ(k)·vᵀ and z [B, H, D'] = Σ φ(k) (eq. 10, 11).

    float32 for all inputs (float64 for float64): a sum in bfloat16 stops growing after some hundred tokens.
    """

    s: Tensor
    z: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "sums"


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    feature_map: str | FeatureMap = "elu",
    state: tuple[Tensor, ...] | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
    resets: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """y_i = φ(q_i)·S / (φ(q_i)·z + eps) with S = Σ φ(k_j)·v_jᵀ and z = Σ φ(k_j), and the state after the call.

    causal: the sums run over j ≤ i (eq. 8 to 12; token by token eq. 16 to 20), starting from `state`. T ≥ 0, and a
    sequence may be split into calls anywhere. Not causal: the sums run over all keys of the call, starting from `state`
    (eq. 3 to 6). Then q may have another length T than the N of k and v, and a later call with the returned state also
    reads the keys of the earlier ones.

    q [B, T, H, D], k [B, N, H, D], v [B, N, H, M]; N = T if causal. y [B, T, H, M] in v's dtype.
    feature_map: "elu", "relu", "polynomial" (exact, degree 2), or any function [.., D] -> [.., D'].
    state: a `LinearState` (s [B, H, D', M], z [B, H, D']), never changed; gradients flow through it. None: zeros.
    mask [B, N] bool, True = valid: invalid tokens are not added to s and z, whatever they contain; if causal, their q
    is read as zeros.
    eps is added to every denominator; because of it, scaling φ by a constant changes the result.
    backend: "auto" (on a GPU PyTorch's operations), one of `mnemos.ops.backends("linear_attention")`, or "reference".
    `mnemos.ops.which("linear_attention", q, k, v, feature_map=…)` returns the choice of "auto".
    resets [B, T] bool, causal only: True sets the state to zeros before the token, also before an invalid one: the
    first tokens of packed sequences. It is a decay of −inf (`decayed_attention`, which computes these calls), so a
    state or token that is not finite reaches past it.

    Cost: O((T + N)·H·D'·M) time. The backward keeps the inputs, O(T·H) numbers and a few states.
    Differentiable once. Under `torch.func` and forward-mode AD every backend but "reference" is computed in PyTorch's
    own operations, which have all derivatives. Raises InputError for shapes, dtypes, a
    feature map or a backend that do not fit.
    """
    # --- checks ---
    phi = find(feature_map)
    if not (state is None or (isinstance(state, tuple | list) and len(state) == 2)):
        raise InputError(f"linear_attention: expected a state that it returned, or None, found {type(state).__name__}")
    if not causal and resets is not None:
        raise InputError("linear_attention: expected no resets with causal=False, where every query reads all keys")
    if not eps >= 0:
        raise InputError(f"linear_attention: expected an eps of at least 0, found {eps}; it is added to positive sums")
    check = CHECK_CAUSAL if causal else CHECK
    s, z = (None, None) if state is None else state
    inside = phi if isinstance(phi, Pointwise) else None  # a backend applies it; any other map may change the width
    check(q=q, k=k, v=v, mask=mask, resets=resets, **({} if inside is None else {"state_s": s, "state_z": z}))
    if causal and mask is not None:  # else the mask is that of the keys alone
        q = zero_invalid(q, mask)

    keys, values = k, v
    if inside is None:
        q, k = phi(q), phi(zero_invalid(k, mask))
        if q.dim() != 4 or k.dim() != 4:
            raise InputError(
                f"linear_attention: expected a feature map that keeps all axes but the last, found φ(q) {list(q.shape)}"
            )
        check(q=q, k=k, v=v, state_s=s, state_z=z)

    # --- y and the sums ---
    chosen = BACKENDS.for_call(backend, q, k, v)
    if not k.numel():  # no sums to make
        chosen = BACKENDS.by_name["chunked"]
    by_decay = resets is not None or (causal and k.numel() > 0 and chosen.name == "chunked" and rewritten())
    with full_precision(v.device.type):
        wide = _wide(q, k, v)
        s, z = [x if x is None or x.dtype is wide else x.to(wide) for x in (s, z)]
        if by_decay:
            y, s, z = _by_decayed_attention(q, k, v, s, z, mask, inside, eps, resets, chosen.name)
        else:
            y, s, z = chosen.run(q, k, v, s, z, mask, inside, eps, causal)
    after = LinearState(s, z)

    def recompute_state(n: int, valid: Tensor | None) -> LinearState:
        """The state after the first n tokens, for `rewindable`."""
        first, marks = keys[:, :n], first_tokens(n, valid, mask, resets)
        args = first, first, values[:, :n], True, feature_map, state, marks[0], eps, backend, marks[1]
        return linear_attention(*args)[1]

    if causal:
        record_call(after, q.shape[1], recompute_state)
    return y, after


def _by_decayed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
    resets: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decayed attention of [v, 1], whose last column is the normaliser: it has resets, and all derivatives."""
    wide = _wide(q, k, v)
    q, k = q.to(wide), zero_invalid(k.to(wide), mask)
    if phi is not None:
        q, k = phi(q), phi(k)
    # Not by `decayed_attention`'s own mask, which would not read what φ(0) reads.
    k, values = zero_invalid(k, mask), zero_invalid(v.to(wide), mask)
    values = torch.cat([values, values.new_ones(*v.shape[:3], 1)], -1)
    start = None if s is None or z is None else torch.cat([s, z[..., None]], -1)
    sums, end = decayed_attention(q, k, values, None, start, None, 1.0, resets, backend)
    y = sums[..., :-1] / (sums[..., -1:] + eps)
    return y.to(v.dtype), end[..., :-1].contiguous(), end[..., -1].contiguous()


def features_of_one_token(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str | FeatureMap = "elu"
) -> tuple[Tensor, Tensor, Tensor]:
    """What the choice of a backend depends on: the feature map may change the width and type of q and k."""
    phi = find(feature_map)
    return (q, k, v) if isinstance(phi, Pointwise) else (phi(q[:1, :1, :1]), phi(k[:1, :1, :1]), v)


def _wide(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
