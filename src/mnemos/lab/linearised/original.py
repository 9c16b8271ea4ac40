"""The model as it was, for a while: teacher and student are the same weights."""

import contextlib
from collections.abc import Iterator

from torch import nn

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
