"""Mixture of discretised logistics (Salimans et al. 2017): a distribution over the levels of a pixel's brightness.

Parameters are [.., 3K]: K logits of the components' weights, K means and K log-scales, on a line where the levels 0 to
L − 1 are evenly spaced from −1 to 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.modes import reads_without_waiting
from mnemos.types import InputError

__all__ = ["MAX_LOG_SCALE", "MIN_LOG_SCALE", "draw", "log_prob", "mode"]

# Below, a component is a tenth of a level wide, so it is in one level anyway.
MIN_LOG_SCALE = -7.0
# Above, a component is flat and e^(−s) underflows.
MAX_LOG_SCALE = 40.0


def log_prob(parameters: Tensor, x: Tensor, levels: int = 256) -> Tensor:
    """log P(x) of levels x [..] (integers 0 … levels − 1) under parameters [.., 3K]: [..], float32 at least.

    With c = x − μ, half a step h = 1/(levels − 1), a = e^(−s)·(c + h) and b = e^(−s)·(c − h), a component has

        log P = −softplus(−a)                                              x = 0
                −softplus(b)                                               x = levels − 1
                −softplus(−a) − softplus(b) + log(−expm1(−2h·e^(−s)))      else

    which is log(σ(a) − σ(b)) without cancellation: accurate for probabilities of 1e-30 too, and the probabilities of
    all levels sum to 1. Cost: O(K) per number. Raises InputError for shapes or levels that do not fit.
    """
    _check(parameters, levels)
    if x.shape != parameters.shape[:-1] or x.is_floating_point():
        raise InputError(
            f"expected levels as integers {tuple(parameters.shape[:-1])}, found {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.numel() and reads_without_waiting(x):
        low, high = torch.aminmax(x)
        if low < 0 or high >= levels:
            raise InputError(f"expected levels 0 to {levels - 1}, found {int(low)} to {int(high)}")
    logits, means, log_scales = _parts(parameters)
    half = 1 / (levels - 1)
    inverse = torch.exp(-log_scales)
    centred = x[..., None].to(means.dtype) * (2 * half) - 1 - means
    above, below = inverse * (centred + half), inverse * (centred - half)
    # The first and the last level extend to infinity, so one of the two terms is missing there.
    first, last = x[..., None] == 0, x[..., None] == levels - 1
    width = torch.log(-torch.expm1(-2 * half * inverse))
    inner = width.masked_fill(first | last, 0)
    parts = inner - F.softplus(-above).masked_fill(last, 0) - F.softplus(below).masked_fill(first, 0)
    return torch.logsumexp(torch.log_softmax(logits, -1) + parts, -1)


def draw(
    parameters: Tensor, levels: int = 256, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw levels from the mixture, int64 [..]: a component, then a point of its logistic, rounded to a level.

    temperature divides the logits and multiplies the scales; 0: the mean of the most probable component.
    """
    _check(parameters, levels)
    logits, means, log_scales = _parts(parameters.detach())
    if temperature == 0:
        return _level(_choose(means, logits.argmax(-1)), levels)
    uniform = torch.rand(logits.shape, device=logits.device, dtype=logits.dtype, generator=generator)
    tiny = torch.finfo(logits.dtype).tiny
    gumbel = -torch.log((-torch.log(uniform.clamp_(min=tiny))).clamp_(min=tiny))
    which = (logits / temperature + gumbel).argmax(-1)
    u = torch.rand(which.shape, device=logits.device, dtype=logits.dtype, generator=generator)
    u = u.clamp_(1e-7, 1 - 1e-7)
    point = _choose(means, which) + temperature * _choose(log_scales, which).exp() * (torch.log(u) - torch.log1p(-u))
    return _level(point, levels)


def mode(parameters: Tensor, levels: int = 256) -> Tensor:
    """The most probable level, int64 [..]; the first of equals. Cost: O(K·levels) per number."""
    _check(parameters, levels)
    every = torch.arange(levels, device=parameters.device)
    every = every.view(-1, *[1] * (parameters.dim() - 1)).expand(levels, *parameters.shape[:-1])
    return log_prob(parameters.detach().expand(levels, *parameters.shape), every, levels).argmax(0)


def _check(parameters: Tensor, levels: int) -> None:
    if not parameters.is_floating_point() or parameters.dim() < 1 or parameters.shape[-1] % 3 or not parameters.numel():
        raise InputError(
            f"expected floating parameters [.., 3K] of a mixture of K logistics, found {parameters.dtype} of shape "
            f"{tuple(parameters.shape)}"
        )
    if levels < 2:
        raise InputError(f"expected at least 2 levels, found {levels}")


def _parts(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, means and log-scales in float32 at least: half precision cannot represent the step between levels."""
    wide = torch.promote_types(parameters.dtype, torch.float32)
    logits, means, log_scales = parameters.to(wide).chunk(3, -1)
    return logits, means, log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE)


def _choose(x: Tensor, which: Tensor) -> Tensor:
    return x.gather(-1, which[..., None]).squeeze(-1)


def _level(point: Tensor, levels: int) -> Tensor:
    return ((point + 1) * ((levels - 1) / 2)).round().clamp(0, levels - 1).long()
