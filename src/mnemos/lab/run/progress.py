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


class Place(NamedTuple):
    """The place of a run among those of a comparison.

    first: no run was trained before it in this command. new: none of its recipe.
    """

    number: int
    of: int
    jobs: int = 1
    first: bool = False
    new: bool = False


PLACE: ContextVar[Place | None] = ContextVar("PLACE", default=None)  # of the run that is trained


class NoProgress:
    """A display that prints nothing; base of the others."""

    def __enter__(self) -> "NoProgress":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Show that update `step` is done. update: {"loss", "lr", …} of it. memory: returns the peak in bytes."""

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """Yield the batches of a split and show the progress: count(batch) targets, or rows, of `size` per batch."""
        yield from batches

    def message(self, text: str) -> None:
        """Print a line that stays on the screen."""


class LogProgress(NoProgress):
    """One line every `INTERVAL` seconds: for logs."""

    def __init__(self, name: str, steps: int, step: int) -> None:
        self.name, self.steps, self.first = name, steps, step
        self.began = time.monotonic()
        self.last_line = -INTERVAL

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Print step, loss, learning rate, speed, time left and peak memory, at most once per `INTERVAL`."""
        now = time.monotonic() - self.began
        if now - self.last_line < INTERVAL and step < self.steps:
            return
        self.last_line = now
        rate = (step - self.first) / max(now, 1e-9)
        left = (self.steps - step) / rate
        self.message(
            f"{self.name} {step}/{self.steps} loss {update['loss']:.4f} lr {update['lr']:.2e} "
            f"{rate:.1f} steps/s {clock(left)} of training left {memory() / 2**20:.0f} MiB"
        )

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """Yield the batches and print the targets done and the time left, at most once per `INTERVAL`."""
        last_line = began = time.monotonic()
        done = 0
        for batch in batches:
            now = time.monotonic()
            if done and now - last_line >= INTERVAL:
                last_line = now
                left = (now - began) / done * max(size - done, 0)
                self.message(f"{self.name} evaluating {split} {done}/{size} {unit} {clock(left)} left")
            yield batch
            done += count(batch)

    def message(self, text: str) -> None:
        """Print a line to stderr."""
        say(text, file=sys.stderr, flush=True)


class BarProgress(NoProgress):
    """A bar with loss, speed, time left and peak memory, redrawn in place: for terminals of 80 columns or more."""

    def __init__(self, name: str, steps: int, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.first, self.began = step, time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True),
        )
        self.name = name
        shown = step < steps
        # More would not fit into 80 columns. An evaluation has a bar, and a time left, of its own.
        self.task = self.bar.add_task(
            printable(name), total=steps, completed=step, facts="", left="left", visible=shown
        )

    def __enter__(self) -> "BarProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Redraw the bar."""
        speed = (step - self.first) / max(time.monotonic() - self.began, 1e-9)
        facts = f"loss {update['loss']:.4f}  {speed:.1f}/s  {memory() / 2**20:.0f} MiB"
        self.bar.update(self.task, completed=step, facts=facts)

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """Yield the batches and show a second bar, which is removed after the last batch."""
        task = self.bar.add_task(f"scoring {split}", total=size, facts=unit, left="left")
        try:
            for batch in batches:
                yield batch
                self.bar.advance(task, count(batch))
        finally:
            self.bar.remove_task(task)

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self.bar.console.print(printable(text), markup=False, highlight=False)


def in_notebook() -> bool:
    """Whether rich can draw a bar in this process's notebook: it belongs to a kernel, and ipywidgets is installed."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") and importlib.util.find_spec("ipywidgets") is not None


class FirstRun(NoProgress):
    """The display of the first run of several: it also says, once, how long the updates of all of them will take.

    The run is timed from its first update on, for `MEASURED` seconds or to its end.
    """

    def __init__(self, display: NoProgress, place: Place, steps: int) -> None:
        self.display, self.place, self.steps = display, place, steps
        self.began: tuple[float, int] | None = None
        self.said = False

    def __enter__(self) -> "FirstRun":
        self.display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)

    def updated(self, step: int, update: dict[str, float], memory: Callable[[], int]) -> None:
        """Show the update and, when enough of them are timed, the estimate."""
        self.display.updated(step, update, memory)
        now = time.monotonic()
        if self.began is None:
            self.began = now, step
        elif not self.said and (now - self.began[0] >= MEASURED or step == self.steps):
            self.said = True
            one = (now - self.began[0]) / (step - self.began[1]) * self.steps
            runs = self.place.of - self.place.number + 1
            say(
                f"the updates of this run will take about {clock(one)}, those of {runs} runs like it "
                f"{clock(one * -(-runs // self.place.jobs))}",
                flush=True,
            )

    def evaluation(
        self, split: str, size: int, batches: Iterable[Item], count: Callable[[Item], int], unit: str = "targets"
    ) -> Iterator[Item]:
        """As the display."""
        return self.display.evaluation(split, size, batches, count, unit)

    def message(self, text: str) -> None:
        """As the display."""
        self.display.message(text)


def progress(quiet: bool, name: str, steps: int, step: int) -> NoProgress:
    """A display of a run with so many steps, of which `step` are done: a bar on a terminal and in a notebook, or lines.

    quiet: none. steps 0: the display shows evaluations only. A run of a comparison has its place before the name.
    """
    place = PLACE.get()
    if place is not None:
        name = f"[{place.number}/{place.of}] {name}"
    display = NoProgress()
    if not quiet:
        bar = BarProgress if sys.stderr.isatty() or in_notebook() else LogProgress
        display = bar(name, steps, step)
    return FirstRun(display, place, steps) if place is not None and place.first and steps > step else display


def clock(seconds: float) -> str:
    """Seconds as hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
