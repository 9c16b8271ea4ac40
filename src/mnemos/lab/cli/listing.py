"""What there is: `mnemos list` names it, `show` prints a recipe or an attention, `verify` the kernels of a machine."""

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import NamedTuple

from mnemos import registry
from mnemos.errors import InputError, near_name, say

from .parsers import Words, chosen_recipe, names_and_fields, only

_TITLES = {"data": "tasks (data)", "recipe": "recipes, by task", "preprocessing": "what predict reads (preprocessing)"}
_SECTIONS = {"attentions": "attention", "models": "model", "tasks": "data", "data": "data", "recipes": "recipe"}
_SECTIONS |= {"preprocessing": "preprocessing"}
_MORE = """(N): a family of N recipes. `mnemos list FAMILY` lists them, `mnemos list TASK` the recipes of a task,
`mnemos list RECIPE` one with its variants, `mnemos list --all` every recipe,
`mnemos list attentions` one of the sections above."""
_START = "Start with `mnemos train demo`. `mnemos show RECIPE` prints a recipe's settings."


# ---- mnemos list ----


class Row(NamedTuple):
    """A recipe, what is said of it, its task, and the family that it is one of: the recipes of one function."""

    task: str
    family: str
    about_family: str
    name: str
    about: str


def recipes() -> list[Row]:
    """The recipes: this package's, those of papers last, then other packages'."""
    rows = []
    for name, definition in registry.definitions("recipe").items():
        made, task = registry.load("recipe", name), ""
        with contextlib.suppress(Exception):  # a faulty recipe must not make the others unusable
            task = str(made().data.name)
        family = registry.default_name(str(definition).rpartition(":")[2])
        about_family = registry.first_line(getattr(made, "func", made).__doc__)
        rows.append(Row(task, family, about_family, name, registry.about("recipe", name)))
    return rows


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
        _show_recipes(_recipes_of(name), each=True)
        return 0
    for kind in registry.KINDS if name is None else [_SECTIONS[name]]:
        say(_TITLES.get(kind, f"{kind}s"))
        if kind == "recipe":
            _show_recipes(recipes(), each=all)
        else:
            _show({"": {one: registry.about(kind, one) for one in registry.names(kind)}})
    if name is None:
        say(f"\n{_START}" if all else f"\n{_MORE}\n{_START}")
    return 0


def _recipes_of(name: str) -> list[Row]:
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
    return shown


def _show_recipes(rows: list[Row], each: bool) -> None:
    """Print recipes below their tasks, each of them, or families, of which one of a single recipe has its name."""
    shown: dict[str, dict[str, str]] = {}
    for task in dict.fromkeys(row.task for row in rows):
        of_task = [row for row in rows if row.task == task]
        lines = shown[task or "other tasks"] = {}
        for family in dict.fromkeys((row.family, row.about_family) for row in of_task):
            members = [row for row in of_task if (row.family, row.about_family) == family]
            if each or len(members) == 1:
                lines |= {row.name: row.about for row in members}
            else:
                lines[family[0]] = f"({len(members)})  {family[1]}"
    _show(shown)


def _show(sections: Mapping[str, Mapping[str, str]]) -> None:
    """Print names and what is said of them, in columns, below the titles of their sections, if these have one."""
    width = max((len(name) for abouts in sections.values() for name in abouts), default=0)
    for title, abouts in sections.items():
        indent = "    " if title else "  "
        if title:
            say(f"  {title}")
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
        say(f"mnemos: {name} is the attention {registry.definitions('attention')[name]}", file=sys.stderr)
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
