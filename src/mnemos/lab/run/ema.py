"""An exponential moving average of a model's weights, which evaluations and the finished run use in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class MovingAverage:
    """The average a of the weights w of a model in training.

        a ← d·a + (1 − d)·w      with d = min(decay, (t − 1)/(t + 8)) after update t

    It begins with the weights after the first update, and with a small d, so that the start of a short run weighs
    little. Running statistics and stored caches are those of the model. a is in float32 at least; it takes as much
    memory as the parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {
            name: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in model.named_parameters()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after update `step`."""
        share = 1 - min(self.decay, (step - 1) / (step + 8))
        for name, weight in self.model.named_parameters():
            average = self.weights[name]
            average.lerp_(weight.to(average.dtype), share)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; after it, its own again, bit for bit."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.use()
        try:
            yield
        finally:
            self._load(own)

    def use(self) -> None:
        """Give the model the averaged weights for good."""
        self._load(self.weights)

    def saved(self) -> dict[str, Tensor]:
        """The average by name, on the CPU."""
        return {name: weight.to("cpu", copy=True) for name, weight in self.weights.items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Go on from what `saved` gave."""
        for name, average in self.weights.items():
            average.copy_(saved[name])

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])
