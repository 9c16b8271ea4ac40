"""The mixture of discretised logistics from its definition, for tests: slow, in float64, and sharing nothing."""

import torch
from torch import Tensor


def probabilities(parameters: Tensor, levels: int = 256) -> Tensor:
    """P(x = n) for every level n (Salimans et al. 2017, eq. 2), by differences of distribution functions.

    parameters [.., 3K]: K logits, K means, K log-scales; levels lie at −1 … 1, and half a step to each side of a level
    belongs to it, all the rest to the first and the last. [.., levels], float64.
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
