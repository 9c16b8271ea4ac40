"""What an update of each recipe costs, measured before a comparison: seconds, or floating-point operations.

Each recipe has a process of its own, as its runs have, with its own model and the real data. After a warm-up the
processes take turns, a short round each, so a machine that becomes slower affects all recipes alike:

    seconds(recipe) = median over rounds ( seconds of the round / updates in it )

The median, because rounds read different data: the minimum would be that of the cheapest data. The clock is the CPU
time of the process where one thread on the CPU does all the work, which other programs disturb least; otherwise it is
the time that passes, read after the device has finished.
"""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from mnemos.config import to_dict
from mnemos.errors import TrainingFailed
from mnemos.lab.run import devices
from mnemos.lab.run.checks import check_settings, check_task, complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.recipe_files import from_json
from mnemos.types import InputError, JSONObject

from .apart import child_of_comparison, start_shielded

ROUNDS = 5
SECONDS = 1.0  # of a round and of the warm-up: long beside the clock's resolution and the change of data
LEAST = 3  # updates of a round
WARM = 5  # updates before anything is measured, in which memories that are carried from update to update fill

Clock = Literal["CPU time", "elapsed time"]


@dataclass(frozen=True)
class Seconds:
    """Seconds per update: the median over rounds, each round, and the clock."""

    median: float
    rounds: tuple[float, ...]
    clock: Clock


def update_seconds(recipes: Sequence[Recipe], jobs: int = 1) -> list[Seconds]:
    """Seconds of an update of each recipe, in their order. Cost: about `ROUNDS` + 1 seconds per recipe, and its start.

    jobs: the number of processes that run at a time, as the runs of the comparison do. All models are in memory at
    once. Raises InputError for a recipe that cannot start, and TrainingFailed for a process that fails.
    """
    with _measuring(recipes) as probes:
        for probe in probes:
            probe.send(("warm", SECONDS, WARM))
        clocks = {probe.receive() for probe in probes}
        together: Clock = "CPU time" if clocks == {"CPU time"} else "elapsed time"
        times: list[list[float]] = [[] for _ in recipes]
        for i in range(ROUNDS):
            order = [(i + k) % len(probes) for k in range(len(probes))]
            for group in (order[k : k + jobs] for k in range(0, len(order), jobs)):
                for k in group:
                    probes[k].send(("seconds", together, SECONDS, LEAST))
                for k in group:
                    times[k].append(probes[k].receive())
    return [Seconds(statistics.median(found), tuple(found), together) for found in times]


def update_flops(recipes: Sequence[Recipe]) -> list[float]:
    """FLOPs of an update of each recipe, in their order (`Learner.update_flops`), after `WARM` updates.

    The same recipes give the same numbers. Cost: the updates, and the start of a process each. Raises as
    `update_seconds`.
    """
    found = []
    for recipe in recipes:
        with _measuring([recipe]) as (probe,):
            probe.send(("flops", WARM))
            found.append(probe.receive())
    return found


class _Probe:
    """The parent's end of a process that measures one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._child: BaseProcess = context.Process(target=_serve, args=(to_dict(recipe), theirs))
        start_shielded(self._child)
        theirs.close()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send the name of a method of `_Updates` and its arguments."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `receive` will find
            self._pipe.send(message)

    def receive(self) -> Any:
        """The result of the method. Raises InputError or TrainingFailed if the process has ended."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._child.join()
            error = InputError if self._child.exitcode == 2 else TrainingFailed
            raise error(f"{self.name}: its update could not be measured; the line above gives the reason") from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._child.terminate()
        self._child.join()


@contextlib.contextmanager
def _measuring(recipes: Sequence[Recipe]) -> Iterator[list[_Probe]]:
    probes: list[_Probe] = []
    try:
        for recipe in recipes:
            probes.append(_Probe(recipe))  # noqa: PERF401 - those that were started are closed if another fails
        yield probes
    finally:
        for probe in probes:
            probe.close()


def _serve(recipe: JSONObject, pipe: Connection) -> None:
    """The process of a probe: call the method that the parent names and send its result, until the parent is done."""
    with child_of_comparison():
        made = from_json(recipe)
        with devices.threads(made.train.threads):
            measured = _Updates(made)
            while True:
                try:
                    method, *arguments = pipe.recv()
                except EOFError:
                    return
                pipe.send(getattr(measured, method)(*arguments))


class _Updates:
    """A recipe's model in training."""

    def __init__(self, recipe: Recipe) -> None:
        fabric = devices.connect(recipe.train)
        check_settings(recipe, fabric.world_size)
        task = recipe.data.build()
        recipe = complete(recipe, task)
        check_task(recipe, task)
        self.learner = Learner(fabric, recipe, task)
        self._on_cpu = fabric.device.type == "cpu"

    def warm(self, seconds: float, updates: int) -> Clock:
        """Train for at least so many seconds and updates; returns the clock that could measure later ones."""
        self.seconds("elapsed time", seconds, updates)
        # What processes that prepare data compute is not this process's time.
        alone = self._on_cpu and torch.get_num_threads() == 1 and not multiprocessing.active_children()
        return "CPU time" if alone else "elapsed time"

    def seconds(self, clock: Clock, seconds: float, updates: int) -> float:
        """Seconds per update, over at least so many seconds that pass and so many updates."""
        now: Callable[[], float] = time.process_time if clock == "CPU time" else self._elapsed
        began, start, count = time.perf_counter(), now(), 0
        while count < updates or time.perf_counter() - began < seconds:
            self.learner.update()
            count += 1
        return (now() - start) / count

    def flops(self, updates: int) -> float | None:
        """FLOPs of an update, after so many updates; None for several processes."""
        for _ in range(updates):
            self.learner.update()
        return self.learner.update_flops()

    def _elapsed(self) -> float:
        if not self._on_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter()
