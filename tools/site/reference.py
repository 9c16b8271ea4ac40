"""The pages of the API reference: every public name with its signature and its docstring, as Markdown for the site.

Public are the names that docs/policy.md calls so: those of `mnemos.__all__`, of the `__all__` of its packages, and
those that a page imports. A name has one entry, under its shortest path, on the page of the room that defines it.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import docstrings
import griffe
import source
from source import PACKAGE, ROOT, SOURCE

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
# Modules of which all functions and classes are public: `mnemos.__all__` names them, and they have no `__all__`.
WHOLE = ("types", "registry", "libraries")


@dataclass(frozen=True, eq=False)
class Entry:
    """A public name: its definition, and its paths, the shortest first."""

    definition: griffe.Object
    paths: list[str]

    @property
    def path(self) -> str:
        """The path that the entry has on the site."""
        return self.paths[0]

    @property
    def module(self) -> str:
        """The module that defines it."""
        return self.definition.module.path

    @property
    def page(self) -> str:
        """The page that the entry is on."""
        room = self.module.split(".")[1]
        found = [page for page, (_, rooms) in PAGES.items() if room in rooms]
        if not found:
            raise ValueError(f"{self.path}: expected room {room} on a page, found it on none; see PAGES in {__file__}")
        return found[0]

    @functools.cached_property
    def members(self) -> list[griffe.Object]:
        """The methods and properties of a class."""
        return source.members(self.definition) if self.definition.is_class else []


def public_paths() -> list[str]:
    """The full paths of all public names, the shortest first."""
    found = {path for path in imported_by_pages() if source.find(path) is not None}
    for package in [PACKAGE, *_packages(PACKAGE)]:
        names = package.exports
        if "lazy" in package.members:  # of mnemos.face: what is imported for type checkers, and its own functions
            every = {name: one for name, one in package.members.items() if name[0] != "_" and name != "lazy"}
            names = [name for name, one in every.items() if (_is_of(one, package) if one.is_alias else one.is_function)]
        found |= {f"{package.path}.{name}" for name in names or () if name != "BACKENDS"}
    for room in WHOLE:
        own = (one for one in PACKAGE[room].members.values() if not one.is_alias and one.name[0] != "_")
        found |= {one.path for one in own if one.is_class or one.is_function}
    return sorted(found, key=lambda path: (path.count("."), path))


def _is_of(name: griffe.Alias, package: griffe.Module) -> bool:
    found = source.find(name.path)
    return found is not None and found.path.startswith(f"{package.path}.")


def _packages(package: griffe.Module) -> Iterator[griffe.Module]:
    for one in package.modules.values():
        if one.is_package or one.is_subpackage:
            yield one
            yield from _packages(one)


def imported_by_pages() -> set[str]:
    """The full paths that README, CONTRIBUTING and the pages of docs/ import, or name in full."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    found = set(re.findall(r"\bmnemos(?:\.[a-z_]+)+\.[A-Za-z]\w+\b", text))
    for module, names in re.findall(r"^\s*from (mnemos[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        found |= {f"{module}.{name}" for name in re.split(r"[, ]+", names) if name}
    return found


@functools.cache
def entries() -> list[Entry]:
    """The entries of all pages, by page, module and name; also the bases of public classes."""
    found: dict[str, Entry] = {}
    for path in public_paths():
        definition = source.find(path)
        if definition is None:
            raise ValueError(f"{path}: it is listed as public, and no file defines it")
        found.setdefault(definition.path, Entry(definition, [])).paths.append(path)
    for entry in list(found.values()):
        for base in entry.definition.mro() if entry.definition.is_class else ():
            if not source.is_private(base):
                found.setdefault(base.path, Entry(base, [base.path]))
    order = list(PAGES)
    return sorted(found.values(), key=lambda e: (order.index(e.page), e.module, e.definition.name.lower()))


@functools.cache
def targets() -> dict[str, str]:
    """What text may call an entry or a member: all of its paths, and a short name that no other has; its path."""
    found, short = {}, {}
    for entry in entries():
        name = entry.path.rpartition(".")[2]
        for suffix in ("", *(f".{member.name}" for member in entry.members)):
            for path in [*entry.paths, entry.definition.path]:
                found[path + suffix] = entry.path + suffix
            short.setdefault(name + suffix, set()).add(entry.path + suffix)
    return {**{name: min(paths) for name, paths in short.items() if len(paths) == 1}, **found}


# ---- Markdown


def _directive(kind: str, head: str, body: str, depth: int, **options: str) -> str:
    lines = [f":{name}: {value}".rstrip() for name, value in options.items()]
    inner = "\n".join([*lines, "", body.strip()]).rstrip()
    return f"{':' * depth}{{py:{kind}}} {head}\n{inner}\n{':' * depth}"


def _parameters(signature: str) -> set[str]:
    return set(re.findall(r"[(,*]\s*\*{0,2}([A-Za-z_]\w*)", signature))


def _clear(signature: str, module: str) -> str:
    """A signature in which the types that have an entry are named in full, as Sphinx links them."""

    def full(match: re.Match[str]) -> str:
        found = source.find(f"{module}.{match[0]}")
        return match[0] if found is None else targets().get(found.path, match[0])

    return re.sub(r"(?<![\w.'\"])[A-Z]\w+(?![\w('\"])", full, signature)


def _member(member: griffe.Object, known: set[str], module: str) -> str:
    name, said = member.name, source.documentation(member)
    if not member.is_function:
        kind, options = "property", {"type": _clear(str(member.annotation or ""), module)}
    else:
        kind, options = "method", dict.fromkeys(member.labels & {"staticmethod", "classmethod"}, "")
        name += _clear(source.signature(member, "staticmethod" not in options), module)
    return _directive(kind, name, docstrings.markdown(said, known | _parameters(name)), 3, **options)


def _entry(entry: Entry) -> str:
    definition, kind = entry.definition, source.kind(entry.definition)
    options = {"canonical": definition.path} if definition.path != entry.path else {}
    said, head = source.documentation(definition), ""
    if kind == "function":
        head = source.signature(definition)
    elif kind != "data":
        head = source.class_signature(definition)
    head = _clear(head, entry.module)
    known = _parameters(head) | set(source.fields(definition) if definition.is_class else ())
    body = [docstrings.markdown(said, known)]
    if definition.is_class:
        inherits = [base.path for base in definition.resolved_bases if not source.is_private(base)]
        body += ["Base: " + ", ".join(f"`{path}`" for path in inherits) + "."] * bool(inherits)
        body += [_member(member, known, entry.module) for member in entry.members]
    return _directive(kind, entry.path + head, "\n\n".join(body), 4, **options)


def page(name: str) -> str:
    """A page of the reference."""
    title, rooms = PAGES[name]
    found = [entry for entry in entries() if entry.page == name]
    text = [f"# {title}"]
    text += [docstrings.markdown(PACKAGE[room].docstring.value, set()) for room in rooms]
    module = ""
    for entry in found:
        if entry.module != module:
            module = entry.module
            text.append(f"## {module.removeprefix('mnemos.')}")
            if module.removeprefix("mnemos.") not in rooms:
                said = PACKAGE[module.removeprefix("mnemos.")].docstring.value.split("\n\n")[0]
                text.append(_with_operator(docstrings.markdown(said, set()), module))
        text.append(_with_operator(_entry(entry), module))
    return "\n\n".join(text) + "\n"


def _with_operator(text: str, module: str) -> str:
    """A text in which the README.md of an operator is a link to its page."""
    operator = re.match(r"mnemos\.ops\.(\w+)", module)
    if operator is None or not (SOURCE / "mnemos" / "ops" / operator[1] / "README.md").exists():
        return text
    return re.sub(r"(?<![`/\w])README\.md", f"[README.md](../operators/{operator[1]}.md)", text)


def first_sentence(documentation: str) -> str:
    """The first sentence of a docstring, as Markdown for a table."""
    first = " ".join(documentation.split("\n\n")[0].split())
    return docstrings.escape(re.split(r"(?<=\.) (?=[A-Z])|: (?=`)|:$|\.$", first)[0])


def index() -> str:
    """The first page of the reference: its pages, and the names of `mnemos` itself."""
    toctree = "\n".join(f"{title} <{name}>" for name, (title, _) in PAGES.items())
    names = sorted((e for e in entries() if e.path.count(".") == 1), key=lambda e: e.path.lower())
    rows = [f"| `{entry.path}` | {first_sentence(source.documentation(entry.definition))} |" for entry in names]
    return "\n".join([
        "# API reference\n",
        "All [public names](../policy.md), written from their docstrings. Axes of shapes, in this order: B batch, "
        "T tokens, D width, H heads, M width of a head's values; N sequence length, K slots.\n",
        f"```{{toctree}}\n:maxdepth: 1\n\n{toctree}\n```\n",
        "## The names of mnemos\n",
        "`import mnemos` has these. Each package has more, on its page.\n",
        "| name | what it is |\n|---|---|",
        *rows,
    ]) + "\n"  # fmt: skip
