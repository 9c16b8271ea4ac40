"""Write the table of the package's recipes, which `mnemos list` reads: `python tools/recipe_table.py [--check]`.

The table is src/mnemos/lab/recipes/names.json: for each function that makes recipes, what it says of itself, and its
recipes by task. `--check` writes nothing and fails where the table is out of date.
"""

import argparse
import importlib
import json
import pkgutil
import sys

from mnemos import registry
from mnemos.lab import papers, recipes


def table() -> dict[str, registry.Family]:
    """The functions of mnemos.lab.recipes and mnemos.lab.papers that make recipes, in the order of their files."""
    modules = []
    for package in (recipes, papers):
        modules += [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found = {module: importlib.import_module(module) for module in modules}
    families: dict[str, registry.Family] = {}
    for name, entry in registry._registered["recipe"].items():
        module, attribute = entry.definition
        if module not in found:
            continue
        recipe, made = entry.value(), getattr(found[module], attribute)
        family = families.setdefault(
            f"{module}:{attribute}".removeprefix("mnemos."), {"about": registry.first_line(made.__doc__), "tasks": {}}
        )
        family["tasks"].setdefault(recipe.data.name, {})[name] = recipe.about
    return dict(sorted(families.items(), key=lambda one: modules.index(f"mnemos.{one[0].partition(':')[0]}")))


def main(argv: list[str] | None = None) -> int:
    """Write the table, or with `--check` compare it; 1 where it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is out of date")
    check = parser.parse_args(argv).check
    text = json.dumps(table(), indent=1, ensure_ascii=False) + "\n"
    if not check:
        registry.RECIPES.write_text(text, encoding="utf-8")
    elif text != registry.RECIPES.read_text(encoding="utf-8"):
        print(f"{registry.RECIPES.name}: the recipes are others; `make numbers` writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
