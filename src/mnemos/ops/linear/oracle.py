"""The backend "reference": the equations of reference.py as a backend, to compare the others with.

It loops over rows, heads and tokens in float64, runs on any machine, and is never chosen by "auto".
"""

from torch import Tensor

from .feature_maps import Pointwise
from .reference import reference_causal, reference_elu, reference_linear_attention, reference_relu

MAPS = {"elu": reference_elu, "relu": reference_relu}


def runs_here() -> bool:
    """True."""
    return True


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the tensors are on the CPU, where its loops are fastest."""
    return v.device.type == "cpu"


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """False: "auto" chooses a faster backend."""
    return False


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z."""
    features = (lambda x: x) if phi is None else MAPS.get(phi.name, phi)
    y, s_end, z_end = reference_linear_attention(q, k, v, reference_causal, features, (s, z), mask, eps)
    return y.to(v.dtype), s_end.to(s.dtype), z_end.to(z.dtype)


token = causal
