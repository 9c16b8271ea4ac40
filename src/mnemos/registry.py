"""The registry: names used in the command line and in recipe.json, with the class or function that each one names.

There are five kinds of names. "attention", "model" and "data" (tasks) name configuration classes: frozen dataclasses
with `build(...)`, decorated with `register`. "preprocessing" names the classes by which `mnemos predict` reads files,
decorated in the same way. "recipe" names functions that return a `Recipe`, decorated with
`mnemos.lab.run.recipe.recipe`. Entries of this package are found by parsing the source files of the sub-packages that
hold their kind, so a new file needs no line here. Parsing does not import, so `mnemos list` does not load torch; `load`
imports only the module that defines an entry.

Other packages register their entries with the same decorators. The command line finds these packages through the
entry-point group `mnemos.plugins`. Each entry point is a module to import, or a function without arguments to call. In
pyproject.toml:

    [project.entry-points."mnemos.plugins"]
    my-memory = "my_package.my_module"

Plug-ins are loaded when a name is not defined in this package, and for `mnemos list`. A single file needs no package:
`load_file` imports it, for `mnemos train my_file.py` and `--plugin my_file.py`. tests/test_contracts.py tests every
attention and model that this package registers.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .errors import InputError

KINDS = ("attention", "model", "data", "recipe", "preprocessing")
GROUP = "mnemos.plugins"

# For each kind: its decorator, and the sub-packages whose files define this package's entries.
_MODELS = ("lab/vision/classifiers", "lab/vision/detectors", "lab/speech/models")
_TASKS = ("lab/tasks", "lab/vision/detection", "lab/translation", "lab/speech/recordings")
_WRITTEN = {
    "attention": ("register", ("attention",)),
    "model": ("register", ("models", "hugging_face", *_MODELS)),
    "data": ("register", _TASKS),
    "recipe": ("recipe", ("lab/recipes", "lab/papers")),
    "preprocessing": ("register", _TASKS),
}
# What to use instead of a name that this package had.
_RENAMED = {("attention", "lsh"): "use 'bucket-union', its new name, or 'reformer', the attention as published"}
_PACKAGE = Path(__file__).parent
_Class = TypeVar("_Class", bound=type)


class Definition(NamedTuple):
    """Where an entry is defined, and the first line of its docstring without the final full stop."""

    module: str
    attribute: str
    about: str

    def __str__(self) -> str:
        return f"{_files.get(self.module, self.module)}:{self.attribute}"


class _Entry(NamedTuple):
    place: Definition
    value: Any


_registered: dict[str, dict[str, _Entry]] = {kind: {} for kind in KINDS}
_failures: list[str] | None = None  # None: no plug-in has been loaded yet
_files: dict[str, Path] = {}  # the file of each module that `load_file` imported


def register(cls: _Class) -> _Class:
    """Class decorator: register a configuration class under its `kind` and `name`; returns the class.

        @mnemos.register
        @dataclass(frozen=True)
        class DecayConfig(AttentionConfig):
            \"""One line that `mnemos list` shows.\"""

            name: ClassVar[str] = "decay"

    The class derives from `AttentionConfig`, `ModelConfig` or `DataConfig` of `mnemos.config`, or from
    `mnemos.lab.tasks.preprocessing.Preprocessing`, which set `kind`.
    Recipes can then use the class, and recipe.json and `mnemos.load` find it by its name. Raises InputError if the
    class has no kind or name, or if a class defined elsewhere has the name.
    """
    kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
    if not isinstance(cls, type) or kind not in KINDS or not isinstance(name, str):
        raise InputError(
            f"register: expected a subclass of AttentionConfig, ModelConfig or DataConfig with a class "
            f"variable `name`, found {cls!r:.80}; add the base class or the variable"
        )
    add(kind, name, cls)
    return cls


