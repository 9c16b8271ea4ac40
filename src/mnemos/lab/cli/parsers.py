"""What commands parse alike: a command is a function, and tyro makes its options from the function's parameters, its
help from the docstring. What no option is goes to `words`, names of recipes and then fields such as `--model.dim 8`, or
to `fields`.
"""

import functools
import inspect
import io
import re
import typing
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Suppress

from mnemos import registry
from mnemos.errors import InputError, nearest, say
from mnemos.lab.errors import problem_of_tyro

if TYPE_CHECKING:
    from mnemos.lab.run.recipe import Recipe

Words = Suppress[tuple[str, ...]]
_HELP = ("-h", "--help")
_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
# What tyro says, and how we say it.
_OURS = {
    r"Missing from [^:]+: (\S+).*": r"the following arguments are required: \1",
    r"Error parsing (\S+): .*\bint\b.*?('[^']*')\]?$": r"\1: expected an integer, found \2",
    r"Error parsing (\S+): .*\bfloat\b.*?('[^']*')\]?$": r"\1: expected a number, found \2",
}
_CHOICES = (
    r"invalid choice '(?P<found>.*)' for argument '(?P<option>.*)'. Expected one of \((?P<known>.*)\)",
    r"Error parsing (?P<option>\S+): no type matching \{(?P<known>.*)\} could .* from \['(?P<found>None)'\]",
)


def run_command(function: Callable[..., int], verb: str, takes: str, arguments: list[str]) -> int:
    """Call a command with the options and words in some arguments; returns its exit code.

    takes: what the usage shows after the command. Raises InputError for arguments that do not fit, and SystemExit after
    `--help`. After the name of a recipe, that is one of the words: the help of the recipe's fields.
    """
    parameters, program = inspect.signature(function).parameters, f"mnemos {verb}"
    rest = next((name for name in ("words", "fields") if name in parameters), None)
    of_recipe: list[str] = []
    if rest == "words" and arguments and not arguments[0].startswith("-"):
        of_recipe = [word for word in arguments if word in _HELP]
        arguments = [word for word in arguments if word not in _HELP]

    # --- the function as tyro is to see it: it returns what is then called ---
    conf: Any = tyro.conf  # whose types are made here, while the program runs
    annotated: Any = Annotated
    hints: dict[str, Any] = typing.get_type_hints(function, include_extras=True)
    for name, parameter in parameters.items():
        if name != rest and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            shown = name.upper() if parameter.default is parameter.empty else f"[{name.upper()}]"
            hints[name] = conf.Positional[annotated[hints[name], conf.arg(metavar=shown)]]

    def bind(**values: Any) -> Any:
        return functools.partial(function, **values)

    seen: Any = bind
    seen.__annotations__ = hints
    seen.__signature__ = inspect.Signature([one.replace(annotation=hints[name]) for name, one in parameters.items()])
    seen.__doc__ = re.sub(r"\n {12}", " ", function.__doc__ or "")  # or tyro breaks the lines of "Args:" where we do

    # --- tyro prints help and errors in boxes, and exits ---
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            more: Any = {"return_unknown_args": rest is not None}
            parsed: Any = tyro.cli(seen, prog=program, args=arguments, config=_STYLE, **more)
    except SystemExit as stop:
        if not stop.code:
            text = re.sub(r"\s+\(default: (None)?\)", "", output.getvalue())
            text = text.replace("[-h]", takes if rest == "words" else "", 1).replace("  ", " ", 1)
            say("\n".join(line.rstrip() for line in text.splitlines()))
            raise
        problem, meant = problem_of_tyro(output.getvalue())
        for pattern, ours in _OURS.items():
            problem = re.sub(pattern, ours, problem)
        if choice := next(filter(None, (re.match(pattern, problem) for pattern in _CHOICES)), None):
            known = sorted({*re.findall(r"\w[\w-]*", choice["known"])} - {"None"})
            problem = f"{choice['option']}: expected one of {', '.join(known)}, found {choice['found']!r}"
            meant = nearest(choice["found"], known) or ""
        raise InputError(f"{problem}; " + (f"did you mean {meant}?" if meant else f"see {program} --help")) from None
    bound, unknown = parsed if rest else (parsed, [])

    # --- tyro takes no values for a list that has no default ---
    for name, value in bound.keywords.items():
        if not value and isinstance(value, list | tuple) and parameters[name].default is inspect.Parameter.empty:
            raise InputError(f"the following arguments are required: {name.upper()}; see {program} --help")
    return bound(**{rest: (*unknown, *of_recipe)}) if rest else bound()


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


def names_and_fields(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names of recipes, which come first, and the fields."""
    words = list(words)
    first = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    return words[:first], words[first:]


def only(verb: str, names: list[str]) -> str:
    """The one recipe that a command takes. Raises InputError for none and for several."""
    if not names:
        raise InputError(f"mnemos {verb}: expected the name of a recipe first, found none; mnemos list prints them")
    if len(names) > 1:
        raise InputError(f"mnemos {verb}: expected one recipe, found {' '.join(names)}; use mnemos compare for several")
    return names[0]


def chosen_recipe(verb: str, name: str, fields: list[str]) -> "Recipe":
    """The named recipe, or that of a file, with the given fields changed."""
    from mnemos.lab.run.recipe_fields import with_fields
    from mnemos.lab.run.recipe_files import find_recipe

    return with_fields(find_recipe(name), fields, f"mnemos {verb} {name}")
