"""What the claims share that train small models: which data, and what their seeds allow to conclude."""

from pathlib import Path
from typing import Any

from mnemos.data.idx import find_mnist
from mnemos.types import InputError

from .reproduce import Options


def task(options: Options) -> tuple[str, dict[str, Any]]:
    """The small task that the options choose ("digits", "mnist", "cifar"), and the fields of its data."""
    if options.data is None:
        return "digits", {}
    if not options.data.is_dir():
        raise InputError(f"--data {options.data}: expected a folder with CIFAR-10 or MNIST, found a file")
    for folder in (options.data, options.data / "mnist"):
        try:
            find_mnist(folder, "train")
        except InputError:
            continue
        return "mnist", {"path": str(folder)}
    return "cifar", {"folder": str(options.data)}


def caution(options: Options, data: bool = True) -> str:
    """What the number of seeds allows to be claimed; `data`: whether there is data that --data could name."""
    if options.seeds >= 5:
        return "± is the standard deviation over seeds; smaller differences show nothing."
    more = ", and --data" if data and options.data is None else ""
    return f"From {options.seeds} seed{'s' * (options.seeds > 1)} nothing can be claimed: give --seeds 5{more}."


def runs(comparison: dict[str, Any]) -> list[Path]:
    """The folders of a comparison's runs."""
    return [comparison["folder"] / place for places in comparison["runs"].values() for place in places]
