"""The model as it was, for a while: teacher and student are the same weights."""

import contextlib
from collections.abc import Iterator

from torch import nn

from mnemos.hosts.linearised import add_update
from mnemos.hosts.linearising import is_linearised


@contextlib.contextmanager
def original(model: nn.Module) -> Iterator[None]:
    """Inside, every linearised attention computes what it computed before `mnemos.linearise`, bit for bit.

    Its class is its own again, and its projections have no low-rank updates. Caches of inside and outside are not
    each other's.
    """
    found = [(module, type(module)) for module in model.modules() if is_linearised(module)]
    hooks = [child._forward_hooks for module, _ in found for child in module.modules()]
    kept = [list(one.items()) for one in hooks]
    try:
        for module, kind in found:
            module.__class__ = kind.__mro__[1]
        for one in hooks:
            for key in [key for key, hook in one.items() if hook is add_update]:
                del one[key]
        yield
    finally:
        for module, kind in found:
            module.__class__ = kind
        for one, items in zip(hooks, kept, strict=True):
            one.clear()
            one.update(items)
