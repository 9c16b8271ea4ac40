"""The task of each recipe, read from the source without importing it: `mnemos list` groups the recipes by it."""

import ast
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from mnemos import registry

_OURS = "mnemos"
_PACKAGE = Path(str(registry.__file__)).parent
_RECIPES = (f"{_OURS}.lab.recipes.", f"{_OURS}.lab.papers.")  # the packages of recipes and their functions


def recipe_tasks() -> dict[str, str]:
    """{recipe: the name of its task, as its data configuration is registered}; "" where it cannot be found.

    The recipe's function is followed through the functions and constants that it names, also those of other modules of
    recipes, to the nearest one that names a registered data class. Cost: each module is parsed once. A recipe of
    another package is called.
    """
    ours = registry.places("recipe")
    classes = {(place.module, place.attribute): name for name, place in registry.places("data").items()}
    found = dict.fromkeys(ours, "")
    for name, place in ours.items():
        if place.module.partition(".")[0] == _OURS:
            found[name] = _task(place.module, place.attribute, classes)
        else:
            with contextlib.suppress(Exception):  # a faulty recipe must not make the others unusable
                found[name] = str(registry.load("recipe", name)().data.name)
    return found


def _task(module: str, attribute: str, classes: dict[tuple[str, str], str]) -> str:
    """The task of the data class that is the fewest names away; of several, the outermost in the source."""
    seen, near = set(), [(module, attribute)]
    while near:
        further = []
        for here, name in near:
            if (here, name) in classes:
                return classes[here, name]
            if here.startswith(_RECIPES) and (here, name) not in seen:
                seen.add((here, name))
                further += _named(here).get(name, [])
        near = further
    return ""


@functools.cache
def _named(module: str) -> dict[str, list[tuple[str, str]]]:
    """{name at the top of a module of this package: the (module, name) of what its definition names}."""
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = dict(_imports(tree, module.rpartition(".")[0]))
    found: dict[str, list[tuple[str, str]]] = {name: [place] for name, place in imported.items()}
    for node in tree.body:
        names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else _assigned(node)
        inside = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        for name in names:
            found[name] = [imported.get(other, (module, other)) for other in inside if other != name]
    return found


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """(local name, (module, name)) of what a module of `package` imports from modules of this package."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.partition(".")[0] == _OURS:
                yield from ((alias.asname or alias.name, (module, alias.name)) for alias in node.names)


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
