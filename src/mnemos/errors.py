"""The errors of bad input, and how text is printed. Nothing slow is imported."""

import dataclasses
import difflib
import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable
from typing import ParamSpec, TextIO, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends


class InputError(ValueError):
    """The user's input was wrong: one line of what was expected, what was found and what to do."""


class UnknownArgumentError(InputError, TypeError):
    """An argument that a function or class does not have: Python's TypeError, with the name that is alike."""


class UntestedVersion(UserWarning):
    """A library has a version with which this one was not tested (`mnemos.libraries.TESTED`)."""


def install_command(extra: str) -> str:
    """The command that installs what is absent of an extra of pyproject.toml, by the libraries' own names.

    The distribution itself is on no index, so "mnemos-torch[hf]" would fetch nothing, or what a stranger put there.
    """
    try:
        needed = importlib.metadata.requires("mnemos-torch") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, without an installation
        needed = []
    own = [one.partition(";")[0].strip() for one in needed if re.search(rf"extra == ['\"]{extra}['\"]", one)]
    absent = [one for one in own if not _is_installed(one)] or own
    return "pip install " + (" ".join(f"'{one}'" for one in absent) or f"'.[{extra}]' in a clone of mnemos")


def _is_installed(requirement: str) -> bool:
    """Whether it is, in a version that is wanted; False where the library `packaging` is not there to say."""
    try:
        from packaging.requirements import Requirement

        needed = Requirement(requirement)
        return needed.specifier.contains(importlib.metadata.version(needed.name), prereleases=True)
    except ImportError:  # PackageNotFoundError is one
        return False


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, as escapes; tabs and line ends stay."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def say(*parts: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` of `printable` text: names of files, labels and what models write may hold control characters."""
    print(printable(sep.join(map(str, parts))), end=end, file=file, flush=flush)


def one_line(error: object) -> str:
    """What a foreign error says, on one line of at most 200 characters; its class, where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def plural(count: int, noun: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def near_name(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint for an unknown name: the most similar one, or `otherwise`, by default all."""
    known = list(known)
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else otherwise or f"known: {', '.join(known)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar; None if none is alike."""
    return next(iter(difflib.get_close_matches(name, list(known), 1)), None)


def near_arguments(
    function: Callable[_Arguments, _Result], name: str = "", settings: type | None = None
) -> Callable[_Arguments, _Result]:
    """The function, with an `UnknownArgumentError` that names the argument that is alike.

    name: of the function in the error. settings: the dataclass of one of its arguments, whose fields are known too.
    """

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            parameters = inspect.signature(function).parameters
            unknown = next((one for one in kwargs if one not in parameters), None)
            if unknown is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                raise
        fields = [field.name for field in dataclasses.fields(settings)] if settings else []
        known = [one for one in parameters if one != "self"]
        near = nearest(unknown, [*known, *fields])
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
        if settings and near in fields:
            hint = f"did you mean {settings.__name__}({near}=...) as an argument?"
        raise UnknownArgumentError(
            f"{name or function.__name__}: expected an argument that it has, found {unknown!r}; {hint}"
        )

    return checked
