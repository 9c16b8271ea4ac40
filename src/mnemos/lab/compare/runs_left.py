"""How many of several runs are done, how long they took, and how long the others will take."""

import time
from collections.abc import Callable, Iterable
from threading import Lock

from mnemos.lab.run.progress import Place, clock


class RunsLeft:
    """Counts runs by the name of their recipe, because recipes differ in cost.

    The time that is left is estimated as

        Σ_name  runs left(name) · mean seconds of its finished runs  /  jobs

    A recipe without a finished run counts with the mean of all. Runs that were finished before count as done, and not
    as time. names: of all runs, each as often as it has runs. jobs: runs at a time. now: a clock in seconds. Several
    threads may use it.
    """

    def __init__(self, names: Iterable[str], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._left: dict[str, int] = {}
        for name in names:
            self._left[name] = self._left.get(name, 0) + 1
        self._started = self._finished = 0  # runs that began, and runs that were finished before
        self._begun: set[str] = set()
        self._seconds: dict[str, list[float]] = {}
        self._all, self._jobs, self._now = sum(self._left.values()), jobs, now
        self._began, self._lock = now(), Lock()

    def started(self, name: str) -> Place:
        """Count a run that begins now, and was not finished before; its place among all."""
        with self._lock:
            self._started += 1
            new = name not in self._begun
            self._begun.add(name)
            return Place(self._finished + self._started, self._all, self._jobs, self._started == 1, new)

    def now(self) -> float:
        """The time in seconds, to be given to `done`."""
        return self._now()

    def done(self, name: str, began: float | None) -> str:
        """Count a run that began at that time, or None if it was finished before; what is done and left, in words."""
        with self._lock:
            self._left[name] -= 1
            self._finished += began is None
            if began is not None:
                self._seconds.setdefault(name, []).append(self._now() - began)
            left = sum(self._left.values())
            text = f"{self._all - left} of {self._all} run{'s' * (self._all > 1)}, {clock(self._now() - self._began)}"
            return f"{text}, about {clock(self._estimate())} left" if left and self._seconds else text

    def without(self, names: Iterable[str]) -> None:
        """Count runs of these recipes as not needed, for example because no run of a sweep was finished."""
        with self._lock:
            for name in names:
                self._all -= self._left.pop(name, 0)

    def _estimate(self) -> float:
        every = [s for seconds in self._seconds.values() for s in seconds]
        mean = {name: sum(s) / len(s) for name, s in {**dict.fromkeys(self._left, every), **self._seconds}.items()}
        return sum(count * mean[name] for name, count in self._left.items()) / self._jobs
