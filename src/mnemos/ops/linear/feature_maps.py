"""Feature maps φ of linear attention, which replaces exp(q·k) by φ(q)·φ(k).

A `Pointwise` map keeps the width, and its derivative is a function of its value. So a backend can apply it chunk by
chunk, and keeps only q and k for the backward. Any other map is a function [.., D] -> [.., D'].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.errors import InputError, near_name
from mnemos.ops.precision import full_precision

FeatureMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pointwise:
    """An elementwise φ, and dφ/dx as a function of φ(x)."""

    name: str
    value: FeatureMap
    slope: FeatureMap

    def __call__(self, x: Tensor) -> Tensor:
        """φ(x)."""
        return self.value(x)


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1 (eq. 7), computed as max(x, 0) + exp(min(x, 0)): positive where elu(x) + 1 would round to 0.

    Its derivative at 0 is 1, because PyTorch's derivative of relu there is 0 and that of clamp is 1.
    """
    return F.relu(x) + torch.exp(x.clamp(max=0))


def polynomial(x: Tensor) -> Tensor:
    """The exact map of the degree 2 kernel: φ(q)·φ(k) = (q·k)², with D' = D(D+1)/2 features.

    The features are x_i² and √2·x_i·x_j for i < j. Attention then costs O(T·D²·M), which is less than softmax's cost if
    T > D². Computed in float32 (float64 for float64), because squares in bfloat16 are too inexact.
    """
    x = _wide(x)
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d, device=x.device)
    scale = torch.full((len(i),), 2.0**0.5, dtype=x.dtype, device=x.device).masked_fill(i == j, 1.0)
    return x[..., i] * x[..., j] * scale


def favor(x: Tensor, projection: Tensor) -> Tensor:
    """Favor+ (Choromanski et al. 2021): positive random features, E[φ(q)·φ(k)] = exp(q·k/√D).

    x [.., D], projection [F, D] (see `random_projection`) -> [.., F]: exp(w·x/D^¼ − |x|²/(2√D)) / √F, in float32
    (float64 for float64). No maximum over time is subtracted for stability: it would depend on future tokens, and sums
    of different calls could not be added. It is not needed: w·u − |u|²/2 is at most |w|²/2, at u = w, so large inputs
    tend to 0. A sum overflows only if q and k both equal a w with |w|² > 88 (|w|² is about D).
    """
    x = _wide(x) * x.shape[-1] ** -0.25
    with full_precision(x.device.type):
        scores = x @ projection.to(x).mT
    return torch.exp(scores - x.square().sum(-1, keepdim=True) / 2) * projection.shape[0] ** -0.5


def hedgehog(x: Tensor, weight: Tensor) -> Tensor:
    """Hedgehog (Zhang et al. 2024): [e^{Wx − m}, e^{−Wx − m}] with m = max |Wx|, a learned map per head.

    x [B, H, T, D], weight [H, D', D] -> [B, H, T, 2·D'], from 0 to 1: nothing overflows, and the scale of a token is
    that of its largest feature.
    """
    y = x @ weight.to(x.dtype).mT
    largest = y.abs().amax(-1, keepdim=True)
    return torch.cat([y - largest, -y - largest], -1).exp_()


@dataclass(frozen=True, eq=False)
class Hedgehog:
    """The map `hedgehog` with its weight [H, D', D]."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """φ(x)."""
        return hedgehog(x, self.weight)


def random_projection(features: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows [F, D] for `favor`: orthogonal in blocks of D, for less variance than independent rows."""
    drawn = torch.empty(-(-features // dim), dim, dim, dtype=torch.float64)
    for block in drawn:  # one by one: drawn together they would be other numbers
        block.normal_(generator=generator)
    q, r = torch.linalg.qr(drawn)
    # qr's choice of a column's sign depends on the matrix; with a positive diagonal of r, q is uniform.
    rows = (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).mT.reshape(-1, dim)[:features]
    length = torch.randn(features, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (rows * length).float()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu": Pointwise("elu", elu, lambda phi: phi.clamp(max=1)),
    "relu": Pointwise("relu", F.relu, lambda phi: (phi > 0).to(phi.dtype)),
    "polynomial": polynomial,
}


def find(feature_map: str | FeatureMap) -> FeatureMap:
    """The feature map of a name in `FEATURE_MAPS`; a function is returned. Raises InputError for an unknown name."""
    if not isinstance(feature_map, str):
        return feature_map
    if feature_map == "favor":
        raise InputError(
            "expected a feature map with its projection, found 'favor'; give feature_map=functools.partial(favor, "
            "projection=random_projection(F, D)), or use LinearAttention(feature_map='favor')"
        )
    if feature_map not in FEATURE_MAPS:
        raise InputError(
            f"linear_attention: expected a feature map, found {feature_map!r}; "
            f"{near_name(feature_map, (*FEATURE_MAPS, 'favor'))}"
        )
    return FEATURE_MAPS[feature_map]
