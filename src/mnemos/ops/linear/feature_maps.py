"""Feature maps φ of linear attention: what replaces exp(q·k) by φ(q)·φ(k).

A `Pointwise` map keeps the width, and its derivative can be read off its value, so a backend may apply it by itself,
chunk by chunk, and keep only the raw queries and keys for the backward. Any other map is a function [.., D] ->
[.., D'].
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.precision import full_precision
from mnemos.types import InputError

FeatureMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pointwise:
    """φ, elementwise, and dφ/dx as a function of φ(x)."""

    name: str
    value: FeatureMap
    slope: FeatureMap

    def __call__(self, x: Tensor) -> Tensor:
        """φ(x)."""
        return self.value(x)


def elu(x: Tensor) -> Tensor:
    """elu(x) + 1 (eq. 7) as max(x, 0) + exp(min(x, 0)), which stays positive where elu(x) + 1 cancels to 0.

    Its slope at 0 is 1: relu's there is 0, clamp's 1.
    """
    return F.relu(x) + torch.exp(x.clamp(max=0))


def polynomial(x: Tensor) -> Tensor:
    """The exact map of the degree 2 kernel: φ(q)·φ(k) = (q·k)², with D' = D(D+1)/2 features.

    x_i² and √2·x_i·x_j for i < j. Attention then costs O(T·D²·M), which pays where T > D². Computed in float32
    (float64 stays): squares of bfloat16 would lose what the state is kept in float32 for.
    """
    x = _wide(x)
    d = x.shape[-1]
    i, j = torch.triu_indices(d, d, device=x.device)
    scale = torch.full((len(i),), 2.0**0.5, dtype=x.dtype, device=x.device).masked_fill(i == j, 1.0)
    return x[..., i] * x[..., j] * scale


def favor(x: Tensor, projection: Tensor) -> Tensor:
    """Favor+ (Choromanski et al. 2021): positive random features, E[φ(q)·φ(k)] = exp(q·k/√D).

    x [.., D], projection [F, D] (see `random_projection`) -> [.., F]: exp(w·x/D^¼ − |x|²/(2√D)) / √F, in float32
    (float64 stays). Nothing is subtracted for the data's sake: a maximum over time would look into the future and make
    the sums of one call unfit to be added to the next one's. None is needed for large inputs: w·u − |u|²/2 is at
    most |w|²/2, at u = w, and they fade to 0. A sum can overflow only where q and k both equal a w of |w|² > 88 (|w|²
    is about D).
    """
    x = _wide(x) * x.shape[-1] ** -0.25
    with full_precision(x.device.type):
        scores = x @ projection.to(x).mT
    return torch.exp(scores - x.square().sum(-1, keepdim=True) / 2) * projection.shape[0] ** -0.5


def random_projection(features: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows [F, D] for `favor`: of Gaussian length, orthogonal in blocks of D, for less variance than independent."""
    blocks = [torch.empty(0, dim, dtype=torch.float64)]
    for _ in range(-(-features // dim)):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
        # Of the two signs of a column, qr's choice depends on the matrix; r's positive diagonal makes q uniform.
        blocks.append((q * r.diagonal().sign()).mT)
    length = torch.randn(features, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks)[:features] * length).float()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu": Pointwise("elu", elu, lambda phi: phi.clamp(max=1)),
    "relu": Pointwise("relu", F.relu, lambda phi: (phi > 0).to(phi.dtype)),
    "polynomial": polynomial,
}


def find(given: str | FeatureMap) -> FeatureMap:
    """The map of a name in `FEATURE_MAPS`, or the function given. Raises InputError for an unknown name."""
    if not isinstance(given, str):
        return given
    if given == "favor":
        raise InputError(
            "favor needs its projection, which the state depends on: give feature_map=functools.partial(favor, "
            "projection=random_projection(F, D)), or use LinearAttention(feature_map='favor'), which keeps one"
        )
    if given not in FEATURE_MAPS:
        raise InputError(f"linear_attention has no feature map {given!r}; {nearest(given, (*FEATURE_MAPS, 'favor'))}")
    return FEATURE_MAPS[given]


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint for a name that is unknown: the nearest right one, or all."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
