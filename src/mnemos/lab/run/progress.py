"""Progress of a run: a bar on a terminal or in a notebook, a line every few seconds in a log, or nothing."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from mnemos.errors import printable, say

Item = TypeVar("Item")  # a batch of any type
INTERVAL = 10.0  # seconds between two lines of a log
MEASURED = 3.0  # seconds of updates from which the time of several runs is estimated


class RunNumber(NamedTuple):
    """The number of a run among those of a comparison.

    first: no run was trained before it in this command. new: none of its recipe.
    """

    number: int
    of: int
    jobs: int = 1
    first: bool = False
    new: bool = False


RUN_NUMBER: ContextVar[RunNumber | None] = ContextVar("RUN_NUMBER", default=None)  # of the run that is trained


class NoProgress:
    """A display that prints nothing; base of the others.

    The display of the first run of several also says, once, how long the updates of all of them will take: it is timed
    from its first update on, for `MEASURED` seconds or to its end. of: that run's number.
    """

    def __init__(self, name: str = "", steps: int = 0, step: int = 0, of: RunNumber | None = None) -> None:
        self.name, self.steps, self.first, self.of = name, steps, step, of
        self.began = time.monotonic()
        self.timed: tuple[float, int] | None = None

    def __enter__(self) -> "NoProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Show that update `step` is done. update: {"loss", "lr", …} of it. memory: returns the peak in bytes."""
        self.show(step, update, memory)
        if self.of is None:
            return
        now = time.monotonic()
        if self.timed is None:
            self.timed = now, step
        elif now - self.timed[0] >= MEASURED or step == self.steps:
            one = (now - self.timed[0]) / (step - self.timed[1]) * self.steps
            runs = self.of.of - self.of.number + 1
            say(
                f"the updates of this run will take about {clock(one)}, those of {runs} runs like it "
                f"{clock(one * -(-runs // self.of.jobs))}; scores and the memory's controls come to them",
                flush=True,
            )
            self.of = None

    def show(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """See `updated`."""

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """Yield the batches of a split and show the progress: count(batch) targets, or rows, of `size` per batch."""
        yield from batches

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""


class LogProgress(NoProgress):
    """One line every `INTERVAL` seconds: for logs."""

    last_line = float("-inf")

    def show(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
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

    def __init__(self, name: str, steps: int, step: int, of: RunNumber | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(name, steps, step, of)
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

    def show(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
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
    """A display of a run with so many steps, of which `step` are done: a bar on a terminal and in a notebook, or lines.

    quiet: none. steps 0: the display shows evaluations only. A run of a comparison has its number before the name.
    """
    number = RUN_NUMBER.get()
    if number is not None:
        name = f"[{number.number}/{number.of}] {name}"
    # rich can draw in a notebook where the process belongs to a kernel, and ipywidgets is installed.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    draws = sys.stderr.isatty() or (hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is not None)
    display = NoProgress if quiet else BarProgress if draws else LogProgress
    return display(name, steps, step, number if number is not None and number.first and steps > step else None)


def clock(seconds: float) -> str:
    """Seconds as hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
