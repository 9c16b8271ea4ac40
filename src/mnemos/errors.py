"""The errors of bad input, and how text is printed. Nothing slow is imported."""

import importlib.metadata
import re
from typing import TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends


class InputError(ValueError):
    """The user's input was wrong: one line of what was expected, what was found and what to do."""


class UntestedVersion(UserWarning):
    """A library has a version with which this one was not tested (`mnemos.libraries.TESTED`)."""


def install_command(extra: str) -> str:
    """The command that installs what an extra of pyproject.toml adds, by the libraries' own names.

    The distribution itself is on no index, so "mnemos-torch[hf]" would fetch nothing, or what a stranger put there.
    """
    try:
        needed = importlib.metadata.requires("mnemos-torch") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, without an installation
        needed = []
    own = [one.partition(";")[0].strip() for one in needed if re.search(rf"extra == ['\"]{extra}['\"]", one)]
    return "pip install " + (" ".join(f"'{one}'" for one in own) or f"'.[{extra}]' in a clone of mnemos")


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, as escapes; tabs and line ends stay."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def say(*parts: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """`print` of `printable` text: names of files, labels and what models write may hold control characters."""
    print(printable(sep.join(map(str, parts))), end=end, file=file, flush=flush)
