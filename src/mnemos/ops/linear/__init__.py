"""Linear attention (Katharopoulos et al. 2020): one function for training, prefill and decoding. See README.md.

A backend is a module of this package, listed in `BACKENDS`, best first. Its functions:

    runs_here()                                whether it can run on this machine; importing it must be cheap
    takes(q, k, v)                             whether it can compute these tensors
    causal(q, k, v, s, z, mask, phi, eps)      the computation
    token(...)            optional             the same for a single token, if there is a faster way
    everything(...)       optional             causal=False; without it, a few operations of PyTorch
    why_not()             optional             why it cannot run on this machine
    FROM_NOTHING          optional             names of those of its functions that take None for s and z: zeros

"auto" chooses the first backend that runs on this machine and takes the tensors: "native" on a CPU and "chunked", which
takes all, elsewhere.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable, forward_differentiated, transformed
from mnemos.ops import choice
from mnemos.ops.checks import check_mask
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.rewind import note
from mnemos.types import InputError

from . import chunked, native, oracle
from .feature_maps import FeatureMap, Pointwise, find

__all__ = ["LinearState", "backends", "linear_attention", "which"]

BACKENDS: dict[str, ModuleType] = {"native": native, "chunked": chunked, "reference": oracle}


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
    own operations (`chunked.transformable`), which have all derivatives. Raises InputError for shapes, dtypes, a
    feature map or a backend that do not fit.
    """
    _check(q, k, v, causal, mask, resets, eps)
    if causal:  # else the mask is that of the keys alone
        q = zero_invalid(q, mask)
    y, after = _attend(q, k, v, causal, feature_map, state, mask, eps, backend, resets)
    if causal:
        note(after, q.shape[1], functools.partial(_again, (k, v, mask, resets), (feature_map, state, eps, backend)))
    return y, after


def _again(
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None], settings: tuple[Any, ...], n: int, valid: Tensor | None
) -> LinearState:
    """The state after the first n tokens of k and v; see `mnemos.ops.rewind.note`."""
    k, v, mask, resets = given
    mask = valid if mask is None else mask[:, :n] if valid is None else mask[:, :n] & valid
    if resets is not None:
        resets = resets[:, :n] if valid is None else resets[:, :n] & valid  # one before an invalid token counts too
    feature_map, state, eps, backend = settings
    return _attend(k[:, :n], k[:, :n], v[:, :n], True, feature_map, state, mask, eps, backend, resets)[1]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    feature_map: str | FeatureMap,
    state: tuple[Tensor, ...] | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
    resets: Tensor | None,
) -> tuple[Tensor, LinearState]:
    """`linear_attention` of checked inputs."""
    phi = find(feature_map)
    if not isinstance(phi, Pointwise):
        q, k = phi(q), phi(zero_invalid(k, mask))
        _check_features(q, k, v)
    if resets is not None:
        return _restarted(q, k, v, phi, state, mask, eps, choose(q, k, v, backend), resets)
    chosen = BACKENDS[choose(q, k, v, backend)]
    rewritten = (
        chosen is not oracle and not torch.compiler.is_compiling() and (transformed() or forward_differentiated())
    )
    if rewritten:
        chosen = chunked
    b, _, h, d = k.shape
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    with full_precision(v.device.type):
        name = "everything" if not causal else "token" if q.shape[1] == 1 else "causal"
        sums = getattr(chosen, name, None) if k.numel() else None
        if rewritten and sums is not None:
            sums = chunked.transformable
        if state is None and sums is not None and name in getattr(chosen, "FROM_NOTHING", ()):
            y, *after = sums(q, k, v, None, None, mask, phi if isinstance(phi, Pointwise) else None, eps)
            return y, LinearState(*after)
        before = _start(state, (b, h, d, v.shape[-1]), wide, v)
        inside = phi if isinstance(phi, Pointwise) else None
        if sums is not None:
            y, *after = sums(q, k, v, before.s, before.z, mask, inside, eps)
        else:
            if inside is not None:
                q, k, inside = phi(q.to(wide)), phi(zero_invalid(k.to(wide), mask)), None
            k, v = zero_invalid(k, mask), zero_invalid(v, mask)
            plain = _token if causal and q.shape[1] == 1 else _everything
            y, *after = plain(q.to(wide), k.to(wide), v.to(wide), before.s, before.z, eps)
            y = y.to(v.dtype)
        return y, LinearState(*after)


def _restarted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi: FeatureMap,
    state: tuple[Tensor, ...] | None,
    mask: Tensor | None,
    eps: float,
    backend: str,
    resets: Tensor,
) -> tuple[Tensor, LinearState]:
    """A call with resets: decayed attention of [v, 1], whose last column is the normaliser."""
    from mnemos.ops.delta import decayed_attention  # it uses a function of this package

    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    with full_precision(v.device.type):
        q, k = q.to(wide), zero_invalid(k.to(wide), mask)
        if isinstance(phi, Pointwise):
            q, k = phi(q), phi(k)
        # Not by `decayed_attention`'s own mask, which would not read what φ(0) reads.
        k, own = zero_invalid(k, mask), zero_invalid(v.to(wide), mask)
        values = torch.cat([own, own.new_ones(*v.shape[:3], 1)], -1)
        s, z = _start(state, (k.shape[0], *k.shape[2:], v.shape[-1]), wide, v)
        sums, end = decayed_attention(
            q, k, values, None, torch.cat([s, z[..., None]], -1), None, 1.0, resets, backend=backend
        )
        y = sums[..., :-1] / (sums[..., -1:] + eps)
    return y.to(v.dtype), LinearState(end[..., :-1].contiguous(), end[..., -1].contiguous())


