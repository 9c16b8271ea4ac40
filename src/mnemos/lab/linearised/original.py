"""The model as it was, for a while: teacher and student are the same weights."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mnemos.hosts.linearise import is_linearised
from mnemos.hosts.linearised import add_updates, drop_updates


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Inside, every linearised attention computes what it computed before `mnemos.linearise`, bit for bit.

    Its class is its own again, and its projections have no low-rank updates. Caches of inside and outside are not
    each other's.
    """
    found = [(module, type(module)) for module in model.modules() if is_linearised(module)]
    try:
        for module, kind in found:
            module.__class__ = kind.__mro__[1]
            drop_updates(module)
        yield
    finally:
        for module, kind in found:
            module.__class__ = kind
            add_updates(module)


def calls_of_original(model: Any, changed: dict[str, nn.Module], ids: Tensor) -> dict[str, tuple[Any, Any, Tensor]]:
    """The arguments, named arguments and output of each attention, by one forward of the original on `ids` [B, T]."""
    seen: dict[str, tuple[Any, Any, Tensor]] = {}

    def keep(name: str, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        seen[name] = given, named, output[0]

    hooks = [module.register_forward_hook(partial(keep, name), with_kwargs=True) for name, module in changed.items()]
    try:
        with torch.no_grad(), original(model):
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
