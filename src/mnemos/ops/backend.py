"""The backends of an operator, and the rules by which one of them computes a call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mnemos.errors import InputError, near_name


@dataclass(frozen=True)
class Backend:
    """One way to compute an operator. `run` has the same arguments in all of them.

    takes: whether it computes tensors like these. why_not: why it cannot run on this machine, or "" if it can: a
    constant of the process.
    """

    name: str
    run: Callable[..., Any]
    takes: Callable[..., bool] = lambda *tensors: True
    why_not: Callable[[], str] = lambda: ""


class Backends:
    """Those of one operator, the best first. The last takes every tensor on every machine."""

    def __init__(self, operator: str, *backends: Backend) -> None:
        self.operator, self.by_name = operator, {one.name: one for one in backends}

    def here(self) -> list[str]:
        """Those that can run on this machine, best first."""
        return [one.name for one in self.by_name.values() if not one.why_not()]

    def choose(self, name: str, *tensors: Tensor) -> Backend:
        """The named one, or for "auto" the first that runs here and takes the tensors. Raises InputError for others."""
        if name == "auto":
            for one in self.by_name.values():
                if one.takes(*tensors) and not one.why_not():
                    return one
        if name not in self.by_name:
            raise InputError(
                f"{self.operator}: expected a known backend, found {name!r}; {near_name(name, ('auto', *self.by_name))}"
            )
        one = self.by_name[name]
        if why := one.why_not():
            raise InputError(f"{self.operator}: backend {name!r} cannot run on this machine; {why}")
        if not one.takes(*tensors):
            found = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device.type}" for x in tensors)
            raise InputError(f"{self.operator}: backend {name!r} does not take {found}; use 'auto'")
        return one
