"""What there is: `mnemos list` names it, `show` prints a recipe or an attention, `verify` the kernels of a machine.

Recipes are listed as families, each made by one function, under their tasks. Knowing them takes the import of PyTorch,
so the families of this package are kept in a file of the user's cache until a source file changes.
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


class Family(NamedTuple):
    """Recipes that one function makes; `tasks`: what is said of each, by task and name."""

    name: str
    about: str
    tasks: Mapping[str, Mapping[str, str]]

    def only(self, names: Iterable[str] | None = None, task: str | None = None) -> "Family":
        """The family with those of its recipes that are among `names` and of this task; None: all."""
        chosen = {
            one: {name: about for name, about in recipes.items() if names is None or name in names}
            for one, recipes in self.tasks.items()
            if task in (None, one)
        }
        return self._replace(tasks={one: recipes for one, recipes in chosen.items() if recipes})

    @property
    def recipes(self) -> dict[str, str]:
        """What is said of each recipe."""
        return {name: about for recipes in self.tasks.values() for name, about in recipes.items()}


# ---- which families there are ----


def families() -> list[Family]:
    """The recipes by the function that makes them: this package's, those of papers last, then other packages'."""
    if not registry.is_empty("recipe"):  # they are imported, or a plug-in has added some
        return _made_families()
    with contextlib.suppress(OSError, ValueError, TypeError, RuntimeError):  # no home, or a damaged file
        return [Family(*one) for one in json.loads(read_text(_cache_file()))]
    every = _made_families()
    with contextlib.suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        for old in file.parent.glob("recipes-*.json"):
            old.unlink()
        write_json(file, every)
    return every


def _cache_file() -> Path:
    """Where the families are kept: its name says by which source files they were made."""
    package = Path(registry.__file__).parent
    sources = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    digest = hashlib.sha256(repr([(str(p), s.st_mtime_ns, s.st_size) for p, s in sources]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mnemos" / f"recipes-{digest[:16]}.json"


def _made_families() -> list[Family]:
    abouts: dict[str, str] = {}
    tasks: dict[str, dict[str, dict[str, str]]] = {}
    for name, definition in registry.definitions("recipe").items():
        made, task, function = registry.load("recipe", name), "", str(definition)
        with contextlib.suppress(Exception):  # a faulty recipe must not make the others unusable
            task = str(made().data.name)
        abouts[function] = registry.first_line(getattr(made, "func", made).__doc__)
        tasks.setdefault(function, {}).setdefault(task, {})[name] = registry.about("recipe", name)
    every = []
    for function, each in tasks.items():
        first, *others = [item for recipes in each.values() for item in recipes.items()]
        name = registry.default_name(function.rpartition(":")[2])
        # A recipe that is a family of its own gives it its name.
        every.append(Family(name, abouts[function], each) if others else Family(*first, each))
    return every


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
        rows: dict[str, dict[str, str]] = {}  # what is said of each family, or of each recipe, by task
        for family in families():
            for task, recipes in family.tasks.items():
                many = f"({len(recipes)})  " if len(recipes) > 1 else ""
                rows.setdefault(task, {}).update(recipes if all else {family.name: many + family.about})
        width = max(len(one) for row in rows.values() for one in row)
        for task, row in rows.items():
            say(f"  {task or 'other tasks'}")
            _lines(row, "    ", width)
    if name is None:
        say(f"\n{_START}" if all else f"\n{_MORE}\n{_START}")
    return 0


def _list_recipes(name: str) -> None:
    """The recipes of a task, of a family, or of a recipe with its variants, whose names go on from its name."""
    every = families()
    known = {recipe for family in every for recipe in family.recipes}
    if any(name in family.tasks for family in every):
        shown = [family.only(task=name) for family in every]
    elif any(name == family.name for family in every):
        shown = [family for family in every if family.name == name]
    elif name in known:
        shown = [family.only([one for one in known if f"{one}-".startswith(f"{name}-")]) for family in every]
    else:
        others = {*known, *registry.names("data"), *(family.name for family in every), *_SECTIONS}
        hint = near_name(name, others, "mnemos list prints the known names")
        if section := next((word for word, kind in _SECTIONS.items() if name in registry.names(kind)), None):
            hint = f"mnemos list {section} has it"
        raise InputError(f"list: expected the name of a task, a family, a recipe or a section, found {name!r}; {hint}")

    for task in dict.fromkeys(task for family in shown for task in family.tasks):
        say(f"{task}: {registry.about('data', task)}" if task in registry.names("data") else task or "other tasks")
        families_of_task = [family.only(task=task) for family in shown if task in family.tasks]
        alone = [family for family in families_of_task if list(family.recipes) == [family.name]]
        for family in families_of_task:
            if family in alone:
                _lines(family.recipes, "  ", max(len(one.name) for one in alone))
            else:
                say(f"  {family.name}: {family.about}")
                _lines(family.recipes, "    ")


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
