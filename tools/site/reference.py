"""The API reference: a page for each room, of directives by which Sphinx's autodoc writes what names are and take.

It has the names that the packages list, with all functions and classes of a few modules that list none, and those that
a page imports. A name has one entry, under its shortest path, on the page of the room that defines it.
"""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import docstrings

import mnemos

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mnemos"
# A page: its title, and the rooms that are on it.
PAGES = {
    "types": ("States and protocols", ("types", "state_file")),
    "attention": ("Attention layers", ("attention",)),
    "memory": ("Memories", ("memory",)),
    "models": ("Models", ("models",)),
    "ops": ("Operators", ("ops",)),
    "memory_replay": ("Replay", ("memory_replay",)),
    "generate": ("Generation", ("generate",)),
    "hosts": ("Memories in other models", ("hosts",)),
    "hugging_face": ("Hugging Face", ("hugging_face",)),
    "trainers": ("Trainers of other libraries", ("trainers",)),
    "programs": ("Export", ("programs",)),
    "testing": ("Tests of a memory", ("testing",)),
    "registry": ("Configurations, registry, errors", ("registry", "config", "errors")),
    "libraries": ("Kernels and optional libraries", ("native", "libraries")),
    "lab": ("The laboratory", ("lab",)),
}
PAGE_OF = {room: page for page, (_, rooms) in PAGES.items() for room in rooms}
# Modules of which all functions and classes are public: `mnemos.__all__` names them, and they have no `__all__`.
WHOLE = ("types", "registry", "libraries")


class Entry(NamedTuple):
    """A public name: its path on the site, what it is, the module that defines it, and what it says of itself."""

    path: str
    what: Any
    module: str
    documentation: str

    @property
    def kind(self) -> str:
        """As Sphinx calls it."""
        if not _is_ours(self.what):
            return "data"
        if inspect.isclass(self.what):
            return "exception" if issubclass(self.what, BaseException) else "class"
        return "function"

    @property
    def members(self) -> list[str]:
        """The methods and properties of a class that say what they do, with those of its private bases."""
        properties = property, functools.cached_property, classmethod, staticmethod
        owners = [one for one in _bases(self.what) if one is self.what or _is_private(one)]
        found = {name: one for owner in reversed(owners) for name, one in vars(owner).items() if name[0] != "_"}
        return [n for n, x in found.items() if x.__doc__ and (inspect.isroutine(x) or isinstance(x, properties))]


def resolve(path: str) -> Any:
    """The object of a full path; None where there is none."""
    module, _, name = path.rpartition(".")
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        return getattr(importlib.import_module(module), name)
    return None


def _is_ours(what: Any) -> bool:
    """Whether it is a class or a function of this package, and no value."""
    return hasattr(what, "__qualname__") and (what.__module__ or "").startswith("mnemos")


def _is_private(cls: type) -> bool:
    return "._" in f"{cls.__module__}.{cls.__qualname__}"


def _bases(what: Any) -> list[type]:
    """A class and its bases, those of this package."""
    return [one for one in what.__mro__ if _is_ours(one)] if inspect.isclass(what) else []


def _entry(path: str, what: Any) -> Entry:
    if _is_ours(what):
        return Entry(path, what, what.__module__, what.__doc__ or "")
    # A value says what it is in a comment beside or above it, in a file of the room that lists it.
    name, room = path.rpartition(".")[2], path.split(".")[1]
    line = re.compile(rf"((?:^# .*\n)*)^{name}\b[^=\n]*= .*?(?:  # (.*))?$", re.MULTILINE)
    for file in [PACKAGE / "types.py", *sorted((PACKAGE / room).rglob("*.py"))]:
        if match := line.search(file.read_text()):
            module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
            return Entry(path, what, module, match[2] or re.sub("^# ", "", match[1], flags=re.MULTILINE))
    raise ValueError(f"{path}: it is listed as public, and no file of {room} assigns it")