def add(kind: str, name: str, value: type | Callable[..., object]) -> None:
    """Register a class or function of a kind under a name. `register` and `recipe` call this function.

    The same class or function may be registered again, for example when a module is reloaded. Raises InputError if the
    name belongs to a class or function that is defined elsewhere.
    """
    _check_kind(kind)
    place = Definition(value.__module__, value.__qualname__, first_line(value.__doc__))
    taken = _registered[kind].get(name)
    before = taken.place if taken else None
    if before is None and place.module.partition(".")[0] != __package__:
        before = _ours(kind).get(name)
    if before is not None and str(before) != str(place):
        raise InputError(
            f"expected a new name for the {kind} {place}, found {name!r}, which belongs to {before}; rename it"
        )
    _registered[kind][name] = _Entry(place, value)


def remove(kind: str, name: str) -> None:
    """Remove an entry that another package registered. Raises InputError if there is none."""
    _check_kind(kind)
    if name in _ours(kind) or _registered[kind].pop(name, None) is None:
        raise InputError(
            f"expected a {kind} that was registered from outside mnemos, found {name!r}; name a registered one"
        )


def places(kind: str) -> dict[str, Definition]:
    """Where each entry of a kind is defined, by name: this package's entries first, then those of other packages.

    Imports nothing. Cost: the first call for a kind parses its source files, which takes milliseconds.
    """
    _check_kind(kind)
    others = {name: entry.place for name, entry in _registered[kind].items() if name not in _ours(kind)}
    return {**_ours(kind), **others}


def names(kind: str) -> list[str]:
    """The names registered under a kind, one of `KINDS`; see `places`."""
    return list(places(kind))


