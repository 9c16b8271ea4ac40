"""The parsers of the commands' arguments: their errors are one line, and they tell recipes from fields."""

import argparse
from typing import NoReturn

from .errors import InputError


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
