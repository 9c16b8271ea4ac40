"""The mode of a model inside a context, and whether code may look at the values of a tensor."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


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


def reads_without_waiting(x: Tensor) -> bool:
    """Whether code may depend on the values of x: a device would have to finish first, and a compiled graph breaks."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