def load(kind: str, name: str, file: object = None) -> Any:
    """The class or function with a name. Loads the plug-ins if the name is not known without them.

    file: the plug-in's file that defined the name when it was written (`file_of`); it is not loaded here.
    Raises InputError for an unknown name; the message has that file, or the most similar name, and the plug-ins that
    failed to load.
    """
    if name not in places(kind):
        load_plugins()
    known = places(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        listed = f"known: {', '.join(known)}" if len(known) <= 20 else "mnemos list prints the known names"
        hint = _RENAMED.get((kind, name)) or (f"did you mean {near[0]!r}?" if near else listed)
        if file is not None:
            hint = f"its plug-in {file} is missing: give the file with --plugin FILE"
            if is_loaded(str(file)):
                hint = f"its plug-in {file} does not register it: correct the file, or give another with --plugin FILE"
            elif Path(str(file)).is_file():
                hint = f"import its plug-in {file} first"
        article = "an" if kind[0] in "aeiou" else "a"
        raise InputError("; ".join([f"expected the name of {article} {kind}, found {name!r}", hint, *load_plugins()]))
    if name not in _registered[kind]:
        importlib.import_module(known[name].module)
    return _registered[kind][name].value


def load_file(file: str | Path) -> list[str]:
    """Import a Python file that registers entries, once per process; returns the names of its recipes.

    The folder of the file is searched for the modules that it imports. Raises InputError for a file that is missing or
    fails; what it has registered is then removed.
    """
    path = Path(file).resolve()
    if path.suffix != ".py" or not path.is_file():
        found = "no such file" if not path.exists() else "another one"
        raise InputError(f"{file}: expected a Python file that registers a plug-in, found {found}; name another")
    module = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module not in _files:
        _files[module] = path
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        try:
            _execute(module, path)
        except (Exception, SystemExit) as error:
            del _files[module]
            for entries in _registered.values():
                for name in [name for name, entry in entries.items() if entry.place.module == module]:
                    del entries[name]
            raise failed_in(path, error, file) from error
    return [name for name, entry in _registered["recipe"].items() if entry.place.module == module]


def is_loaded(file: str | Path) -> bool:
    """Whether `load_file` has imported this file."""
    return Path(file).resolve() in _files.values()


def _execute(module: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
    except BaseException:
        del sys.modules[module]
        raise


def failed_in(path: Path, error: BaseException, called: object = None) -> InputError:
    """The one line of an error that a plug-in's file raised, with the last of its lines that led there.

    called: the file as the user gave it.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = " ".join(str(error).split()).removesuffix(f" ({path.name}, line {line})")
    where = f"line {line}: " if line else ""
    said = message if isinstance(error, InputError) else f"{type(error).__name__}: {message}"
    if isinstance(error, ModuleNotFoundError) and str(error.name).startswith(f"{__package__}."):
        said += " (modules that moved are in CHANGELOG.md, in the table of names)"
    return InputError(f"{called or path}: {where}{said}; correct the file")


def file_of(value: type | Callable[..., object]) -> Path | None:
    """The file that `load_file` imported and that defines a class or function; None for those of packages."""
    return _files.get(value.__module__)


def load_plugins() -> list[str]:
    """Import or call every entry point of the group `mnemos.plugins`, once per process.

    Returns one sentence per plug-in that failed, with its distribution. Entries that a plug-in registered before it
    failed stay registered.
    """
    global _failures
    if _failures is None:
        _failures = []  # before the loop, because a plug-in may itself call `load`
        for point in entry_points(group=GROUP):
            try:
                found = point.load()
                if callable(found):
                    found()
            except (Exception, SystemExit) as error:  # a faulty plug-in must not make the other names unusable
                _failures.append(_failure(point, error))
    return list(_failures)


def _failure(point: EntryPoint, error: BaseException) -> str:
    message = " ".join(str(error).split())
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
    return f"the plug-in {point.name!r} of {owner} cannot be loaded: {type(error).__name__}: {message}"


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError(f"expected one of the kinds {', '.join(KINDS)}, found {kind!r}; use one of them")


def first_line(documentation: str | None) -> str:
    """The first line of a docstring without the final full stop; "" without a docstring."""
    lines = (documentation or "").strip().splitlines()
    return lines[0].strip().removesuffix(".") if lines else ""


@functools.cache
def _ours(kind: str) -> dict[str, Definition]:
    """The entries of this package, from its source files in alphabetical order."""
    decorator, rooms = _WRITTEN[kind]
    found: dict[str, Definition] = {}
    for path in (path for room in rooms for path in sorted((_PACKAGE / room).rglob("*.py"))):
        source = path.read_text(encoding="utf-8")
        if f"@{decorator}" not in source:  # searching is much faster than parsing
            continue
        module = ".".join((str(__package__), *path.relative_to(_PACKAGE).with_suffix("").parts))
        for name, node in _decorated(ast.parse(source), decorator):
            if kind in ("data", "preprocessing") and (kind == "preprocessing") != _is_preprocessing(node):
                continue  # the two kinds share a folder
            place = Definition(module, node.name, first_line(ast.get_docstring(node)))
            if name in found:
                raise InputError(f"the {kind} {name!r} is defined twice, at {found[name]} and {place}; rename one")
            found[name] = place
    return found


def _decorated(tree: ast.Module, decorator: str) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """The classes and functions of a module with this decorator, as (registered name, syntax node)."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            for used in node.decorator_list:
                if isinstance(used, ast.Name) and used.id == decorator:
                    yield _class_name(node) if isinstance(node, ast.ClassDef) else default_name(node.name), node
                elif isinstance(used, ast.Call) and isinstance(used.func, ast.Name) and used.func.id == decorator:
                    yield ast.literal_eval(used.args[0]), node


def _is_preprocessing(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether a class has the base class of preprocessings."""
    bases = node.bases if isinstance(node, ast.ClassDef) else []
    return any(isinstance(base, ast.Name) and base.id == "Preprocessing" for base in bases)


def _class_name(node: ast.ClassDef) -> str:
    """The value of a class's variable `name`."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == "name":
            return str(ast.literal_eval(line.value)) if line.value else ""
    raise InputError(f"expected a class variable `name` in the registered class {node.name}, found none; add one")


def default_name(function: str) -> str:
    """The name of a recipe whose decorator has no name: the function's name with - for _."""
    return function.replace("_", "-")
