"""Mixture of discretised logistics (Salimans et al. 2017): a head for the brightnesses of pixels.

Outputs are [.., 3K]: K logits of the components' weights, K means and K log-scales, on a line where the levels 0 to
L − 1 are evenly spaced from −1 to 1.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.modes import reads_without_waiting
from mnemos.ops.checks import check_finite
from mnemos.types import InputError

# Below, a component is a tenth of a level wide, so it is in one level anyway.
MIN_LOG_SCALE = -7.0
# Above, a component is flat and e^(−s) underflows.
MAX_LOG_SCALE = 40.0


class LogisticMixture:
    """Outputs [.., 3K] as mixtures of K discretised logistics over brightnesses 0 … levels − 1."""

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum of the negative log-likelihoods of targets [..], of outputs [.., 3K]. Those below 0 do not count."""
        counted = targets >= 0
        loss = -log_prob(outputs, torch.where(counted, targets, 0), self.levels)
        return torch.where(counted, loss, 0).sum()

    @torch.no_grad()
    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(right guesses, targets counted). Targets below 0 do not count.

        The guess is the mean of the most likely component, which is cheaper than a pass over all levels.
        """
        counted = targets >= 0
        guess = draw(outputs, self.levels, temperature=0)
        return ((guess == targets) & counted).sum(), counted.sum()

    def draw(
        self, outputs: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None
    ) -> Tensor:
        """Brightnesses [..] drawn from outputs [.., 3K]."""
        if top_k or top_p < 1:
            raise InputError(
                f"expected top_k 0 and top_p 1, as a mixture has no logits, found {top_k} and {top_p}; use temperature"
            )
        check_finite(outputs)
        return draw(outputs, self.levels, temperature, generator)

    @staticmethod
    @torch.no_grad()
    def space_means(head: nn.Linear) -> None:
        """Initialise a head of 3K outputs so that its components cover −1 to 1 evenly, and are not all at 0."""
        components = head.out_features // 3
        width = 2 / components
        head.bias[components : 2 * components] = torch.linspace(-1 + width / 2, 1 - width / 2, components)
        head.bias[2 * components :] = torch.log(torch.tensor(width / 4))


def log_prob(parameters: Tensor, x: Tensor, levels: int = 256) -> Tensor:
    """log P(x) of levels x [..] (integers 0 … levels − 1) under parameters [.., 3K]: [..], float32 at least.

    With c = x − μ, half a step h = 1/(levels − 1), a = e^(−s)·(c + h) and b = e^(−s)·(c − h), a component has

        log P = −softplus(−a)                                              x = 0
                −softplus(b)                                               x = levels − 1
                −softplus(−a) − softplus(b) + log(−expm1(−2h·e^(−s)))      else

    which is log(σ(a) − σ(b)) without cancellation: accurate for probabilities of 1e-30 too, and the probabilities of
    all levels sum to 1. Cost: O(K) per number. Raises InputError for a level out of range.
    """
    logits, means, log_scales = _parts(parameters)
    if x.numel() and reads_without_waiting(x):
        low, high = torch.aminmax(x)
        if low < 0 or high >= levels:
            raise InputError(f"expected levels 0 to {levels - 1}, found {int(low)} to {int(high)}")
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
    logits, means, log_scales = _parts(parameters.detach())
    if temperature == 0:
        point = means.gather(-1, logits.argmax(-1, keepdim=True))
    else:
        uniform = torch.rand(logits.shape, device=logits.device, dtype=logits.dtype, generator=generator)
        tiny = torch.finfo(logits.dtype).tiny
        gumbel = -torch.log((-torch.log(uniform.clamp_(min=tiny))).clamp_(min=tiny))
        which = (logits / temperature + gumbel).argmax(-1, keepdim=True)
        u = torch.rand(which.shape[:-1], device=logits.device, dtype=logits.dtype, generator=generator)
        u = u.clamp_(1e-7, 1 - 1e-7)[..., None]
        spread = temperature * log_scales.gather(-1, which).exp()
        point = means.gather(-1, which) + spread * (torch.log(u) - torch.log1p(-u))
    return ((point[..., 0] + 1) * ((levels - 1) / 2)).round().clamp(0, levels - 1).long()


def _parts(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, means and log-scales in float32 at least: half precision cannot represent the step between levels."""
    wide = torch.promote_types(parameters.dtype, torch.float32)
    logits, means, log_scales = parameters.to(wide).chunk(3, -1)
    return logits, means, log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE)
