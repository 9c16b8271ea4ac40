"""A head whose outputs are a mixture of discretised logistics, for brightnesses of pixels."""

import torch
from torch import Tensor, nn

from mnemos.ops.checks import check_finite
from mnemos.types import InputError

from . import operator


class LogisticMixture:
    """Outputs [.., 3K] as mixtures of K discretised logistics over brightnesses 0 … levels − 1."""

    def __init__(self, levels: int) -> None:
        self.levels = levels

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum of the negative log-likelihoods of targets [..], of outputs [.., 3K]. Those below 0 do not count."""
        counted = targets >= 0
        loss = -operator.log_prob(outputs, torch.where(counted, targets, 0), self.levels)
        return torch.where(counted, loss, 0).sum()

    @torch.no_grad()
    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(right guesses, targets counted). Targets below 0 do not count.

        The guess is the mean of the most likely component, which is cheaper than a pass over all levels.
        """
        counted = targets >= 0
        guess = operator.draw(outputs, self.levels, temperature=0)
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
        return operator.draw(outputs, self.levels, temperature, generator)

    @staticmethod
    @torch.no_grad()
    def space_means(head: nn.Linear) -> None:
        """Initialise a head of 3K outputs so that its components cover −1 to 1 evenly, and are not all at 0."""
        components = head.out_features // 3
        width = 2 / components
        head.bias[components : 2 * components] = torch.linspace(-1 + width / 2, 1 - width / 2, components)
        head.bias[2 * components :] = torch.log(torch.tensor(width / 4))
