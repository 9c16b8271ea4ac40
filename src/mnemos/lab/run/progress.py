"""Progress of a run: a bar on a terminal, a line every few seconds in a log, or nothing."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from mnemos.errors import printable, say

Item = TypeVar("Item")  # a batch of any type
INTERVAL = 10.0  # seconds between two lines of a log


class RunNumber(NamedTuple):
    """The number of a run, from 1, among those of a comparison. first, new: of those that begin now, of its recipe."""

    number: int
    of: int
    first: bool = False
    new: bool = False


RUN_NUMBER: ContextVar[RunNumber | None] = ContextVar("RUN_NUMBER", default=None)  # of the run that is trained


class NoProgress:
    """A display that prints nothing; base of the others."""

    def __init__(self, name: str = "", steps: int = 0, step: int = 0) -> None:
        self.name, self.steps, self.first = name, steps, step
        self.began = time.monotonic()

    def __enter__(self) -> "NoProgress":
        return self

    def __exit__(self, *_: object) -> None: ...

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Show that update `step` is done. update: {"loss", "lr", …} of it. memory: returns the peak in bytes."""

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """Yield the batches of a split and show the progress: count(batch) targets, or rows, of `size` per batch."""
        yield from batches

    def message(self, text: str) -> None: ...


class LogProgress(NoProgress):
    """One line every `INTERVAL` seconds: for logs."""

    last_line = float("-inf")

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        now = time.monotonic()
        if now - self.last_line < INTERVAL and step < self.steps:
            return
        self.last_line = now
        rate = (step - self.first) / max(now - self.began, 1e-9)
        self.message(
            f"{self.name} {step}/{self.steps} loss {update['loss']:.4f} lr {update['lr']:.2e} {rate:.1f} steps/s "
            f"{clock((self.steps - step) / rate)} of training left {memory() / 2**20:.0f} MiB"
        )

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        last_line = began = time.monotonic()
        done = 0
        for batch in batches:
            now = time.monotonic()
            if done and now - last_line >= INTERVAL:
                last_line = now
                left = clock((now - began) / done * max(size - done, 0))
                self.message(f"{self.name} evaluating {split} {done}/{size} {unit} {left} left")
            yield batch
            done += count(batch)

    def message(self, text: str) -> None:
        say(text, file=sys.stderr, flush=True)


class BarProgress(NoProgress):
    """rich's bar with loss, speed, time left and peak memory: for terminals of 80 columns or more."""

    def __init__(self, name: str, steps: int, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(name, steps, step)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        # More would not fit into 80 columns. An evaluation has a bar, and a time left, of its own.
        self.task = self.bar.add_task(printable(name), total=steps, completed=step, facts="", visible=step < steps)

    def __enter__(self) -> "BarProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        speed = (step - self.first) / max(time.monotonic() - self.began, 1e-9)
        facts = f"loss {update['loss']:.4f}  {speed:.1f}/s  {memory() / 2**20:.0f} MiB"
        self.bar.update(self.task, completed=step, facts=facts)

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        task = self.bar.add_task(f"scoring {split}", total=size, facts=unit)
        try:
            for batch in batches:
                yield batch
                self.bar.advance(task, count(batch))
        finally:
            self.bar.remove_task(task)

    def message(self, text: str) -> None:
        self.bar.console.print(printable(text), markup=False, highlight=False)


def progress(quiet: bool, name: str, steps: int, step: int) -> NoProgress:
    """A display of a run with so many steps, of which `step` are done: a bar on a terminal, or lines.

    quiet: none. steps 0: evaluations only. A run of a comparison has its number before the name.
    """
    number = RUN_NUMBER.get()
    if number is not None:
        name = f"[{number.number}/{number.of}] {name}"
    display = NoProgress if quiet else BarProgress if sys.stderr.isatty() else LogProgress
    return display(name, steps, step)


def clock(seconds: float) -> str:
    """Seconds as hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
