"""What benchmarks begin and end with: a command line, and results as JSON with their provenance."""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mnemos.lab.run.provenance import now, provenance

Choices = Mapping[str, Iterable[str]]
_STARTED = now()


def command(doc: str | None, choices: Choices | None = None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of --out FILE and of --NAME for each default: a list takes several values, a bool is a switch.

    choices: the values that an option may have.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        known = None if choices is None or name not in choices else list(choices[name])
        settings: dict[str, Any] = {"default": default, "choices": known}
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", nargs="*", type=type(default[0]), **settings)
        else:
            parser.add_argument(f"--{name}", type=type(default), **settings)
    parser.add_argument("--out", type=Path, help="the JSON file of the results")
    return parser


def beside(times: Mapping[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """Of each name in `times` (see `race`): the median, and that of the ratios to `base` of the same round."""
    rows = {}
    for name, each in times.items():
        ratios = [a / b for a, b in zip(each, times[base], strict=True)]
        rows[name] = {
            "seconds": statistics.median(each),
            "ratio": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
        }
    return rows


def write(path: Path | None, result: dict[str, Any], seed: int = 0) -> None:
    """Write the results of this process to a file, if there is one."""
    if path is not None:
        origin = {**provenance(seed, "cpu"), "started": _STARTED}
        path.write_text(json.dumps({**result, "provenance": origin}, indent=2, ensure_ascii=False) + "\n")
