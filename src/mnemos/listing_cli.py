"""`mnemos list`: the registered names, each with its line of description."""

import sys

from . import registry
from .recipe_tasks import recipe_tasks

ABOUT = "List the recipes, models, attentions and tasks."
_TITLES = {"data": "tasks (data)", "recipe": "recipes, by task", "preprocessing": "what predict reads (preprocessing)"}


def show_names() -> None:
    """Print the names of each kind, recipes under their tasks; plugins that cannot be loaded are named on stderr."""
    for failure in registry.load_plugins():
        print(f"mnemos: warning: {failure}", file=sys.stderr)
    for kind in registry.KINDS:
        print(_TITLES.get(kind, f"{kind}s"))
        places = registry.places(kind)
        width = max(map(len, places))
        if kind != "recipe":
            for name, place in places.items():
                print(f"  {name:{width}}  {place.about}")
            continue
        tasks = recipe_tasks()
        for task in dict.fromkeys(tasks.values()):
            print(f"  {task or 'other tasks'}")
            for name in (name for name in places if tasks[name] == task):
                print(f"    {name:{width}}  {places[name].about}")
    print("\nStart with `mnemos train demo` (a minute on two cores). `mnemos show RECIPE` prints a recipe's settings.")