def _public_paths() -> Iterator[str]:
    """The full paths of all public names; some of them are modules."""
    packages = [one.name for one in pkgutil.walk_packages(mnemos.__path__, "mnemos.") if one.ispkg]
    for package in ("mnemos", *packages):
        listed = getattr(importlib.import_module(package), "__all__", ())
        yield from (f"{package}.{name}" for name in listed if name[0] != "_" and name != "BACKENDS")
    for room in WHOLE:
        own = vars(importlib.import_module(f"mnemos.{room}")).items()
        of_room = (name for name, x in own if _is_ours(x) and x.__module__ == f"mnemos.{room}")
        yield from (f"mnemos.{room}.{name}" for name in of_room if name[0] != "_")
    # What README, CONTRIBUTING and the pages of docs/ import, or name in full.
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    yield from re.findall(r"\bmnemos(?:\.[a-z_]+)+\.[A-Za-z]\w+\b", text)
    for module, names in re.findall(r"^\s*from (mnemos[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        yield from (f"{module}.{name}" for name in re.split(r"[, ]+", names) if name)


@functools.cache
def entries() -> list[Entry]:
    """The entries of all pages, by module and name; also the public bases of public classes."""
    found: dict[tuple[str, str], Entry] = {}

    def add(path: str, what: Any) -> None:
        if what is not None and not inspect.ismodule(what):
            entry = _entry(path, what)
            found.setdefault((entry.module, path.rpartition(".")[2]), entry)

    for path in sorted(set(_public_paths()), key=lambda path: (path.count("."), path)):
        add(path, resolve(path))
    for entry in list(found.values()):
        for base in _bases(entry.what):
            if not _is_private(base):
                add(f"{base.__module__}.{base.__qualname__}", base)
    return sorted(found.values(), key=lambda entry: (entry.module, entry.path.rpartition(".")[2].lower()))


def parameters(path: str, what: Any) -> set[str]:
    """The names that the docstring of an object may explain: its parameters, and the fields of its class."""
    found: set[str] = set()
    for one in (what, resolve(path.rpartition(".")[0])):
        with contextlib.suppress(TypeError, ValueError):
            found |= set(inspect.signature(one).parameters)
        for base in _bases(one):
            found |= set(vars(base).get("__annotations__", ()))
    return found


# ---- reStructuredText


def text_of(documentation: str, known: set[str], module: str) -> str:
    """A docstring, in which the README.md of an operator is a link to its page."""
    text = docstrings.text_of(documentation, known)
    operator = re.match(r"mnemos\.ops\.(\w+)", module)
    if operator is None or not (PACKAGE / "ops" / operator[1] / "README.md").exists():
        return text
    return re.sub(r"(?<![`/\w])README\.md", f":doc:`README.md </operators/{operator[1]}>`", text)


def page(name: str) -> str:
    """A page of the reference."""
    title, rooms = PAGES[name]
    text, module = [_heading(title, "=")], ""
    text += [docstrings.text_of(importlib.import_module(f"mnemos.{room}").__doc__ or "", set()) for room in rooms]
    for entry in entries():
        _, room, *inside = entry.module.split(".")
        if room not in PAGE_OF:
            raise ValueError(f"{entry.path}: expected room {room} on a page, found it on none; see PAGES in {__file__}")
        if room not in rooms:
            continue
        if entry.module != module:
            module = entry.module
            text.append(_heading(module.removeprefix("mnemos."), "-"))
            said = (importlib.import_module(module).__doc__ or "").split("\n\n")[0]
            text += [text_of(said, set(), module)] if inside else []
        text.append(_directive(entry))
    return "\n\n".join(text) + "\n"


def _heading(title: str, under: str) -> str:
    return f"{title}\n{under * len(title)}"


def _directive(entry: Entry) -> str:
    if entry.kind == "data":
        return f".. py:data:: {entry.path}\n\n" + docstrings.indented(text_of(entry.documentation, set(), entry.module))
    bases = [one for one in _bases(entry.what) if one is not entry.what and not _is_private(one)]
    options = ["   :show-inheritance:"] if bases else []
    options += [f"   :members: {', '.join(entry.members)}"] if entry.members else []
    return "\n".join([f".. auto{entry.kind}:: {entry.path}", *options])


def index() -> str:
    """The first page of the reference: its pages, and the names of `mnemos` itself."""
    toctree = "\n".join(f"   {title} <{name}>" for name, (title, _) in PAGES.items())
    rows = []
    for entry in sorted((e for e in entries() if e.path.count(".") == 1), key=lambda e: e.path.lower()):
        first = " ".join(entry.documentation.split("\n\n")[0].split())
        first = docstrings.escape(re.split(r"(?<=\.) (?=[A-Z])|: (?=`)|:$|\.$", first)[0])
        rows.append(f"   * - ``{entry.path}``\n     - {first}")
    return "\n\n".join([
        _heading("API reference", "="),
        "All :doc:`public names </policy>`, written from their docstrings. Axes of shapes, in this order: B batch, "
        "T tokens, D width, H heads, M width of a head's values; N sequence length, K slots.",
        f".. toctree::\n   :maxdepth: 1\n\n{toctree}",
        _heading("The names of mnemos", "-"),
        "``import mnemos`` has these. Each package has more, on its page.",
        ".. list-table::\n   :header-rows: 1\n\n   * - name\n     - what it is\n" + "\n".join(rows),
    ]) + "\n"  # fmt: skip
