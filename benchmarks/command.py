"""What benchmarks begin and end with: a command line, and results as JSON with their provenance."""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos.atomic import write_text
from mnemos.lab.measure.timing import ratio
from mnemos.lab.run.provenance import now, provenance

Choices = Mapping[str, Iterable[str]]
_STARTED = now()


def command(doc: str | None, choices: Choices | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of --NAME for each default: a list takes several values, a bool is a switch, a type must be given.

    choices: the values that an option may have. --out: by default the JSON file of the results, which may be left out.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        known = None if choices is None or name not in choices else list(choices[name])
        one = default[0] if isinstance(default, list) else default
        settings: dict[str, Any] = {"required": True} if isinstance(one, type) else {"default": default}
        if isinstance(default, bool):
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= {"type": one if isinstance(one, type) else type(one), "choices": known}
        if isinstance(default, list):
            settings["nargs"] = "+" if isinstance(one, type) else "*"
        parser.add_argument(f"--{name}", **settings)
    if "out" not in defaults:
        parser.add_argument("--out", type=Path, help="the JSON file of the results")
    return parser


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int, first: int = 1) -> dict[str, list[float]]:
    """The seconds that each run returns, in rounds of rotating order, after `first` rounds that do not count.

    `mnemos.lab.measure.timing.race` is for what is timed as a whole.
    """
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-first, rounds):
        begin = (i + first) % len(names)
        for name in names[begin:] + names[:begin]:
            seconds = runs[name]()
            if i >= 0:
                times[name].append(seconds)
    return times


def summary(times: Mapping[str, list[float]], base: str, of: str) -> dict[str, Any]:
    """The medians in "ms", and under the name `of` all other times by those of `base`."""
    row: dict[str, Any] = {"ms": {name: 1e3 * statistics.median(each) for name, each in times.items()}}
    return row | {of: {name: ratio(times, name, base)._asdict() for name in times if name != base}}


def cells(row: Mapping[str, Any], of: str) -> str:
    """A line of a `summary`."""
    ratios = {name: f" ({found['median']:.2f}x)" for name, found in row[of].items()}
    return "  ".join(f"{name} {ms:.3f} ms{ratios.get(name, '')}" for name, ms in row["ms"].items())


def quartiles(times: Mapping[str, list[float]], name: str, base: str) -> dict[str, Any]:
    """The median and the quartiles of the time of `name` by that of `base` in the same round."""
    found = ratio(times, name, base)
    return {"median": found.median, "quartiles": [found.low, found.high]}


def kept(call: Callable[..., Any], given: list[Tensor]) -> float:
    """Floats that a function of these tensors keeps for its backward pass, besides them and its first output."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = call(*given)[0]
    known = {x.untyped_storage().data_ptr() for x in (*given, y)}
    return sum(size for place, size in found.items() if place not in known) / 4


def merged(path: Path | None, rows: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The rows of a file with these, which change rows of equal keys."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in [*(json.loads(path.read_text())["rows"] if path is not None and path.exists() else []), *rows]:
        found.setdefault(tuple(row.get(key, 0) for key in keys), {}).update(row)
    return list(found.values())


def write(path: Path | None, result: dict[str, Any], seed: int = 0) -> None:
    """Write the results of this process to a file, if there is one."""
    if path is not None:
        origin = {**provenance(seed, "cpu"), "started": _STARTED}
        write_text(path, json.dumps({**result, "provenance": origin}, indent=2, ensure_ascii=False) + "\n")
