"""`mnemos list`: the registered names, each with its line of description; recipes as families, by their tasks.

`mnemos show`: a recipe with all its settings, or the settings of an attention.
"""

import contextlib
import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mnemos import registry
from mnemos.errors import InputError, say

from .parsers import CommandParser, RecipeParser, chosen_recipe, only

ABOUT = "List the recipes, models, attentions and tasks. Recipes are shown as families that differ in a few settings."
_TITLES = {"data": "tasks (data)", "recipe": "recipes, by task", "preprocessing": "what predict reads (preprocessing)"}
_SECTIONS = {"attentions": "attention", "models": "model", "tasks": "data", "data": "data", "recipes": "recipe"}
_SECTIONS |= {"preprocessing": "preprocessing"}
_MORE = """(N): a family of N recipes. `mnemos list FAMILY` lists them, `mnemos list TASK` the recipes of a task,
`mnemos list RECIPE` one with its variants, `mnemos list --all` every recipe,
`mnemos list attentions` one of the sections above."""
_SHOWN = 3  # recipes of each family of a task but the first, which is shown whole
_START = "Start with `mnemos train demo`. `mnemos show RECIPE` prints a recipe's settings."


class Family(NamedTuple):
    """Recipes that one function makes; `tasks`: what is said of each, by task and name."""

    name: str
    about: str
    tasks: Mapping[str, Mapping[str, str]]

    def only(self, names: Iterable[str] | None = None, task: str | None = None) -> "Family":
        """The family with those of its recipes that are among `names` and of this task; None: all."""
        kept = {
            one: {name: about for name, about in recipes.items() if names is None or name in names}
            for one, recipes in self.tasks.items()
            if task in (None, one)
        }
        return self._replace(tasks={one: recipes for one, recipes in kept.items() if recipes})

    @property
    def recipes(self) -> dict[str, str]:
        """What is said of each recipe."""
        return {name: about for recipes in self.tasks.values() for name, about in recipes.items()}


def families() -> list[Family]:
    """The recipes by the function that makes them: this package's, those of papers last, then other packages'."""
    abouts: dict[str, str] = {}
    tasks: dict[str, dict[str, dict[str, str]]] = {}
    for name, definition in registry.definitions("recipe").items():
        made, task, function = registry.load("recipe", name), "", str(definition)
        with contextlib.suppress(Exception):  # a faulty recipe must not make the others unusable
            task = str(made().data.name)
        abouts[function] = registry.first_line(getattr(made, "func", made).__doc__)
        tasks.setdefault(function, {}).setdefault(task, {})[name] = registry.about("recipe", name)
    found = []
    for function, each in tasks.items():
        first, *others = [item for recipes in each.values() for item in recipes.items()]
        if others:
            name = registry.default_name(function.rpartition(":")[2])
            found.append(Family(name, abouts[function], each))
        else:  # a recipe that is a family of its own gives it its name
            found.append(Family(*first, each))
    return found


def list_names(arguments: list[str]) -> int:
    """Print the names of each kind, recipes under their tasks; plugins that cannot be loaded are named on stderr."""
    parser = CommandParser("list", ABOUT)
    about = (
        "a task or a family, whose recipes are listed, a recipe, with its variants, or a section, such as attentions"
    )
    parser.add_argument("name", nargs="?", metavar="TASK|FAMILY|RECIPE|SECTION", help=about)
    parser.add_argument("--task", help="list the recipes of this task only")
    parser.add_argument("--all", action="store_true", help="list every recipe on a line of its own")
    options = parser.parse_args(arguments)
    for failure in registry.load_plugins():
        say(f"mnemos: warning: {failure}", file=sys.stderr)
    section = None if options.task else _SECTIONS.get(options.name)
    every = families() if section in (None, "recipe") else []  # which imports them all, in seconds
    tasks = {task for family in every for task in family.tasks} | {*registry.names("data")}
    if options.task not in (None, *tasks):
        raise InputError(f"--task: expected the name of a task, found {options.task!r}; {_near(options.task, tasks)}")
    if section is None and (options.name or options.task):
        _show_recipes(options.name, options.task, every, tasks, options.all)
        return 0
    for kind in [section] if section else registry.KINDS:
        say(_TITLES.get(kind, f"{kind}s"))
        if kind == "recipe":
            _show_families(every, options.all)
        else:
            _lines({name: registry.about(kind, name) for name in registry.names(kind)}, "  ")
    if section:
        return 0
    say(f"\n{_START}" if options.all else f"\n{_MORE}\n{_START}")
    return 0


