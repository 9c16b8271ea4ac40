"""A recipe with settings from the command line: `--model.dim 64 --model.attention linear`; errors have one line."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mnemos import registry
from mnemos.config import AttentionConfig, in_words
from mnemos.types import InputError

from .recipe import Recipe

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance


def with_fields(recipe: Recipe, words: Sequence[str], program: str) -> Recipe:
    """The recipe with the settings in `words`: `--field value`, where a field is a path such as `model.dim`.

    A field that holds an attention also accepts the name of one, `--model.attention linear`, which replaces it by that
    attention with its default settings; settings of the new attention may be given beside it. program: the command
    before the words, for the help. Raises InputError for unknown fields and values of the wrong type, and SystemExit
    after it printed the help for `--help`.
    """
    import tyro

    recipe, words = _with_attentions(recipe, list(words), program)
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
    registry.load_plugins()
    about = f"{recipe.about}. Each setting of the recipe is an option: --field value."
    for path in _attentions(recipe):
        names = ", ".join(registry.names("attention"))
        about += f" --{path} NAME replaces the attention by another one with its default settings; NAME: {names}."
    return about


def _attentions(value: object, path: str = "") -> Iterator[str]:
    """The paths of the fields that hold an attention's configuration."""
    if isinstance(value, AttentionConfig):
        yield path
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _attentions(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))


def _with_attentions(recipe: Recipe, words: list[str], program: str) -> tuple[Recipe, list[str]]:
    """Apply every `--path NAME` whose path holds an attention: (the recipe, the other words)."""
    paths, rest = set(_attentions(recipe)), []
    remaining = iter(words)
    for word in remaining:
        option, equals, name = word.partition("=")
        path = _path(option)
        if not option.startswith("--") or path not in paths:
            rest.append(word)
            continue
        name = name if equals else next(remaining, "")
        if not name or name.startswith("--"):
            known = ", ".join(registry.names("attention"))
            raise InputError(f"--{path}: expected the name of an attention, found none; known: {known}")
        recipe = _replaced(recipe, path.split("."), _default(name, f"--{path}"))
    return recipe, rest


def _default(name: str, option: str) -> AttentionConfig:
    """The attention's configuration with default settings."""
    cls = registry.load("attention", name)
    missing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory is missing]
    if needed:
        raise InputError(
            f"{option}: expected an attention whose settings have defaults, found {name!r} with none for "
            f"{', '.join(needed)}; set it in a recipe"
        )
    made: AttentionConfig = cls()
    return made


T = typing.TypeVar("T", bound="DataclassInstance")


def _replaced(value: T, path: list[str], leaf: object) -> T:
    """A dataclass with the field at a path replaced."""
    inner = leaf if len(path) == 1 else _replaced(getattr(value, path[0]), path[1:], leaf)
    return replace(value, **{path[0]: inner})


def _path(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


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
        return f"expected a setting of {recipe.name}, found {option}; {hint}"
    wrong = re.match(r"(?:Error parsing|Missing value for|invalid choice .* for)(?: argument)? '?--([\w.-]+)", problem)
    expected = in_words(_annotation(recipe, _path(wrong[1]).split("."))) if wrong else None
    if wrong is None or expected is None:
        return f"{problem.rstrip('.')}; {hint}"
    return f"--{wrong[1]}: expected {expected}, found {_given(words, wrong[1])}; {hint}"


def _given(words: list[str], option: str) -> str:
    """The values of an option as they were typed."""
    found: list[str] = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--") and _path(name) == _path(option):
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
