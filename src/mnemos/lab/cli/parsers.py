"""What several commands parse alike: their errors are one line, and recipes are told from fields."""

import argparse
import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from mnemos import registry
from mnemos.errors import InputError

if TYPE_CHECKING:
    from mnemos.lab.run.recipe import Recipe


SOURCE = "a decoder of Transformers with its tokenizer: a folder of save_pretrained, or hf:NAME of the hub"
TRUST = "run the Python code that the model brings, which can do whatever you can"


def check_verb(verb: str, known: Iterable[str]) -> None:
    """Raise InputError for an unknown command, with the most similar one."""
    known = list(known)
    if verb not in known:
        near = difflib.get_close_matches(verb, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise InputError(f"expected a command, found {verb!r}; {hint}")


def with_plugins(arguments: list[str]) -> list[str]:
    """Load the files of `--plugin FILE`, which every command takes; returns the other arguments."""
    rest, words = [], iter(arguments)
    for word in words:
        option, equals, file = word.partition("=")
        if option != "--plugin":
            rest.append(word)
            continue
        file = file if equals else next(words, "")
        if not file:
            raise InputError("--plugin: expected a Python file that registers a plug-in, found none; name it")
        registry.load_file(file)
    return rest


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises InputError with a one-line message."""

    def __init__(
        self, verb: str, about: str, usage: str | None = None, epilog: str | None = None, add_help: bool = True
    ) -> None:
        name = f"mnemos {verb}"
        super().__init__(name, usage, about, epilog, allow_abbrev=False, add_help=add_help)

    def error(self, message: str) -> NoReturn:
        """Raise InputError with the message of argparse and where to find help."""
        raise InputError(f"{message}; see {self.prog} --help")


class RecipeParser(CommandParser):
    """A parser of commands that take recipes and fields. After a recipe's name, --help lists the recipe's fields."""

    def __init__(self, verb: str, about: str, takes: str) -> None:
        usage = f"mnemos {verb} {takes}"
        fields = f"Fields are settings of the recipe: mnemos {verb} RECIPE --help lists them."
        super().__init__(verb, about, usage=usage, epilog=fields, add_help=False)

    def split(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
        """Split the arguments into (options of the command, names of recipes, fields)."""
        if arguments and arguments[0] in ("-h", "--help"):
            self.print_help()
            self.exit()
        options, rest = self.parse_known_args(arguments)
        first = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
        return options, rest[:first], rest[first:]


def only(verb: str, names: list[str]) -> str:
    """The one recipe that a command takes. Raises InputError for none and for several."""
    if not names:
        raise InputError(
            f"mnemos {verb}: expected the name of a recipe first, found none; mnemos list prints the names"
        )
    if len(names) > 1:
        raise InputError(f"mnemos {verb}: expected one recipe, found {' '.join(names)}; use mnemos compare for several")
    return names[0]


def chosen_recipe(verb: str, name: str, fields: list[str]) -> "Recipe":
    """The named recipe, or that of a JSON file, with the given fields changed."""
    from mnemos.lab.run.recipe_fields import with_fields
    from mnemos.lab.run.recipe_files import find_recipe

    return with_fields(find_recipe(name), fields, f"mnemos {verb} {name}")
