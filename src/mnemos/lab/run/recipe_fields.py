"""A recipe with settings from the command line: `--model.dim 64 --model.attention linear`; errors have one line."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Sequence

from mnemos.config import in_words
from mnemos.types import InputError

from .named_parts import missing_cache, parts_help, path_of, with_parts
from .recipe import Recipe


def with_fields(recipe: Recipe, words: Sequence[str], program: str) -> Recipe:
    """The recipe with the settings in `words`: `--field value`, where a field is a path such as `model.dim`.

    A field that holds an attention also accepts the name of one, `--model.attention linear`, which replaces it by that
    attention with its default settings; `--model.cache NAME` adds a gated cache, changes its preset, or removes it
    (`named_parts`). Settings of the new part may be given beside it. program: the command before the words, for the
    help. Raises InputError for unknown fields and values of the wrong type, and SystemExit after it printed the help
    for `--help`.
    """
    if not words:  # the parser takes as long to import as the rest of `mnemos show` without PyTorch
        return recipe
    import tyro

    recipe, words = with_parts(recipe, words)
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return tyro.cli(
                Recipe,
                prog=program,
                description=_about(recipe) if {"-h", "--help"} & set(words) else None,
                args=words,
                default=recipe,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            print(output.getvalue(), end="")
            raise
        raise InputError(_one_line(output.getvalue(), recipe, words, program)) from None


def _about(recipe: Recipe) -> str:
    """The first paragraph of the recipe's help."""
    return f"{recipe.about}. Each setting of the recipe is an option: --field value.{parts_help(recipe)}"


def _one_line(message: str, recipe: Recipe, words: list[str], program: str) -> str:
    """tyro's boxed error message as one line of ours: what was expected, what was found, what to do."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\W*[-─]{8,}\W*\n", re.sub(r"[│╭╮╰╯]", " ", message))]
    problem = next((part for part in parts[1:] if part), parts[0])
    meant = re.search(r"Perhaps you meant:\W+(--[\w.-]+)", message)
    hint = f"did you mean {meant[1]}?" if meant else f"see {program} --help"
    if problem.startswith("Unrecognized options:"):
        unknown = problem.partition(":")[2].replace(",", "").split()
        option = next((word for word in unknown if word.startswith("--")), None)
        if option is None:
            return f"expected settings --field value, found {' '.join(unknown)} without its field; {hint}"
        return f"expected a setting of {recipe.name}, found {option}; {missing_cache(recipe, option) or hint}"
    if refused := re.match(r"Error parsing ([\w.]+): (.*)", problem):  # by the settings themselves, such as GRC
        return _of_field(recipe, *refused.groups())
    wrong = re.match(r"(?:Error parsing|Missing value for|invalid choice .* for)(?: argument)? '?--([\w.-]+)", problem)
    expected = in_words(_annotation(recipe, path_of(wrong[1]).split("."))) if wrong else None
    if wrong is None or expected is None:
        return f"{problem.rstrip('.')}; {hint}"
    return f"--{wrong[1]}: expected {expected}, found {_given(words, wrong[1])}; {hint}"


def _of_field(recipe: Recipe, part: str, said: str) -> str:
    """An error that a part of the recipe raised for a value, such as "GRC.length: expected …", with the option."""
    name, colon, rest = said.partition(": ")
    path = [] if part == type(recipe).__name__ else part.split(".")
    field = [*path, name.rpartition(".")[2]]
    if colon and _annotation(recipe, field) is not None:
        return f"--{'.'.join(field)}: {rest}"
    return f"--{'.'.join(path)}: {said}" if path else said


def _given(words: list[str], option: str) -> str:
    """The values of an option as they were typed."""
    found: list[str] = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--") and path_of(name) == path_of(option):
            after = words[i + 1 :]
            end = next((j for j, other in enumerate(after) if other.startswith("--")), len(after))
            found = [value] if equals else after[:end]
    return repr(" ".join(found)) if found else "none"


def _annotation(value: object, path: list[str]) -> object:
    """The type of the field at a path of a configuration; None if there is no such field."""
    if not dataclasses.is_dataclass(value):
        return None
    if len(path) > 1:
        return _annotation(getattr(value, path[0], None), path[1:])
    return typing.get_type_hints(type(value)).get(path[0])
