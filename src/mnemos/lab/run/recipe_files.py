"""Recipes by name, from files of JSON or YAML, and of run folders."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from mnemos import registry
from mnemos.atomic import check_file, parse, read_text
from mnemos.config import from_dict
from mnemos.errors import one_line, say
from mnemos.types import InputError

from .recipe import OWN, Recipe

MODEL_RECIPE = "model_recipe.json"  # in a folder that `mnemos average` writes: the recipe of the run


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are decimal, as since version 1.2: 1e-3 is one, 010 is 10; 1:30 and dates are texts."""

    yaml_implicit_resolvers = {
        first: [one for one in resolvers if one[0].rpartition(":")[2] not in ("int", "float", "timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for _kind, _number in (
    ("int", r"[-+]?[0-9]+$"),
    ("float", r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_number), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))  # the default reads 010 as 8


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or that of a file: my_file.py, which is executed, my_file.py:NAME, or JSON or YAML of
    its fields, named as the file if it has no name.

    Raises InputError for unknown names, and for files that are missing or hold no recipe.
    """
    file, colon, chosen = name.rpartition(":") if ".py:" in name else (name, "", "")
    if file.endswith(".py"):
        return _made(_recipe_of_file(file, chosen if colon else None), file)
    if not name.endswith((".json", ".yaml", ".yml")):
        if (Path(name) / "recipe.json").is_file():
            raise InputError(
                f"{name}: expected a recipe, found the folder of a run; mnemos train --resume {name} continues it, and "
                f"{name}/recipe.json is its recipe"
            )
        return _made(name)
    path = Path(name)
    if not path.exists():
        raise InputError(f"{path}: expected a recipe's file, found no such file; mnemos show prints one")
    recipe = _read(path)
    return recipe if recipe.name else replace(recipe, name=path.stem)


def _made(name: str, called: str | None = None) -> Recipe:
    function = registry.load("recipe", name)
    try:
        made: Recipe = function()
    except Exception as error:
        if (file := registry.file_of(function)) is None:
            raise
        raise registry.failed_in(file, error, called) from error
    return made


def _recipe_of_file(file: str, chosen: str | None) -> str:
    names = registry.load_file(file)
    if chosen is None and len(names) == 1:
        return names[0]
    if chosen is not None and registry.default_name(chosen) in names:
        return registry.default_name(chosen)
    if not names:
        raise InputError(
            f"{file}: expected a file that defines a recipe with @mnemos.recipe, found none; add one as in "
            "docs/compare.md, 'Recipes'"
        )
    found = f"found {len(names)}" if chosen is None else f"found {chosen!r}"
    known = ", ".join(f"{file}:{name}" for name in names)
    raise InputError(f"{file}: expected the name of one of its recipes, {found}; use one of {known}")


def from_json(saved: object, path: Path | None = None) -> Recipe:
    """The recipe in the JSON of recipe.json. The plug-in files that it names are executed first, where they exist.

    path: the file that it is from, for the line that says what is executed.
    """
    for file in dict.fromkeys(_plugin_files(saved)):
        if Path(file).is_file():  # else the name of the class is not known, and the error names the file
            if path is not None and not registry.is_loaded(file):
                say(f"mnemos: executing the plug-in {file}, which {path} names", file=sys.stderr)
            registry.load_file(file)
    recipe: Recipe = from_dict(Recipe, saved)
    return recipe


def _plugin_files(value: object) -> Iterator[str]:
    """The files of classes of plug-ins in the JSON of a configuration, whose names are not known yet."""
    if not isinstance(value, dict):
        return
    known = any(value.get("is") in registry.definitions(kind) for kind in registry.KINDS)
    if isinstance(file := value.get("plugin"), str) and Path(file).is_absolute() and not known:
        yield file
    for part in value.values():
        yield from _plugin_files(part)


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run folder. Raises InputError, with what may be meant, if it has none or one that is damaged."""
    if (folder / "recipe.json").is_file():
        return _read(folder / "recipe.json")
    runs = sorted(str(path.parent) for part in ("*", "*/*") for path in folder.glob(f"{part}/seed-*/recipe.json"))
    if runs:
        found = f"a comparison; name one of its runs, for example {runs[0]}"
    elif not folder.is_dir():
        found = registry.missing_folder(folder)
    elif not is_model(folder):
        found = "no recipe.json in it; name a folder that mnemos train wrote"
    elif (folder.parent / "recipe.json").is_file():
        found = f"its model; name {folder.parent}"
    elif b'"model_type"' in (folder / "config.json").read_bytes():
        found = f"a model of Transformers; mnemos chat {folder} uses it, mnemos train RECIPE --model {folder} trains it"
    else:
        found = "a model without its run; mnemos.load reads it in Python"
    raise InputError(f"{folder}: expected a run, found {found}")


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model alone: RUN/model, or what `mnemos average` writes."""
    return (folder / "config.json").is_file() and not (folder / "recipe.json").is_file()


def recipe_of_model(folder: Path) -> Recipe:
    """The recipe of a run, or of the run whose model a folder holds (`is_model`). Raises as `read_recipe`."""
    if (folder / MODEL_RECIPE).is_file():
        return _read(folder / MODEL_RECIPE)
    of_run = is_model(folder) and (folder.parent / "recipe.json").is_file()
    return read_recipe(folder.parent if of_run else folder)


def _read_yaml(text: str) -> object:
    try:
        return yaml.load(text, _Loader)  # safe: it makes no objects
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        began = f" {error.context}" if error.context else ""
        began += f" that starts in line {error.context_mark.line + 1}" if error.context_mark else ""
        raise InputError(f"line {line}: expected YAML, {error.problem}{began}; correct the file") from None
    except (ValueError, KeyError) as error:  # of a tag, as in !!int x
        raise InputError(f"expected YAML, found a value that its tag does not allow ({error}); correct it") from None


def _read(path: Path) -> Recipe:
    check_file(path)
    try:
        text = read_text(path)
        saved = parse(text) if path.suffix == ".json" else _read_yaml(text)
        if not isinstance(saved, dict):
            what = "nothing" if saved is None else f"{saved!r:.40}"
            raise InputError(f"expected a recipe, found {what}; mnemos show prints one")
        if isinstance(model := saved.get("model"), dict) and model.get("is") == OWN:
            raise InputError(
                "expected a registered model, found a run of mnemos.fit, whose model and data are not stored; continue "
                "it with fit(..., resume=True)"
            )
        return from_json(saved, path)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}: line {error.lineno}: expected JSON, found an error ({error.msg}); correct the file"
        ) from None
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(
            f"{path}: expected a recipe, found a file that cannot be read ({one_line(error)}); correct it"
        ) from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