def _token(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """One token, eq. 18 to 20, in few operations, because their number determines the time of decoding."""
    s = torch.addcmul(s, k.transpose(1, 2).mT, v.transpose(1, 2))
    z = z + k[:, 0]
    q = q.transpose(1, 2)  # [B, H, 1, D]
    y = (q @ s) / (q @ z[..., None] + eps)
    return y.transpose(1, 2), s, z


def _everything(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """All queries read all keys, eq. 5 and 6. Also used for causal calls without keys."""
    s = s + torch.einsum("bnhd,bnhm->bhdm", k, v)
    z = z + k.sum(1)
    y = torch.einsum("bthd,bhdm->bthm", q, s) / (torch.einsum("bthd,bhd->bth", q, z)[..., None] + eps)
    return y, s, z


def backends() -> list[str]:
    """The backends that can run on this machine, best first, without the slow "reference", which always can."""
    return choice.runnable(BACKENDS)


def which(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto", feature_map: str | FeatureMap = "elu") -> str:
    """The backend that a causal call of these tensors uses: the choice of "auto", or the named one.

    The feature map is applied to one token, because it may change the width and type of q and k. Raises InputError for
    a backend that does not exist, cannot run on this machine or does not take the tensors.
    """
    phi = find(feature_map)
    if not isinstance(phi, Pointwise):
        q, k = phi(q[:1, :1, :1]), phi(k[:1, :1, :1])
    return choose(q, k, v, backend)


def choose(q: Tensor, k: Tensor, v: Tensor, backend: str) -> str:
    """`which` for tensors after φ, unless φ is a `Pointwise` map, which backends apply."""
    return choice.choose("linear_attention", BACKENDS, backend, (q, k, v))


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, resets: Tensor | None, eps: float
) -> None:
    if not (
        q.dim() == k.dim() == v.dim() == 4 and q.is_floating_point() and k.is_floating_point() and v.is_floating_point()
    ):
        found = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"expected floating q, k [B, T, H, D] and v [B, T, H, M], found {found}")
    b, t, h, d = q.shape
    n = t if causal else k.shape[1]
    if k.shape != (b, n, h, d) or v.shape[:3] != (b, n, h):
        raise InputError(
            f"expected k {(b, n, h, d)} and v {(b, n, h)} + (M,) for q {tuple(q.shape)}, found {tuple(k.shape)} and "
            f"{tuple(v.shape)}; another length than q's needs causal=False"
        )
    if not q.device == k.device == v.device == (q.device if mask is None else mask.device):
        where = ", ".join(str(x.device) for x in (q, k, v, mask) if x is not None)
        raise InputError(f"expected q, k, v and mask on one device, found {where}; move them with .to(device)")
    check_mask(mask, (b, n))
    if resets is not None and not causal:
        raise InputError("expected no resets with causal=False, where every query reads all keys, found resets")
    if resets is not None and (resets.shape != (b, t) or resets.dtype != torch.bool):
        raise InputError(f"expected resets of booleans {(b, t)}, found {resets.dtype} {tuple(resets.shape)}")
    if not eps >= 0:
        raise InputError(f"expected an eps of at least 0, found {eps}; it is added to a sum of positive numbers")


def _check_features(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise InputError(
            f"expected a feature map that keeps all axes but the last, found φ(q) {tuple(q.shape)} and "
            f"φ(k) {tuple(k.shape)}"
        )


def _start(state: tuple[Tensor, ...] | None, shape: tuple[int, ...], wide: torch.dtype, like: Tensor) -> LinearState:
    """The state before the call, in the dtype of the sums; None: zeros."""
    if state is None:
        # One expanded number: the backward keeps no memory for it.
        nothing = like.new_zeros((), dtype=wide)
        return LinearState(nothing.expand(shape), nothing.expand(shape[:3]))
    _check_state(state, shape, like)
    return LinearState(*(x.to(wide) for x in state))


def _check_state(state: tuple[Tensor, ...], shape: tuple[int, ...], like: Tensor) -> None:
    if not isinstance(state, tuple | list) or len(state) != 2 or not all(map(torch.is_tensor, state)):
        raise InputError(f"expected a state that linear_attention returned, or None, found {type(state).__name__}")
    for x, expected in zip(state, (shape, shape[:3]), strict=True):
        if x.shape != expected or not x.is_floating_point() or x.device != like.device:
            found = ", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in state)
            raise InputError(
                f"expected a state of s {shape} and z {shape[:3]}, floating, on {like.device} for these inputs; "
                f"found {found}"
            )
