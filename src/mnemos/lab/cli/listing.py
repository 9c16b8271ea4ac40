"""`mnemos list`: the registered names, each with its line of description; recipes as families by their tasks."""

import ast
import difflib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from mnemos import registry
from mnemos.errors import InputError
from mnemos.lab.recipes.recipe_tasks import recipe_tasks

from .parsers import CommandParser

ABOUT = "List the recipes, models, attentions and tasks. Recipes are shown as families: a recipe and its variants."
_TITLES = {"data": "tasks (data)", "recipe": "recipes, by task", "preprocessing": "what predict reads (preprocessing)"}
_MORE = """(+N): a recipe with N variants. `mnemos list RECIPE` lists them, `mnemos list TASK` the recipes of a task,
`mnemos list --all` every recipe."""
_SHOWN = 3  # recipes of each file of a task but the first, which is shown whole
_PACKAGE = Path(str(registry.__file__)).parent
_PAPERS = "mnemos.lab.papers."
_START = "Start with `mnemos train demo` (a minute on two cores). `mnemos show RECIPE` prints a recipe's settings."


def show_names(parser: CommandParser, arguments: list[str]) -> None:
    """Print the names of each kind, recipes under their tasks; plugins that cannot be loaded are named on stderr."""
    about = "a task, whose recipes are listed, or a recipe, which is listed with its variants"
    parser.add_argument("name", nargs="?", metavar="TASK|RECIPE", help=about)
    parser.add_argument("--task", help="list the recipes of this task only")
    parser.add_argument("--all", action="store_true", help="list every recipe on a line of its own")
    options = parser.parse_args(arguments)
    for failure in registry.load_plugins():
        print(f"mnemos: warning: {failure}", file=sys.stderr)
    tasks = recipe_tasks()
    groups = _families(tasks)
    if options.name or options.task:
        found = _chosen(options.name, options.task, tasks, groups)
        if options.all or (options.name in tasks and options.name not in tasks.values()):
            _show_chosen(found, tasks)
        else:
            _show_task(found, tasks[found[0]])
        return
    for kind in registry.KINDS:
        print(_TITLES.get(kind, f"{kind}s"))
        abouts = {name: registry.about(kind, name) for name in registry.names(kind)}
        if kind != "recipe":
            _lines(abouts, "  ")
        elif options.all:
            _by_task(abouts, tasks)
        else:
            _by_task({name: _variants(groups[name]) + abouts[name] for name in groups}, tasks)
    if not options.all:
        print(f"\n{_MORE}", end="")
    print(f"\n{_START}")


def _families(tasks: Mapping[str, str]) -> dict[str, list[str]]:
    """{recipe: itself and its variants}: those of its task whose names go on from its name, as text-cached from text.

    A variant of a variant is in the family of the first. The recipes of another package are families of their own.
    """
    found: dict[str, list[str]] = {}
    kinds = {name: (tasks[name], place.module.split(".")[0]) for name, place in registry.places("recipe").items()}
    for name in tasks:
        above = [one for one in tasks if kinds[one] == kinds[name] and f"{name}-".startswith(f"{one}-")]
        found.setdefault(min(above, key=len), []).append(name)
    return found


def _variants(family: list[str]) -> str:
    return f"(+{len(family) - 1})  " if len(family) > 1 else ""


def _chosen(name: str | None, task: str | None, tasks: Mapping[str, str], groups: Mapping[str, list[str]]) -> list[str]:
    """The recipes that the arguments name. Raises InputError for a name that is neither a task nor a recipe."""
    known = {*tasks.values()} | {*registry.names("data")}
    if task is not None and task not in known:
        raise InputError(f"--task: expected the name of a task, found {task!r}; {_near(task, known)}")
    found = [one for one in tasks if task in (None, tasks[one])]
    if name is None or (name in known and task in (None, name)):
        found = [one for one in found if name in (None, tasks[one])]
    elif name in tasks:
        family = groups.get(name) or [one for one in tasks if f"{one}-".startswith(f"{name}-")]
        found = [one for one in found if one in family]
    else:
        hint = _near(name, {*known, *tasks})
        raise InputError(f"list: expected the name of a task or a recipe, found {name!r}; {hint}")
    if not found:
        raise InputError(f"list: expected a task with recipes, found none of {task or name}; see mnemos list")
    return found


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else "mnemos list prints the known names"


def _show_chosen(names: list[str], tasks: Mapping[str, str]) -> None:
    for task in dict.fromkeys(tasks[name] for name in names):
        about = f": {registry.about('data', task)}" if task in registry.names("data") else ""
        print(f"{task or 'other tasks'}{about}")
        _lines({name: registry.about("recipe", name) for name in names if tasks[name] == task}, "  ")


def _show_task(names: list[str], task: str) -> None:
    """The recipes of a task by the files that define them: small ones, then papers'; the first file's are all shown."""
    places = registry.places("recipe")
    print(f"{task}: {registry.about('data', task)}" if task in registry.names("data") else task)
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(places[name].module, []).append(name)

    def order(file: str) -> tuple[bool, bool]:  # within the papers, recipes called as the task are the small ones
        return file.startswith(_PAPERS), not any(f"{name}-".startswith(f"{task}-") for name in files[file])

    left = 0
    for number, file in enumerate(sorted(files, key=order)):
        print(f"  {_heading(file)}")
        every = files[file]
        shown = every[:_SHOWN] if number else every
        _lines({name: registry.about("recipe", name) for name in shown}, "    ", max(map(len, every)))
        if len(every) > len(shown):
            left += len(every) - len(shown)
            print(f"    … and {len(every) - len(shown)} more")
    end = f", --all the {left} others too" if left else ""
    print(f"\nRecipes of papers come last. `mnemos list RECIPE` lists its variants{end}.")


def _heading(module: str) -> str:
    """The first line of a module's docstring; a module of this package is not imported for it."""
    if module.startswith("mnemos."):
        source = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
        return registry.first_line(ast.get_docstring(ast.parse(source)))
    return registry.first_line(sys.modules[module].__doc__) or module


def _by_task(abouts: Mapping[str, str], tasks: Mapping[str, str]) -> None:
    width = max(map(len, abouts))
    for task in dict.fromkeys(tasks.values()):
        print(f"  {task or 'other tasks'}")
        _lines({name: about for name, about in abouts.items() if tasks[name] == task}, "    ", width)


def _lines(abouts: Mapping[str, str], indent: str, width: int = 0) -> None:
    width = width or max(map(len, abouts), default=0)
    for name, about in abouts.items():
        print(f"{indent}{name:{width}}  {about}")
