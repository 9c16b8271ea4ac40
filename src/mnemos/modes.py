"""Training and evaluation mode, for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module, training: bool = False) -> Iterator[None]:
    """Inside, the model is in eval (or training) mode; after it, every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
