"""What the source files of the package define, read by griffe without importing them: origin, signature, docstring."""

import builtins
import re
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = griffe.load("mnemos", search_paths=[SOURCE], allow_inspection=False)


def find(path: str) -> griffe.Object | None:
    """The definition of a full path, through imports; None for a module, and for what is not of this package."""
    try:
        found = PACKAGE.modules_collection[path]
        found = found.final_target if found.is_alias else found
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    return None if found.is_module else found


def kind(found: griffe.Object) -> str:
    """As Sphinx calls it."""
    if not found.is_class:
        return "function" if found.is_function else "data"
    theirs = (getattr(builtins, str(base), None) for one in [found, *found.mro()] for base in one.bases)
    raised = any(isinstance(one, type) and issubclass(one, BaseException) for one in theirs)
    return "exception" if raised else "class"


def documentation(found: griffe.Object) -> str:
    """The docstring; of a value, the comment beside or above it."""
    if not found.is_attribute or "property" in found.labels:
        return found.docstring.value if found.docstring else ""
    lines = found.filepath.read_text().splitlines()
    beside = re.search(r"  # (.*)$", lines[found.lineno - 1])
    above: list[str] = []
    for line in reversed(lines[: found.lineno - 1]):
        if not line.startswith("# "):
            break
        above.insert(0, line[2:])
    return "\n".join(above) or (beside[1] if beside else "")


def signature(function: griffe.Function, bound: bool = False) -> str:
    """The parameters and the result of a function. bound: without its first parameter."""
    parameters = griffe.Parameters(*list(function.parameters)[bound:])
    return griffe.Function("", parameters=parameters, returns=function.returns).signature(return_type=True)


def class_signature(cls: griffe.Class) -> str:
    """What a class is called with, or "" where its base of another library says it."""
    if "__init__" in cls.all_members:
        return signature(cls.all_members["__init__"], bound=True).partition(" -> ")[0]
    if "NamedTuple" in map(str, cls.bases):
        named = [griffe.Parameter(n, annotation=x.annotation, default=x.value) for n, x in fields(cls).items()]
        return griffe.Function("", parameters=griffe.Parameters(*named)).signature()
    return ""


def fields(cls: griffe.Class) -> dict[str, griffe.Attribute]:
    """The annotated names of a class and its bases."""
    found = [item for one in [cls, *cls.mro()] for item in one.members.items()]
    return {n: x for n, x in found if x.is_attribute and x.annotation is not None and "instance-attribute" in x.labels}


def members(cls: griffe.Class) -> list[griffe.Object]:
    """The public methods and properties of a class that say what they do, with those of its private bases.

    One without a docstring is what the class's own says, as most `forward` and `build` are.
    """
    found: dict[str, griffe.Object] = {}
    for owner in [cls, *filter(is_private, cls.mro())]:
        found |= {name: one for name, one in owner.members.items() if name[0] != "_" and name not in found}
    return [one for one in found.values() if (one.is_function or "property" in one.labels) and documentation(one)]


def is_private(found: griffe.Object) -> bool:
    """Whether it has no entry."""
    return "._" in found.path
