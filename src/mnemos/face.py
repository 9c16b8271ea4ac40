"""Faces of packages: an `__init__.py` that lists what the package offers, and imports it when it is asked for.

In all of them the list is written once, as imports under TYPE_CHECKING. Type checkers and editors read them as they
are; at run time `lazy` reads the same lines from the source, and imports a module when one of its names is first used.
A name of the package costs the modules that it needs, and no more. A wrong name, or a wrong argument of one of its
classes, is answered with the one that is alike.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import near_arguments, nearest

LABORATORY = ("lightning_fabric", "matplotlib", "rich", "scipy", "tyro")  # what the extra `lab` of pyproject.toml adds
# What these packages offer is listed only where these libraries are installed.
_NEEDS = {"mnemos.lab": LABORATORY, "mnemos.hugging_face": ("transformers",)}


def find_missing(libraries: Iterable[str]) -> list[str]:
    """Those of some libraries that are not installed."""
    return [name for name in libraries if importlib.util.find_spec(name) is None]


@functools.cache
def _hidden() -> tuple[str, ...]:
    """What the modules begin with whose names are not listed here."""
    return tuple(f"{package}." for package, libraries in _NEEDS.items() if find_missing(libraries))


def read_face(package: str) -> dict[str, str]:
    """The names that the imports under TYPE_CHECKING of an imported package list, each with the module that has it.

    A module itself (`from . import ops as ops`) has its own name.
    """
    tree = ast.parse(Path(sys.modules[package].__file__ or "").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: f"{package}.{node.module or alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }


def lazy(
    package: str, *own: str, load: Callable[[str], ModuleType] = importlib.import_module
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    own: public names that `__init__.py` itself defines. load: what imports one of the package's modules.
    """
    names = read_face(package)
    listed = sorted([*(name for name, module in names.items() if not f"{module}.".startswith(_hidden())), *own])

    def find(name: str) -> Any:
        module = names.get(name, f"{package}.{name}")
        if name not in names and (name.startswith("_") or importlib.util.find_spec(module) is None):
            near = None if name.startswith("_") else nearest(name, listed)
            hint = f"; did you mean {near!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        loaded = load(module)
        value = loaded if module == f"{package}.{name}" else getattr(loaded, name)
        init = vars(value).get("__init__") if isinstance(value, type) else None
        # Classes with slots are states, which are made for each token.
        if init is not None and not hasattr(init, "__wrapped__") and "__slots__" not in vars(value):
            type.__setattr__(value, "__init__", near_arguments(init, name))
        setattr(sys.modules[package], name, value)  # the next time, Python finds it by itself
        return value

    return find, lambda: listed, listed
