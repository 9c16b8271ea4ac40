"""Linear attention (Katharopoulos et al. 2020): one function for training, prefill and decoding. See README.md.

Read `linear_attention` here, then chunked.py (PyTorch) and native.py (C++); reference.py has the equations.

A backend computes run(q, k, v, s, z, mask, phi, eps, causal) -> y in v's dtype, and s and z after the call. It gets
checked tensors of any strides, also under autocast. phi: a `Pointwise` map, which it applies; None where another map
was applied before. s and z are float32, or float64 if q, k or v is; None for zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.errors import InputError
from mnemos.ops.backend import Backend, Backends
from mnemos.ops.kernel_call import why_no_kernels
from mnemos.ops.padding import zero_invalid
from mnemos.ops.signature import Signature

from . import chunked, native
from .feature_maps import FEATURE_MAPS, FeatureMap, Pointwise, find

__all__ = ["BACKENDS", "LinearState", "linear_attention"]

BACKENDS = Backends(
    "linear_attention",
    Backend("native", native.attend, native.takes, why_no_kernels),
    Backend("chunked", chunked.attend),
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
    eps, 0 or at least 1.2e-38, is added to every denominator; because of it, scaling φ by a constant changes the
    result.
    backend: "auto" (on a GPU PyTorch's operations), or one of `mnemos.ops.backends("linear_attention")`.
    `mnemos.ops.which("linear_attention", q, k, v, feature_map=…)` returns the choice of "auto".
    resets [B, T] bool, causal only: True sets the state to zeros before the token, also before an invalid one: the
    first tokens of packed sequences. It is a decay of −inf (`decayed_attention`, which computes these calls), so a
    state or token that is not finite reaches past it.

    Cost: O((T + N)·H·D'·M) time. The backward keeps the inputs, O(T·H) numbers and a few states.
    Differentiable once. Under `torch.func` and forward-mode AD every backend is computed in PyTorch's own operations,
    which have all derivatives. Raises InputError for shapes, dtypes, a feature map or a backend that do not fit.
    """
    # --- checks ---
    phi = FEATURE_MAPS.get(feature_map) or find(feature_map) if isinstance(feature_map, str) else feature_map
    if not (state is None or (isinstance(state, tuple | list) and len(state) == 2)):
        raise InputError(f"linear_attention: expected a state that it returned, or None, found {type(state).__name__}")
    if not causal and resets is not None:
        raise InputError("linear_attention: expected no resets with causal=False, where every query reads all keys")
    if not (eps == 0 or eps >= torch.finfo(torch.float32).tiny):  # the kernels read smaller ones as 0
        raise InputError(f"linear_attention: expected an eps of 0 or at least 1.2e-38, found {eps}; give a larger one")
    check = CHECK_CAUSAL if causal else CHECK
    s, z = (None, None) if state is None else state
    inside = phi if isinstance(phi, Pointwise) else None  # a backend applies it; any other map may change the width
    check(q=q, k=k, v=v, mask=mask, resets=resets, **({} if inside is None else {"state_s": s, "state_z": z}))
    if causal and mask is not None:  # else the mask is that of the keys alone
        q = zero_invalid(q, mask)

    if inside is None:
        q, k = phi(q), phi(zero_invalid(k, mask))
        if q.dim() != 4 or k.dim() != 4:
            raise InputError(
                f"linear_attention: expected a feature map that keeps all axes but the last, found φ(q) {list(q.shape)}"
            )
        check(q=q, k=k, v=v, state_s=s, state_z=z)

    # --- y and the sums ---
    chosen = BACKENDS.choose(backend, q, k, v)
    if not k.numel():  # no sums to make
        chosen = BACKENDS.by_name["chunked"]
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32  # of sums
    s, z = [x if x is None or x.dtype is wide else x.to(wide) for x in (s, z)]
    if resets is None:
        y, s, z = chosen.run(q, k, v, s, z, mask, inside, eps, causal)
    else:
        y, s, z = chunked.attend_by_decay(q, k, v, s, z, mask, inside, eps, resets, chosen.name)
    return y, LinearState(s, z)


def features_of_one_token(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str | FeatureMap = "elu"
) -> tuple[Tensor, Tensor, Tensor]:
    """What the choice of a backend depends on: the feature map may change the width and type of q and k."""
    phi = find(feature_map)
    return (q, k, v) if isinstance(phi, Pointwise) else (phi(q[:1, :1, :1]), phi(k[:1, :1, :1]), v)
