"""What there is: `mnemos list` names it, `show` prints a recipe or an attention, `verify` the kernels of a machine.

To know the recipes takes the import of PyTorch, so they are kept in a file of the user's cache until a source changes.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mnemos import registry
from mnemos.atomic import read_text, write_json
from mnemos.errors import InputError, near_name, say

from .parsers import Words, chosen_recipe, names_and_fields, only

_TITLES = {"data": "tasks (data)", "recipe": "recipes, by task", "preprocessing": "what predict reads (preprocessing)"}
_SECTIONS = {"attentions": "attention", "models": "model", "tasks": "data", "data": "data", "recipes": "recipe"}
_SECTIONS |= {"preprocessing": "preprocessing"}
_MORE = """(N): a family of N recipes. `mnemos list FAMILY` lists them, `mnemos list TASK` the recipes of a task,
`mnemos list RECIPE` one with its variants, `mnemos list --all` every recipe,
`mnemos list attentions` one of the sections above."""
_START = "Start with `mnemos train demo`. `mnemos show RECIPE` prints a recipe's settings."


class Row(NamedTuple):
    """A recipe, what is said of it, its task, and the family that it is one of: the recipes of one function."""

    task: str
    family: str
    about_family: str
    name: str
    about: str


# ---- which recipes there are ----


def recipes() -> list[Row]:
    """The recipes, those of a family together: this package's, those of papers last, then other packages'."""
    if not registry.is_empty("recipe"):  # they are imported, or a plug-in has added some
        return _made_recipes()
    # --- a file of the user's cache, whose name says by which source files it was made ---
    package = Path(registry.__file__).parent
    sources = [(str(path), (about := path.stat()).st_mtime_ns, about.st_size) for path in sorted(package.rglob("*.py"))]
    name = f"recipes-{hashlib.sha256(repr(sources).encode()).hexdigest()[:16]}.json"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mnemos"
    except RuntimeError:  # no home
        return _made_recipes()
    with contextlib.suppress(OSError, ValueError, TypeError):  # no file, or a damaged one
        return [Row(*one) for one in json.loads(read_text(folder / name))]
    every = _made_recipes()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("recipes-*.json"):
            old.unlink()
        write_json(folder / name, every)
    return every


def _made_recipes() -> list[Row]:
    rows: list[Row] = []
    for name, definition in registry.definitions("recipe").items():
        made, task, function = registry.load("recipe", name), "", str(definition)
        with contextlib.suppress(Exception):  # a faulty recipe must not make the others unusable
            task = str(made().data.name)
        about_family = registry.first_line(getattr(made, "func", made).__doc__)
        rows.append(Row(task, function, about_family, name, registry.about("recipe", name)))
    every = []
    for (function,), members in _grouped(rows, "family").items():
        family, about = registry.default_name(function.rpartition(":")[2]), members[0].about_family
        if len(members) == 1:  # a recipe that is a family of its own gives it its name
            family, about = members[0].name, members[0].about
        every += [one._replace(family=family, about_family=about) for one in members]
    return every


def _grouped(rows: Iterable[Row], *by: str) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, field) for field in by), []).append(row)
    return groups


# ---- mnemos list ----


def list_names(name: str | None = None, *, all: bool = False) -> int:
    """List the recipes, models, attentions and tasks. Recipes are shown as families that differ in a few settings.

    Args:
        name: a task or a family, whose recipes are listed, a recipe, with its variants, or a section, such as
            attentions
        all: list every recipe on a line of its own
    """
    for failure in registry.load_plugins():
        say(f"mnemos: warning: {failure}", file=sys.stderr)
    if name is not None and name not in _SECTIONS:
        _list_recipes(name)
        return 0
    for kind in registry.KINDS if name is None else [_SECTIONS[name]]:
        say(_TITLES.get(kind, f"{kind}s"))
        if kind != "recipe":
            _lines({one: registry.about(kind, one) for one in registry.names(kind)}, "  ")
            continue
        shown: dict[str, dict[str, str]] = {}  # what is said of each family, or of each recipe, by task
        for (task,), rows in _grouped(recipes(), "task").items():
            shown[task] = {}
            for (family, about), members in _grouped(rows, "family", "about_family").items():
                many = f"({len(members)})  " if len(members) > 1 else ""
                of_recipes = {row.name: row.about for row in members}
                shown[task] |= of_recipes if all else {family: many + about}
        width = max(len(one) for abouts in shown.values() for one in abouts)
        for task, abouts in shown.items():
            say(f"  {task or 'other tasks'}")
            _lines(abouts, "    ", width)
    if name is None:
        say(f"\n{_START}" if all else f"\n{_MORE}\n{_START}")
    return 0


def _list_recipes(name: str) -> None:
    every = recipes()
    shown = [row for row in every if row.task == name] or [row for row in every if row.family == name]
    if not shown and any(row.name == name for row in every):
        shown = [row for row in every if f"{row.name}-".startswith(f"{name}-")]
    if not shown:
        others = {*_SECTIONS, *registry.names("data")}.union(*((row.name, row.family) for row in every))
        hint = near_name(name, others, "mnemos list prints the known names")
        if section := next((word for word, kind in _SECTIONS.items() if name in registry.names(kind)), None):
            hint = f"mnemos list {section} has it"
        raise InputError(f"list: expected the name of a task, a family, a recipe or a section, found {name!r}; {hint}")

    for (task,), rows in _grouped(shown, "task").items():
        say(f"{task}: {registry.about('data', task)}" if task in registry.names("data") else task or "other tasks")
        groups = _grouped(rows, "family", "about_family")  # two functions may have one name
        alone = [key for key, members in groups.items() if [row.name for row in members] == [key[0]]]
        for (family, about), members in groups.items():
            if (family, about) in alone:
                _lines({family: about}, "  ", max(len(one) for one, _ in alone))
            else:
                say(f"  {family}: {about}")
                _lines({row.name: row.about for row in members}, "    ")


def _lines(abouts: Mapping[str, str], indent: str, width: int = 0) -> None:
    width = width or max(map(len, abouts), default=0)
    for name, about in abouts.items():
        say(f"{indent}{name:{width}}  {about}")


# ---- mnemos show, mnemos verify ----


def show(words: Words = ()) -> int:
    """Print a recipe with all its settings, as JSON, or the settings of an attention: `mnemos show ATTENTION`.

    Fields are settings of the recipe: `mnemos show RECIPE --help` lists them.
    """
    names, fields = names_and_fields(words)
    name = only("show", names)

    from mnemos.config import to_dict

    if name in registry.names("attention") and name not in registry.names("recipe") and not fields:
        say(json.dumps(to_dict(registry.load("attention", name)()), indent=2))
        of = registry.definitions("attention")[name]
        hint = f"in a recipe: --model.attention {name}, and its fields as --model.attention.FIELD"
        say(f"mnemos: {name} is the attention {of}; {hint}", file=sys.stderr)
        return 0
    recipe = chosen_recipe("show", name, fields)
    say(json.dumps(to_dict(recipe), indent=2))
    if definition := registry.definitions("recipe").get(name):
        say(f"mnemos: {name} is the function {definition}", file=sys.stderr)
    if left := recipe.from_data():
        zeros = ", ".join(f"model.{field}" for field in left)
        say(f"mnemos: these fields are 0, so a run takes their values from its data: {zeros}", file=sys.stderr)
    return 0


def verify(operation: tuple[str, ...] = ()) -> int:
    """Compare values and gradients of every operation with its plain equations in float64.

    Each is called by every backend and instruction set of this machine. Exit code 1 if one differs by more than its
    bound.

    Args:
        operation: the first words of those to compare
    """
    from mnemos import native
    from mnemos.lab.run.provenance import processor, versions
    from mnemos.ops import dense_layer
    from mnemos.testing.machine import HEAD
    from mnemos.testing.machine import verify as compare

    say(f"processor    {processor()}")
    sets = native.instruction_sets()
    listed = ", ".join(sets)
    say(f"kernels      {f'compiled, {sets[-1]} (of {listed})' if sets else native.why_not()}")
    say(f"dense layers {dense_layer.choice()}")
    installed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions().items())
    say(f"versions     {installed}\n")
    say(HEAD)
    results = []
    for result in compare(list(operation) or None):
        say(result, flush=True)
        results.append(result)
    failed = sum(not result.passed for result in results)
    say(f"\n{failed} of {len(results)} FAILED" if failed else f"\nall {len(results)} passed")
    return 1 if failed else 0
