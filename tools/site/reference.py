"""The pages of the API reference: every public name with its signature and its docstring, as Markdown for the site.

Public are the names that docs/policy.md calls so: those of `mnemos.__all__`, of the `__all__` of its packages, and
those that a page imports. A name has one entry, under its shortest path, on the page of the room that defines it.
"""

import functools
import importlib
import importlib.util
import re
from dataclasses import dataclass

import docstrings
import source
from source import ROOT, SOURCE, Definition

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

    definition: Definition
    paths: list[str]

    @property
    def path(self) -> str:
        """The path that the entry has on the site."""
        return self.paths[0]

    @property
    def page(self) -> str:
        """The page that the entry is on."""
        room = self.definition.module.split(".")[1]
        found = [page for page, (_, rooms) in PAGES.items() if room in rooms]
        if not found:
            raise ValueError(f"{self.path}: expected room {room} on a page, found it on none; see PAGES in {__file__}")
        return found[0]


def public_paths() -> list[str]:
    """The full paths of all public names, the shortest first. Imports the packages, to read their `__all__`."""
    names = importlib.import_module("mnemos").__all__
    found = {f"mnemos.{name}" for name in names if name[0] != "_" and not _is_module(f"mnemos.{name}")}
    for file in (SOURCE / "mnemos").glob("**/__init__.py"):
        package = ".".join(file.parent.relative_to(SOURCE).parts)
        if package != "mnemos" and re.search(r"^__all__", file.read_text(), re.MULTILINE):
            found |= {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    found |= {f"mnemos.{room}.{name}" for room in WHOLE for name in source.own_names(f"mnemos.{room}")}
    return sorted(found | imported_by_pages(), key=lambda path: (path.count("."), path))


def _is_module(path: str) -> bool:
    return importlib.util.find_spec(path) is not None


def imported_by_pages() -> set[str]:
    """The full paths of what README, CONTRIBUTING and the pages of docs/ import, or name in full."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    found = set(re.findall(r"\bmnemos(?:\.[a-z_]+)+\.[A-Za-z]\w+\b", text))
    for module, names in re.findall(r"^\s*from (mnemos[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
        found |= {f"{module}.{name}" for name in re.split(r"[, ]+", names) if name}
    return {path for path in found if source.find(path) is not None}


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
        if isinstance(entry.definition.node, source.ast.ClassDef):
            for base in source.lineage(entry.definition)[1:]:
                if not _is_private(base):
                    found.setdefault(base.path, Entry(base, [base.path]))
    order = list(PAGES)
    return sorted(found.values(), key=lambda e: (order.index(e.page), e.definition.module, e.definition.name.lower()))


def _is_private(definition: Definition) -> bool:
    return "._" in definition.path


@functools.cache
def _members(entry: Entry) -> list[source.Member]:
    """The methods and properties of a class, with those of bases that have no entry."""
    if entry.definition.kind not in ("class", "exception"):
        return []
    private = [base for base in source.lineage(entry.definition)[1:] if _is_private(base)]
    return list(source.members(entry.definition, private))


def undocumented() -> list[str]:
    """The public names, methods and properties without a docstring."""
    found = [entry.path for entry in entries() if not entry.definition.documentation]
    return found + [f"{e.path}.{m.name}" for e in entries() for m in _members(e) if not m.documentation]


@functools.cache
def targets() -> dict[str, str]:
    """What text may call an entry or a member: all of its paths, and a short name that no other has; its path."""
    found, short = {}, {}
    for entry in entries():
        name = entry.path.rpartition(".")[2]
        for suffix in ("", *(f".{member.name}" for member in _members(entry))):
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


def _member(member: source.Member, known: set[str], module: str) -> str:
    signature = _clear(member.signature, module)
    options = {member.option: signature if member.kind == "property" else ""} if member.option else {}
    head = member.name + (signature if member.kind == "method" else "")
    body = docstrings.markdown(member.documentation, known | _parameters(head))
    return _directive(member.kind, head, body, 3, **options)


def _entry(entry: Entry) -> str:
    definition, node = entry.definition, entry.definition.node
    options = {"canonical": definition.path} if definition.path != entry.path else {}
    if definition.kind == "data":
        return _directive("data", entry.path, docstrings.markdown(definition.documentation, set()), 4, **options)
    if definition.kind == "function":
        signature = _clear(source.function_signature(node), definition.module)
        body = docstrings.markdown(definition.documentation, _parameters(signature))
        return _directive("function", entry.path + signature, body, 4, **options)
    signature = _clear(source.class_signature(definition), definition.module)
    known = _parameters(signature) | source.fields(definition)
    body = [docstrings.markdown(definition.documentation, known)]
    inherits = [base.path for base in source.bases(definition) if not _is_private(base)]
    if inherits:
        body.append("Base: " + ", ".join(f"`{path}`" for path in inherits) + ".")
    body += [_member(member, known, definition.module) for member in _members(entry)]
    return _directive(definition.kind, entry.path + signature, "\n\n".join(body), 4, **options)


def page(name: str) -> str:
    """A page of the reference."""
    title, rooms = PAGES[name]
    found = [entry for entry in entries() if entry.page == name]
    text = [f"# {title}"]
    text += [docstrings.markdown(source.module_documentation(f"mnemos.{room}"), set()) for room in rooms]
    module = ""
    for entry in found:
        if entry.definition.module != module:
            module = entry.definition.module
            text.append(f"## {module.removeprefix('mnemos.')}")
            if module.removeprefix("mnemos.") not in rooms:
                said = source.module_documentation(module).split("\n\n")[0]
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
    rows = [f"| `{entry.path}` | {first_sentence(entry.definition.documentation)} |" for entry in names]
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
