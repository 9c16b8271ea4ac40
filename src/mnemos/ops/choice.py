"""Which of an operation's backends computes a call: the rules of all operations with several."""

import difflib
from collections.abc import Iterable, Mapping
from types import ModuleType

from torch import Tensor

from mnemos.types import InputError


def choose(operation: str, backends: Mapping[str, ModuleType], backend: str, tensors: tuple[Tensor, ...]) -> str:
    """The name of the backend for these tensors; "auto": the first that runs on this machine and takes them.

    backends: name and module, best first, with `runs_here`, `takes(*tensors)` and perhaps `why_not`. Raises InputError
    for a backend that does not exist, cannot run on this machine or does not take the tensors.
    """
    if backend == "auto":
        return next(name for name, module in backends.items() if module.runs_here() and module.takes(*tensors))
    if backend not in backends:
        raise InputError(
            f"{operation}: expected a known backend, found {backend!r}; {nearest(backend, ('auto', *backends))}"
        )
    module = backends[backend]
    if not module.runs_here():
        use = f"use 'auto' or one of {', '.join(runnable(backends))}"
        why = module.why_not() if hasattr(module, "why_not") else use
        raise InputError(f"backend {backend!r} cannot run on this machine; {why}")
    if not module.takes(*tensors):
        last = tensors[-1]
        found = f"{last.dtype} on {last.device.type} with shapes {', '.join(str(tuple(x.shape)) for x in tensors)}"
        raise InputError(f"backend {backend!r} does not take {found}; use 'auto'")
    return backend


def runnable(backends: Mapping[str, ModuleType]) -> list[str]:
    """The backends that can run on this machine, best first, without the slow "reference", which always can."""
    return [name for name, module in backends.items() if module.runs_here() and name != "reference"]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, or all."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
