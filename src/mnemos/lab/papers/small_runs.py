"""Shared by claims with small models: the choice of data, and a note on the number of seeds."""

from pathlib import Path

from mnemos.lab.tasks.images import find_mnist
from mnemos.types import InputError, JSONObject

from .reproduce import Options


def task(options: Options) -> tuple[str, JSONObject]:
    """The small recipes that the options select ("digits", "mnist" or "cifar"), and changed fields of their data."""
    if options.data is None:
        return "digits", {}
    if not options.data.is_dir():
        raise InputError(
            f"--data {options.data}: expected a folder with CIFAR-10 or MNIST, found a file; give the folder"
        )
    for folder in (options.data, options.data / "mnist"):
        try:
            find_mnist(folder, "train")
        except InputError:
            continue
        return "mnist", {"path": str(folder)}
    return "cifar", {"folder": str(options.data)}


def caution(options: Options, data: bool = True) -> str:
    """A note on what the number of seeds can show. `data`: whether --data could select a larger data set."""
    if options.seeds >= 5:
        return "± is the standard deviation over seeds. A difference smaller than it is not evidence."
    more = ", and --data" if data and options.data is None else ""
    return f"{options.seeds} seed{'s' * (options.seeds > 1)}: too few for a conclusion. Use --seeds 5{more}."


def runs(comparison: JSONObject) -> list[Path]:
    """The folders of all runs of a comparison."""
    return [comparison["folder"] / place for places in comparison["runs"].values() for place in places]