def show(arguments: list[str]) -> int:
    """Print a recipe, or an attention, with all its settings."""
    about = "Print a recipe with all its settings, as JSON, or the settings of an attention."
    parser = RecipeParser("show", about, "RECIPE [--field value ...] | ATTENTION")
    _, names, fields = parser.split(arguments)
    name = only("show", names)

    from mnemos.config import to_dict

    if name in registry.names("attention") and name not in registry.names("recipe") and not fields:
        say(json.dumps(to_dict(registry.load("attention", name)()), indent=2))
        of = registry.definitions("attention")[name]
        hint = f"in a recipe: --model.attention {name}, and its fields as --model.attention.FIELD"
        say(f"mnemos: {name} is the attention {of}; {hint}", file=sys.stderr)
        return 0
    found = chosen_recipe("show", name, fields)
    say(json.dumps(to_dict(found), indent=2))
    if place := registry.definitions("recipe").get(name):
        say(f"mnemos: {name} is the function {place}", file=sys.stderr)
    if left := found.from_data():
        zeros = ", ".join(f"model.{field}" for field in left)
        say(f"mnemos: these fields are 0, so a run takes their values from its data: {zeros}", file=sys.stderr)
    return 0


def _show_families(every: list[Family], whole: bool) -> None:
    """Each task with its families, or, if whole, with their recipes."""
    rows: dict[str, dict[str, str]] = {}
    for family in every:
        for task, recipes in family.tasks.items():
            many = f"({len(recipes)})  " if len(recipes) > 1 else ""
            rows.setdefault(task, {}).update(recipes if whole else {family.name: many + family.about})
    width = max(len(name) for row in rows.values() for name in row)
    for task, row in rows.items():
        say(f"  {task or 'other tasks'}")
        _lines(row, "    ", width)


def _show_recipes(name: str | None, task: str | None, every: list[Family], tasks: set[str], whole: bool) -> None:
    """The recipes of a task, of a family, or of a recipe with its variants, whose names go on from its name."""
    if name in tasks and task in (None, name):
        name, task = None, name
    found = [family.only(task=task) for family in every]
    if name is not None:
        whole = True
        known = {recipe for family in every for recipe in family.recipes}
        if any(family.name == name for family in every):
            found = [family for family in found if family.name == name]
        elif name in known:
            found = [family.only([one for one in known if f"{one}-".startswith(f"{name}-")]) for family in found]
        else:
            hint = _near(name, {*known, *tasks, *(family.name for family in every), *_SECTIONS})
            if section := next((word for word, kind in _SECTIONS.items() if name in registry.names(kind)), None):
                hint = f"mnemos list {section} has it"
            raise InputError(
                f"list: expected the name of a task, a family, a recipe or a section, found {name!r}; {hint}"
            )
    found = [family for family in found if family.tasks]
    if not found:
        raise InputError(f"list: expected a task with recipes, found none of {task or name}; see mnemos list")
    for one in dict.fromkeys(task for family in found for task in family.tasks):
        _show_task(one, [family.only(task=one) for family in found if one in family.tasks], whole)


def _show_task(task: str, found: list[Family], whole: bool) -> None:
    """The recipes of a task; unless whole, the first of each family, and the first family's all."""
    say(f"{task}: {registry.about('data', task)}" if task in registry.names("data") else task or "other tasks")
    alone = [family for family in found if list(family.recipes) == [family.name]]
    width = max((len(family.name) for family in alone), default=0)
    left = 0
    for number, family in enumerate(found):
        if family in alone:
            _lines(family.recipes, "  ", width)
            continue
        say(f"  {family.name}: {family.about}")
        recipes = list(family.recipes.items())
        shown = dict(recipes if whole or not number else recipes[:_SHOWN])
        _lines(shown, "    ", max(len(name) for name, _ in recipes))
        if len(shown) < len(recipes):
            left += len(recipes) - len(shown)
            say(f"    … and {len(recipes) - len(shown)} more")
    if not whole:
        end = f", --all the {left} others too" if left else ""
        say(f"\nRecipes of papers come last. `mnemos list FAMILY` lists a family{end}.")


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else "mnemos list prints the known names"


def _lines(abouts: Mapping[str, str], indent: str, width: int = 0) -> None:
    width = width or max(map(len, abouts), default=0)
    for name, about in abouts.items():
        say(f"{indent}{name:{width}}  {about}")
