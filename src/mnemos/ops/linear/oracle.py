"""The backend "reference": the equations of reference.py as a backend, to compare the others with.

It loops over rows, heads and tokens in float64, runs on any machine, and is never chosen by "auto".
"""

from collections.abc import Callable

from torch import Tensor

from .feature_maps import Pointwise
from .reference import (
    Result,
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_relu,
)

MAPS = {"elu": reference_elu, "relu": reference_relu}


def runs_here() -> bool:
    """True."""
    return True


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors are on the CPU, where its loops are fastest."""
    return v.device.type == "cpu"


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z."""
    return _computed(reference_causal, q, k, v, s, z, mask, phi, eps)


token = causal


def everything(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s, z -> y, s, z."""
    return _computed(reference_bidirectional, q, k, v, s, z, mask, phi, eps)


def _computed(
    schedule: Callable[..., Result],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    features = (lambda x: x) if phi is None else MAPS.get(phi.name, phi)
    y, s_end, z_end = reference_linear_attention(q, k, v, schedule, features, (s, z), mask, eps)
    return y.to(v.dtype), s_end.to(s.dtype), z_end.to(z.dtype)
