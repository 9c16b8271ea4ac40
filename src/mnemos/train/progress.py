"""The progress of a run: a live line on a terminal, and a plain line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PATIENCE = 10.0  # seconds between two plain lines


class Silent:
    """Prints nothing; base of the classes that do."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def updated(self, step: int, update: dict[str, float], peak_bytes: int) -> None:
        """Called after every update."""

    def scoring(self, split: str, size: int, batches: Iterable[Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """Yield the batches of a split of `size` targets, and show how many targets, by `count`, have been scored."""
        yield from batches

    def say(self, text: str) -> None:
        """Print a sentence that stays on the screen."""


class Plain(Silent):
    """Prints a line every `PATIENCE` seconds, for logs."""

    def __init__(self, name: str, steps: int, step: int) -> None:
        self.name, self.steps, self.first = name, steps, step
        self.began = time.monotonic()
        self.said = -PATIENCE

    def updated(self, step: int, update: dict[str, float], peak_bytes: int) -> None:
        """As in `Silent`."""
        now = time.monotonic() - self.began
        if now - self.said < PATIENCE and step < self.steps:
            return
        self.said = now
        rate = (step - self.first) / max(now, 1e-9)
        left = (self.steps - step) / rate
        self.say(
            f"{self.name} {step}/{self.steps} loss {update['loss']:.4f} lr {update['lr']:.2e} "
            f"{rate:.1f} steps/s {_clock(left)} left {peak_bytes / 2**20:.0f} MiB"
        )

    def scoring(self, split: str, size: int, batches: Iterable[Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """As in `Silent`; prints nothing for a split that takes less than `PATIENCE` seconds."""
        said = began = time.monotonic()
        done = 0
        for batch in batches:
            now = time.monotonic()
            if done and now - said >= PATIENCE:
                said = now
                left = (now - began) / done * max(size - done, 0)
                self.say(f"{self.name} scoring {split} {done}/{size} {_clock(left)} left")
            yield batch
            done += count(batch)

    def say(self, text: str) -> None:
        """As in `Silent`."""
        print(text, file=sys.stderr, flush=True)


class Live(Silent):
    """Shows a bar with loss, learning rate, speed, time left and memory, rewritten in place."""

    def __init__(self, name: str, steps: int, step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.first, self.began = step, time.monotonic()
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.name = name
        self.task = self.bar.add_task(name, total=steps, completed=step, facts="", visible=step < steps)

    def __enter__(self) -> "Live":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def updated(self, step: int, update: dict[str, float], peak_bytes: int) -> None:
        """As in `Silent`."""
        speed = (step - self.first) / max(time.monotonic() - self.began, 1e-9)
        facts = f"loss {update['loss']:.4f}  lr {update['lr']:.2e}  {speed:.1f}/s  {peak_bytes / 2**20:.0f} MiB"
        self.bar.update(self.task, completed=step, facts=facts)

    def scoring(self, split: str, size: int, batches: Iterable[Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """As in `Silent`, with a second bar that is removed at the end of the split."""
        task = self.bar.add_task(f"{self.name} scoring {split}", total=size, facts="")
        try:
            for batch in batches:
                yield batch
                self.bar.advance(task, count(batch))
        finally:
            self.bar.remove_task(task)

    def say(self, text: str) -> None:
        """As in `Silent`."""
        self.bar.console.print(text, markup=False, highlight=False)


def progress(quiet: bool, *arguments: Any) -> Silent:
    """The progress for (name, steps, steps done): `Silent` if quiet, `Live` on a terminal, else `Plain`.

    With no steps left it shows scoring only.
    """
    if quiet:
        return Silent()
    return (Live if sys.stderr.isatty() else Plain)(*arguments)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
