"""A recipe with settings from the command line: `--model.dim 64 --model.attention linear`; errors have one line."""

import contextlib
import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from mnemos import registry
from mnemos.config import AttentionConfig, default_config, in_words
from mnemos.errors import say
from mnemos.lab.errors import problem_of_tyro
from mnemos.memory.gated_cache import GRC, PRESETS
from mnemos.types import InputError

from .recipe import Recipe

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = typing.TypeVar("T", bound="DataclassInstance")
_NO_CACHE = "none"


def with_fields(recipe: Recipe, words: Sequence[str], program: str) -> Recipe:
    """The recipe with the settings in `words`: `--field value`, where a field is a path such as `model.dim`.

    A field that holds an attention also accepts the name of one, and one that may hold a gated cache that of a preset
    (`with_parts`). program: the command before the words, for the help. Raises InputError for unknown fields and values
    of the wrong type, and SystemExit after it printed the help for `--help`.
    """
    if not words:  # the parser takes as long to import as the rest of `mnemos show` without PyTorch
        return recipe
    import tyro

    shown = recipe
    named = dict.fromkeys(path_of(word.partition("=")[0]) for word in words if word.startswith("--"))
    if changed := ", ".join(name for name in named if name not in ("about", "help", "train.seed")):
        # The recipe's own line may say what is no longer true.
        changes = f"{recipe.name} with given settings: "
        before = f"{recipe.about}, " if recipe.about.startswith(changes) else changes
        recipe = replace(recipe, about=before + changed)
    recipe, words = with_parts(recipe, words)
    _check_names(recipe, words, program)
    about = f"{shown.about}. Each setting of the recipe is an option: --field value."
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return tyro.cli(
                Recipe,
                prog=program,
                description=about + parts_help(shown) if {"-h", "--help"} & set(words) else None,
                args=words,
                default=recipe,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            say(output.getvalue(), end="")
            raise
        raise InputError(_one_line(output.getvalue(), recipe, words, program)) from None


def _check_names(recipe: Recipe, words: list[str], program: str) -> None:
    """Raise InputError for an option that is no setting of the recipe, with the nearest one."""
    paths = list(_paths(recipe))
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        wrong = path_of(option)
        if wrong == "help" or wrong in paths:
            continue
        named = [path for path in paths if path.rpartition(".")[2] == wrong.rpartition(".")[2]]
        near = difflib.get_close_matches(wrong, named or paths, 1, 0.0 if named else 0.75)
        hint = f"did you mean --{near[0].replace('_', '-')}?" if near else f"see {program} --help"
        part = wrong.rpartition(".")[0]
        if not near and (inside := [path for path in paths if part and path.rpartition(".")[0] == part]):
            hint = f"--{part} has {', '.join(path.rpartition('.')[2] for path in inside)}".replace("_", "-")
        for path in _caches(recipe):
            if wrong.startswith(f"{path}.") and _value(recipe, path) is None:
                hint = f"{recipe.name} has no cache: add --{path} {next(reversed(PRESETS))}"
        raise InputError(f"expected a setting of {recipe.name}, found {option}; {hint}")


def _one_line(message: str, recipe: Recipe, words: list[str], program: str) -> str:
    """tyro's boxed error message as one line of ours: what was expected, what was found, what to do."""
    problem, _ = problem_of_tyro(message)
    if problem.startswith("Unrecognized options:"):
        words = problem.partition(":")[2].replace(",", "").split()
        return f"expected settings --field value, found {' '.join(words)} without its field; see {program} --help"
    if refused := re.match(r"Error parsing ([\w.]+): (.*)", problem):  # by the settings themselves, such as GRC
        return _of_field(recipe, *refused.groups())
    wrong = re.match(r"(?:Error parsing|Missing value for|invalid choice .* for)(?: argument)? '?--([\w.-]+)", problem)
    expected = in_words(_annotation(recipe, path_of(wrong[1]).split("."))) if wrong else None
    if wrong is None or expected is None:
        return f"{problem}; see {program} --help"
    return f"--{wrong[1]}: expected {expected}, found {_given(words, wrong[1])}; see {program} --help"


def _of_field(recipe: Recipe, part: str, said: str) -> str:
    """An error that a part of the recipe raised, such as "GRC.length: expected …", with the option."""
    name, colon, rest = said.partition(": ")
    path = [] if part == type(recipe).__name__ else part.split(".")
    field = [*path, name.rpartition(".")[2]]
    if colon and _annotation(recipe, field) is not None:
        return f"--{'.'.join(field)}: {rest}"
    return f"--{'.'.join(path)}: {said}" if path else said


def _given(words: list[str], option: str) -> str:
    values: dict[str, list[str]] = {}  # of each option; of one that is given twice, the last
    path = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            path = path_of(name)
            values[path] = [value] if equals else []
        else:
            values.setdefault(path, []).append(word)
    return repr(" ".join(values[path_of(option)])) if values.get(path_of(option)) else "none"


def _annotation(value: object, path: list[str]) -> object:
    if not dataclasses.is_dataclass(value):
        return None
    if len(path) > 1:
        return _annotation(getattr(value, path[0], None), path[1:])
    return typing.get_type_hints(type(value)).get(path[0])


def with_parts(recipe: Recipe, words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """Apply every `--path NAME` whose path holds an attention or may hold a gated cache: (the recipe, other words).

    An attention is replaced by the named one with its default settings. A cache gets the named preset, or is added with
    it; "none" removes it. `--model NAME` comes first: another model as the host (`hosted.with_host`). Raises InputError
    for unknown names.
    """

    def taken(words: Sequence[str], paths: Collection[str]) -> tuple[list[tuple[str, str]], list[str]]:
        """([(path, name)] of the options with these paths, other words)."""
        pairs, rest, remaining = [], [], iter(words)
        for word in remaining:
            option, equals, name = word.partition("=")
            if not option.startswith("--") or path_of(option) not in paths:
                rest.append(word)
                continue
            name = name if equals else next(remaining, "")
            pairs.append((path_of(option), "" if name.startswith("--") else name))
        return pairs, rest

    sources, words = taken(words, ["model"])
    if sources:
        from .hosted import with_host

        own_tokens = any(path_of(word.partition("=")[0]) == "data.tokens" for word in words)
        recipe = with_host(recipe, sources[-1][1], own_tokens)
    attentions = set(_attentions(recipe))
    pairs, rest = taken(words, attentions | set(_caches(recipe)))
    for path, name in pairs:
        part: object = None
        if path in attentions:
            if not name:
                known = ", ".join(registry.names("attention"))
                raise InputError(f"--{path}: expected the name of an attention, found none; known: {known}")
            part = default_config("attention", name, f"--{path}")
        elif name.lower() != _NO_CACHE:
            if name not in PRESETS:
                known = ", ".join([*PRESETS, _NO_CACHE])
                raise InputError(f"--{path}: expected a preset of a cache or none, found {name!r}; known: {known}")
            now, preset = _value(recipe, path), typing.cast(typing.Any, name)
            switches: dict[str, typing.Any] = dict.fromkeys(PRESETS[name])
            part = replace(now, **switches, preset=preset) if isinstance(now, GRC) else GRC(preset=preset)
        recipe = _replaced(recipe, path.split("."), part)
    return recipe, rest


def parts_help(recipe: Recipe) -> str:
    """Sentences for the help: the fields that take a name, and the names."""
    registry.load_plugins()
    said = ""
    for path in _attentions(recipe):
        names = ", ".join(registry.names("attention"))
        said += f" --{path} NAME replaces the attention by another one with its default settings; NAME: {names}."
    for path in _caches(recipe):
        names = ", ".join([*PRESETS, _NO_CACHE])
        said += f" --{path} NAME adds a gated cache with this preset, changes its preset, or removes it; NAME: {names}."
    said += (
        " --model hf:NAME, timm:NAME or the folder of a saved model of Hugging Face puts that model in place of this "
    )
    return f"{said}one, with the recipe's cache, and starts with its weights; --train.init-from None: with new ones."


def path_of(option: str) -> str:
    """The path of the field that an option names: --model.num-heads is model.num_heads."""
    return option.lstrip("-").replace("-", "_")


def _paths(value: object, path: str = "") -> Iterator[str]:
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        here = f"{path}.{field.name}".lstrip(".")
        yield here
        yield from _paths(getattr(value, field.name), here)


def _attentions(recipe: Recipe) -> Iterator[str]:
    return (path for path in _paths(recipe) if isinstance(_value(recipe, path), AttentionConfig))


def _caches(value: object, path: str = "") -> Iterator[str]:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        here = f"{path}.{field.name}".lstrip(".")
        if {GRC, type(None)} <= {*typing.get_args(hints[field.name])}:
            yield here
        else:
            yield from _caches(getattr(value, field.name), here)


def _value(value: object, path: str) -> object:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _replaced(value: T, path: list[str], leaf: object) -> T:
    inner = leaf if len(path) == 1 else _replaced(getattr(value, path[0]), path[1:], leaf)
    return replace(value, **{path[0]: inner})
