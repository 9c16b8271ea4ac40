"""The laboratory: tasks, training, comparisons, reports, the command line. The library never imports it."""

from mnemos.errors import InputError, install_command
from mnemos.face import LABORATORY, find_missing


class _MissingExtraError(InputError, ImportError):
    """An InputError that `pkgutil` and others also know as what it is: a failed import."""


if _missing := find_missing(LABORATORY):
    raise _MissingExtraError(
        "mnemos.lab: expected the libraries of the laboratory (tasks, training, reports, the command line), found that "
        f"{', '.join(_missing)} {'is' if len(_missing) == 1 else 'are'} not installed; run: " + install_command("lab")
    )
