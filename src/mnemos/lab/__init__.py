"""The laboratory: tasks, training, comparisons, reports, the command line. The library never imports it."""

from importlib.util import find_spec

from mnemos.errors import InputError


class _MissingExtraError(InputError, ImportError):
    """An InputError that `pkgutil` and others also know as what it is: a failed import."""


_NEEDED = ("lightning_fabric", "matplotlib", "rich", "scipy", "tyro")  # the extra `lab` of pyproject.toml

if _missing := [name for name in _NEEDED if find_spec(name) is None]:
    raise _MissingExtraError(
        "mnemos.lab: expected the libraries of the laboratory (tasks, training, reports, the command line), found that "
        f"{', '.join(_missing)} {'is' if len(_missing) == 1 else 'are'} not installed; run: pip install "
        "'mnemos-torch[lab]'"
    )
