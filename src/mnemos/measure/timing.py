"""Timing that can be trusted: everything that is to be compared runs in turn, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

LEAST = 0.15  # seconds a measurement lasts, for the clock and the scheduler


class Ratio(NamedTuple):
    """The median of ratios of times of one round, and their quartiles (low, high)."""

    median: float
    low: float
    high: float


def race(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each, one measurement a round, after one call of each that is not timed.

    A round measures each of them once, in an order that rotates, so that a machine that slows down slows all of them
    down. A measurement is as many calls as last `LEAST` seconds.
    """
    for run in runs.values():
        run()
    names: list[str] = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            calls, start = 0, time.perf_counter()
            while calls == 0 or time.perf_counter() - start < LEAST:
                runs[name]()
                calls += 1
            times[name].append((time.perf_counter() - start) / calls)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> Ratio:
    """How many times as long `name` took as `base` in the same round, over the rounds."""
    found = [a / b for a, b in zip(times[name], times[base], strict=True)]
    if len(found) == 1:
        return Ratio(found[0], found[0], found[0])
    low, _, high = statistics.quantiles(found, n=4)
    return Ratio(statistics.median(found), low, high)
