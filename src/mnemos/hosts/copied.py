"""Copies of functions of other libraries in which some names mean other objects."""

import functools
from types import CellType, FunctionType
from typing import Any


def with_globals(function: Any, others: dict[str, Any]) -> Any:
    """A copy of the function whose global names mean these objects; one that wraps another wraps a copy of it.

    Nothing is changed in the function's module, so other callers of the function see what they saw before.
    """
    wrapped, names, cells = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if wrapped is None:
        # Without its name torch.compile reads the names from these globals, and not from the module of that name.
        names = {name: x for name, x in names.items() if name != "__name__"} | others
    else:
        inner = with_globals(wrapped, others)
        cells = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells)
    copy: Any = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    if wrapped is None:
        del copy.__wrapped__
    else:
        copy.__wrapped__ = inner
    return copy
