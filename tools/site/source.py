"""What the source files of the package define, read without importing them: a name's origin, signature, docstring."""

import ast
import builtins
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


class Definition(NamedTuple):
    """A function, a class or a value: its module, its qualified name there, and its node in the module's tree."""

    module: str
    name: str
    node: ast.stmt

    @property
    def path(self) -> str:
        """Where it is defined."""
        return f"{self.module}.{self.name}"

    @property
    def kind(self) -> str:
        """As Sphinx calls it."""
        if isinstance(self.node, ast.ClassDef):
            return "exception" if _is_exception(self) else "class"
        return "function" if isinstance(self.node, ast.FunctionDef) else "data"

    @property
    def documentation(self) -> str:
        """The docstring; of a value, the comment beside or above it."""
        if isinstance(self.node, ast.ClassDef | ast.FunctionDef):
            return ast.get_docstring(self.node) or ""
        lines = file_of(self.module).read_text().splitlines()
        beside = re.search(r"  # (.*)$", lines[self.node.lineno - 1])
        above = []
        for line in reversed(lines[: self.node.lineno - 1]):
            if not line.startswith("# "):
                break
            above.insert(0, line[2:])
        return "\n".join(above) or (beside[1] if beside else "")


def file_of(module: str) -> Path:
    """The file of a module or package. Raises FileNotFoundError where there is none."""
    path = SOURCE / module.replace(".", "/")
    found = path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")
    if not found.exists():
        raise FileNotFoundError(found)
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    """The syntax of a module."""
    return ast.parse(file_of(module).read_text())


def module_documentation(module: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(tree(module)) or ""


@functools.cache
def _names(module: str) -> dict[str, ast.stmt | tuple[str, str]]:
    """What each name of a module is: its definition, or (the module that it is imported from, its name there)."""
    found: dict[str, ast.stmt | tuple[str, str]] = {}
    package = module if file_of(module).name == "__init__.py" else module.rpartition(".")[0]

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found.update({one.id: node for one in ast.walk(target) if isinstance(one, ast.Name)})
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                origin = ".".join([*parts, *filter(None, [node.module])])
                found.update({alias.asname or alias.name: (origin, alias.name) for alias in node.names})
            elif isinstance(node, ast.If | ast.Try):
                visit(node.body)

    visit(tree(module).body)
    return found


def find(path: str) -> Definition | None:
    """The definition of a full path, through imports; None for a module, and for what is not of this package."""
    module, _, name = path.rpartition(".")
    if not module.startswith("mnemos"):
        return None
    try:
        found = _names(module).get(name)
    except FileNotFoundError:
        return None
    if isinstance(found, tuple):
        origin = ".".join(found)
        return None if (SOURCE / origin.replace(".", "/")).is_dir() or origin == path else find(origin)
    return None if found is None else Definition(module, name, found)


def own_names(module: str) -> list[str]:
    """The functions and classes that a module defines, without underscores."""
    found = _names(module).items()
    return [name for name, node in found if isinstance(node, ast.ClassDef | ast.FunctionDef) and name[0] != "_"]


def bases(cls: Definition) -> list[Definition]:
    """The base classes of a class that are of this package."""
    assert isinstance(cls.node, ast.ClassDef)
    named = (base.value if isinstance(base, ast.Subscript) else base for base in cls.node.bases)
    found = (find(f"{cls.module}.{base.id}") for base in named if isinstance(base, ast.Name))
    return [one for one in found if one is not None and isinstance(one.node, ast.ClassDef)]


def lineage(cls: Definition) -> list[Definition]:
    """A class and what it inherits from in this package, the class first."""
    found = [cls]
    for base in bases(cls):
        found += [one for one in lineage(base) if one not in found]
    return found


def _base_names(cls: Definition) -> set[str]:
    return {ast.unparse(base).partition("[")[0] for one in lineage(cls) for base in one.node.bases}


def _is_exception(cls: Definition) -> bool:
    found = (getattr(builtins, name, None) for name in _base_names(cls))
    return any(isinstance(one, type) and issubclass(one, BaseException) for one in found)


def _decorators(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    return {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}


# ---- signatures, as the source has them


def annotation(node: ast.expr | None) -> str:
    """An annotation, without quotation marks."""
    if node is None:
        return ""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def function_signature(node: ast.FunctionDef, bound: bool = False) -> str:
    """The parameters and the result of a function. bound: without its first parameter."""
    args = ast.parse(ast.unparse(node)).body[0].args
    if bound:
        del (args.posonlyargs or args.args)[0]
    for one in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
        if one is not None and one.annotation is not None:
            one.annotation = ast.Name(annotation(one.annotation))
    result = annotation(node.returns)
    return f"({ast.unparse(args)})" + (f" -> {result}" if result else "")


def class_signature(cls: Definition) -> str:
    """What a class is called with, or "" where its base of another library says it."""
    for one in lineage(cls):
        for node in one.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return function_signature(node, bound=True).partition(" -> ")[0]
    if "NamedTuple" in _base_names(cls) or any("dataclass" in _decorators(one.node) for one in lineage(cls)):
        found = {name: node for one in reversed(lineage(cls)) for name, node in _field_nodes(one)}
        return f"({', '.join(text for name, node in found.items() if (text := _field(name, node)))})"
    return ""


def _field_nodes(cls: Definition) -> Iterator[tuple[str, ast.AnnAssign]]:
    for node in cls.node.body:
        field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if field and not ast.unparse(node.annotation).startswith("ClassVar"):
            yield node.target.id, node


def _field(name: str, node: ast.AnnAssign) -> str:
    """A field as a parameter; "" if it is none."""
    text = ast.unparse(node.value) if node.value is not None else ""
    if re.match(r"(dataclasses\.)?field\(", text):
        if "init=False" in text:
            return ""
        made = re.search(r"default(_factory)?=(\w+)", text)
        text = "" if made is None else f"{made[2]}()" if made[1] else made[2]
    return f"{name}: {annotation(node.annotation)}" + (f"={text}" if text else "")


def fields(cls: Definition) -> set[str]:
    """The annotated names of a class and its bases."""
    return {name for one in lineage(cls) for name, _ in _field_nodes(one)}


class Member(NamedTuple):
    """A method or property: the directive's kind, its name, signature or type, what it is, and its docstring."""

    kind: str
    name: str
    signature: str
    option: str
    documentation: str


def members(cls: Definition, inherited: list[Definition]) -> Iterator[Member]:
    """The public methods and properties that a class defines, or those of its bases that are given."""
    seen: set[str] = set()
    for one in [cls, *inherited]:
        for node in one.node.body:
            if not isinstance(node, ast.FunctionDef) or node.name[0] == "_" or node.name in seen:
                continue
            found = _decorators(node)
            if found & {"setter", "deleter", "overload"}:
                continue
            seen.add(node.name)
            said = ast.get_docstring(node) or ""
            if found & {"property", "cached_property"}:
                yield Member("property", node.name, annotation(node.returns), "type", said)
            else:
                option = next(iter(found & {"staticmethod", "classmethod"}), "")
                yield Member("method", node.name, function_signature(node, option != "staticmethod"), option, said)
