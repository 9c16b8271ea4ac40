"""The modes in which code runs: a model's inside a context, whether code may read the values of a tensor, wrappers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import COMPILED, is_tracing, transformed, with_children
from .errors import InputError


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
    """Whether code may depend on the values of x: a device would have to finish first, a compiled graph breaks, and a
    traced one would take these values for those of every later call.

    Under torch.func (vmap), x stands for the values of several calls.
    """
    return x.device.type == "cpu" and not in_graph() and not transformed(x)


def in_graph() -> bool:
    """Whether torch.compile or torch.jit.trace records what runs: operations that may not depend on values."""
    return torch.compiler.is_compiling() or is_tracing()


def records_values() -> bool:
    """Whether torch.jit.trace or torch.export records what runs: what is read of a tensor becomes a constant of it."""
    return is_tracing() or torch.compiler.is_exporting()


_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "AveragedModel", "DeepSpeedEngine"}


def uncompiled(model: Any) -> Any:
    """The module that torch.compile is around, with the same tensors; anything else as it is."""
    return dict(model.named_children()).get(COMPILED, model) if isinstance(model, nn.Module) else model


def plain_module(model: nn.Module, verb: str) -> Any:
    """The model without torch.compile around it or its parts, where its tensors have other names: what is written.

    Modules with compiled parts are shallow copies, of the same tensors. Raises InputError, which starts with `verb`,
    for DataParallel, DistributedDataParallel, AveragedModel, and shards: they are not the same module; and for what is
    no module, as what torch.compile makes of a compiled model.
    """
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"{verb}: expected a model, an nn.Module, found {type(model).__name__}; give the model itself")
    sharded = any(hasattr(x, "device_mesh") for x in model.parameters())
    if sharded or _WRAPPERS & {cls.__name__ for cls in type(model).__mro__}:
        raise InputError(
            f"{verb}: expected a model itself, found {'a sharded one' if sharded else type(model).__name__}; give the "
            "module inside"
        )
    if not any(name.endswith(COMPILED) for name, _ in model.named_modules()):
        return model
    copies: dict[int, nn.Module] = {}

    def plain(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            inner = uncompiled(part)
            below = inner.named_modules(remove_duplicate=False)  # a child may have two names
            children = {name: child for name, child in below if name and "." not in name}
            new = {name: plain(child) for name, child in children.items()}
            same = all(new[name] is child for name, child in children.items())
            copies[id(part)] = inner if same else with_children(inner, new)
        return copies[id(part)]

    return plain(model)
