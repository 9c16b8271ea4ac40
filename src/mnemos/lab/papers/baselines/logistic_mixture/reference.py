"""The mixture of discretised logistics by its definition, in float64; tests compare the fast path with it."""

import torch
from torch import Tensor


def probabilities(parameters: Tensor, levels: int = 256) -> Tensor:
    """P(x = n) for every level n (Salimans et al. 2017, eq. 2), by differences of distribution functions.

    parameters [.., 3K]: K logits, K means, K log-scales. Levels are evenly spaced from −1 to 1; each has the interval
    of half a step to both sides, the first and the last extend to infinity. Returns [.., levels] float64.
    """
    logits, means, log_scales = parameters.double().chunk(3, -1)
    share = torch.softmax(logits, -1)
    scales = torch.exp(log_scales.clamp(min=-7))
    found = []
    for n in range(levels):
        x = 2 * n / (levels - 1) - 1
        below = 0.0 if n == 0 else torch.sigmoid((x - 1 / (levels - 1) - means) / scales)
        above = 1.0 if n == levels - 1 else torch.sigmoid((x + 1 / (levels - 1) - means) / scales)
        found.append((share * (above - below)).sum(-1))
    return torch.stack(found, -1)
