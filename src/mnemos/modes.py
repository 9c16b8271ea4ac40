"""Training and evaluation mode inside a context."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Inside, the model is in eval (or training) mode; afterwards every module has its mode from before."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
