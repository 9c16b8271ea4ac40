"""Copies of a run's metrics.jsonl for TensorBoard and trackio (`TrainConfig.log`). metrics.jsonl stays the record."""

import contextlib
import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mnemos import libraries
from mnemos.atomic import write_json
from mnemos.config import to_dict

from .files import Measurement
from .recipe import Recipe

PROJECT = "mnemos"  # of trackio; its pages show the runs of a project together


class Sink(Protocol):
    """Receives the lines of metrics.jsonl. After a resumption it holds each line once, as metrics.jsonl does."""

    def write(self, lines: Sequence[Measurement]) -> None:
        """Send lines."""

    def close(self) -> None:
        """Send what is left and close."""


def check_library(log: str) -> None:
    """Raise InputError, with the install command, if the library of a value of `TrainConfig.log` is not installed."""
    if log != "none":
        getattr(libraries, log)()


def open_sink(folder: Path, recipe: Recipe, step: int) -> Sink | None:
    """The sink of a run that continues after the checkpoint of `step` (0: that starts); None for log "none".

    metrics.jsonl must have been trimmed to that step already.
    """
    sinks: dict[str, type[TensorBoard] | type[Trackio]] = {"tensorboard": TensorBoard, "trackio": Trackio}
    made = sinks.get(recipe.train.log)
    if made is None:
        return None
    kept = list(Measurement.read_all(folder)) if (folder / Measurement.FILE).exists() else []
    return made(folder, recipe, step, kept)


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, recipe: Recipe, step: int, kept: Sequence[Measurement]) -> None:
        libraries.tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what earlier files have from purge_step on, also the line of that step, which was kept.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        self.write([line for line in kept if line.step >= step])

    def write(self, lines: Sequence[Measurement]) -> None:
        """Add each number of the lines as a scalar at the line's step."""
        for line in lines:
            for name, value in scalars(line):
                self._writer.add_scalar(name, value, line.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Trackio:
    """A run in trackio's project `PROJECT`, whose name is in RUN/trackio.json.

    A killed process loses lines that trackio has not written yet, and trackio cannot remove single lines. A resumed run
    therefore deletes its run on this machine and sends all lines again. Where trackio does not hold the run on this
    machine, such as on a Space, it continues under a new name.
    """

    def __init__(self, folder: Path, recipe: Recipe, step: int, kept: Sequence[Measurement]) -> None:
        file = folder / "trackio.json"
        about = json.loads(file.read_text()) if file.is_file() else None
        if about is None or not _deleted(about["name"]):
            about = {"project": PROJECT, "name": f"{recipe.name}-{uuid.uuid4().hex[:8]}"}
        write_json(file, about)
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints how to open its page
            self._run: Any = libraries.trackio().init(project=PROJECT, name=about["name"], config=to_dict(recipe))
        self.write(kept)

    def write(self, lines: Sequence[Measurement]) -> None:
        """Send the numbers of each line."""
        for line in lines:
            self._run.log(dict(scalars(line)), step=line.step)

    def close(self) -> None:
        """Wait until trackio has everything."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def _deleted(name: str) -> bool:
    """Delete the run from trackio's files on this machine; returns whether it was there."""
    try:
        runs = [run for run in libraries.trackio().Api().runs(PROJECT) if run.name == name]
    except ValueError:  # there is no such project
        return False
    return any([run.delete() for run in runs])


def scalars(line: Measurement) -> Iterator[tuple[str, float]]:
    """The numbers of a line of metrics.jsonl with names such as train/loss, or gates/blocks.0.attention/mix/0."""
    yield from _numbers(line.values, line.kind)


def _numbers(value: object, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}/{key}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            own = part.get("name") if isinstance(part, dict) else None
            yield from _numbers(part, f"{name}/{own or i}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
