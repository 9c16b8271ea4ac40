"""Timing for comparisons: the functions that are compared run alternately, in one process."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

LEAST = 0.15  # seconds per measurement, long compared with the clock's and the scheduler's resolution


class Ratio(NamedTuple):
    """The median over rounds of the ratio of two times of one round, and its quartiles (low, high)."""

    median: float
    low: float
    high: float


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds that pass in one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def race(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    least: float | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each function, one measurement per round, after one call of each that is not timed.

    A round measures each function once, in an order that rotates: when the machine slows down, it affects all of them.
    A measurement repeats the call for at least `least` seconds, by default `LEAST`.
    """
    least = LEAST if least is None else least
    for run in runs.values():
        run()
    names: list[str] = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            calls, start = 0, clock()
            while calls == 0 or clock() - start < least:
                runs[name]()
                calls += 1
            times[name].append((clock() - start) / calls)
    return times


def ratio(times: Mapping[str, list[float]], name: str, base: str) -> Ratio:
    """The time of `name` divided by that of `base` in the same round, over all rounds."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(median, low, high)
