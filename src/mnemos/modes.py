"""The modes in which code runs: a model's inside a context, and whether code may read the values of a tensor."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, the model is in training or eval mode; afterwards every module has its mode from before."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, the model is in eval mode; afterwards every module has its mode from before."""
    return in_mode(model, training=False)


def reads_without_waiting(x: Tensor) -> bool:
    """Whether code may depend on the values of x: a device would have to finish first, and a compiled graph breaks."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def in_graph() -> bool:
    """Whether torch.compile or torch.jit.trace records what runs: operations that may not depend on values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
