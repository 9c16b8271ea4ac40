"""Budgets of a comparison: the number of updates of each recipe, so that all cost the same.

    steps(recipe) = budget / cost of one update,   budget = steps(first) × cost(first), or the minutes that were given

Measured costs are written to budget.json before the first run and read again when the comparison is continued, so no
recipe is measured twice: its runs keep their steps, so they resume exactly and their schedules end with them.

To measure updates, each recipe has a process of its own, as its runs have, with its own model and the real data. After
a warm-up the processes take turns, a short round each, so a machine that becomes slower affects all recipes alike:

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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch

from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run import devices, loop
from mnemos.lab.run.checks import check_settings, check_task, complete
from mnemos.lab.run.files import Types, read_object
from mnemos.lab.run.flops import count_update_flops
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.provenance import provenance
from mnemos.lab.run.recipe import OptimConfig, Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, JSONObject

from .equal import FLOPS, KINDS, PARAMETERS, TIME, UPDATES
from .runs import child_of_comparison, start_shielded, with_threads

FILE = "budget.json"
_TYPES: Types = {"equal": str, "recipes": dict, "budget": (int, float)}
ROUNDS = 5
SECONDS = 1.0  # of a round and of the warm-up: long beside the clock's resolution and the change of data
LEAST = 3  # updates of a round
WARM = 5  # updates before anything is measured, in which memories that are carried from update to update fill
_STEADY = ("inverse_sqrt", "lra")  # schedules that do not depend on the number of steps

Clock = Literal["CPU time", "elapsed time"]


@dataclass(frozen=True)
class Budget:
    """What each recipe of a comparison spends on updates. kind: see `equal.KINDS`; minutes: per run, with "time"."""

    kind: str = UPDATES
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and self.kind != TIME:
            raise InputError("--minutes: expected --equal time beside it, found none; add it, or leave --minutes out")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise InputError(f"--minutes: expected a number above 0, found {self.minutes:g}; change it")

    def apply(self, recipes: Sequence[Recipe], folder: Path, jobs: int = 1) -> tuple[list[Recipe], JSONObject]:
        """The recipes with the steps that the budget gives them, and what folder/budget.json has about it.

        Costs that the file does not have are measured (jobs: the runs at a time). {"equal", "unit", "budget": of
        a run, in the unit, "first": name, "minutes" (if given), "clock" (time), "recipes": {name: {"update": cost of
        one, "rounds" (time), "steps", "given": the recipe before}}, "provenance"}; only {"equal"} for equal updates.
        Raises InputError if the file is of other recipes, or a recipe cannot do one update.
        """
        if self.kind == UPDATES:
            return list(recipes), {"equal": UPDATES}
        if multiple := next((one for one in recipes if one.train.processes > 1), None):
            raise InputError(
                f"--equal {self.kind}: expected recipes that train in one process, found {multiple.train.processes} of "
                f"{multiple.name}; use --train.devices 1"
            )
        path = folder / FILE
        found = self._read(path, recipes) if path.exists() else {}
        known = found.get("recipes", {})
        if any(one.name not in known for one in recipes):
            found = self._measure(recipes, found, jobs)
            write_json(path, found)
        return [with_steps(one, found["recipes"][one.name]["steps"]) for one in recipes], found

    def _measure(self, recipes: Sequence[Recipe], before: JSONObject, jobs: int) -> JSONObject:
        """The content of budget.json with the recipes that are not in what it had before ({}: none are).

        Recipes that are added later are measured beside the first again, and their costs scaled to what it had cost.
        """
        first = recipes[0]
        measured = [first, *(one for one in recipes[1:] if one.name not in before.get("recipes", {}))]
        unit, costs, extra, about = self._costs(measured, jobs)
        known = before.get("recipes", {}).get(first.name, {}).get("update", costs[0])
        costs = [cost * known / costs[0] if costs[0] else cost for cost in costs]
        budget = before.get("budget", known * first.train.steps if self.minutes is None else 60 * self.minutes)
        found: JSONObject = {"equal": self.kind, "unit": unit, "budget": budget, "first": first.name, **about}
        if self.minutes is not None:
            found["minutes"] = self.minutes
        found["recipes"] = {
            one.name: {"update": cost, **more, "steps": self._steps(one, cost, budget), "given": as_json(one)}
            for one, cost, more in zip(measured, costs, extra, strict=True)
        } | before.get("recipes", {})
        return found | {"provenance": provenance(first.train.seed, "")} | before | {"recipes": found["recipes"]}

    def _costs(self, recipes: Sequence[Recipe], jobs: int) -> tuple[str, list[float], list[JSONObject], JSONObject]:
        """(unit, cost of an update of each recipe, more about each, more about all)."""
        nothing: list[JSONObject] = [{} for _ in recipes]
        if self.kind == TIME:
            times = update_seconds(recipes, jobs)
            rounds: list[JSONObject] = [{"rounds": list(one.rounds)} for one in times]
            return "seconds", [one.median for one in times], rounds, {"clock": times[0].clock}
        if self.kind == FLOPS:
            return "FLOPs", update_flops(recipes), nothing, {}
        unit = "tokens" if hasattr(recipes[0].data, "segment") else "rows"
        return unit, [samples_per_update(one) for one in recipes], nothing, {}

    def _steps(self, recipe: Recipe, cost: float, budget: float) -> int:
        if cost <= 0:
            raise InputError(
                f"--equal {self.kind}: expected recipes whose updates can be measured, found a cost of {cost:g} of "
                f"{recipe.name}; use another --equal"
            )
        if budget < cost:
            raise InputError(
                f"--equal {self.kind}: expected a budget of at least one update, found {budget:.3g} and an update of "
                f"{recipe.name} of {cost:.3g}; raise {'--minutes' if self.minutes else '--train.steps'}"
            )
        return round(budget / cost)

    def _read(self, path: Path, recipes: Sequence[Recipe]) -> JSONObject:
        """The file of a comparison that is continued, whose recipes and budget must be the same."""
        found = read_object(path, _TYPES)
        fix = "name another folder with --out"
        if (found["equal"], found.get("minutes")) != (self.kind, self.minutes):
            was = f"--equal {found['equal']}" + (f" --minutes {found['minutes']:g}" if "minutes" in found else "")
            raise InputError(f"{path}: expected the budget of this comparison, found one of {was}; {fix}")
        if found.get("first") != recipes[0].name:
            raise InputError(
                f"{path}: expected {found.get('first')} as the first recipe, found {recipes[0].name}; {fix}"
            )
        for recipe in recipes:
            known = found["recipes"].get(recipe.name)
            if known is None:  # a recipe that is added now
                continue
            if not isinstance(known, dict) or not isinstance(known.get("steps"), int) or "update" not in known:
                raise InputError(
                    f"{path}: expected the cost and the steps of {recipe.name}, found {known!r:.40}; {fix}"
                )
            given = as_written(known.get("given"))
            alike = recipe if self.kind == TIME else with_threads(recipe, given)  # threads change no other cost
            if difference := differing(given, as_json(alike)):
                jobs = "use the --jobs of before, or " if difference.startswith("train.threads ") else ""
                raise InputError(
                    f"{path}: expected the recipes whose updates were measured, found that {recipe.name} differs in "
                    f"{difference}; {jobs}{fix}"
                )
        return found


def budget_lines(found: JSONObject) -> list[str]:
    """Lines that say what is equal and what each recipe gets of it; none for equal updates. found: `Budget.apply`."""
    if found["equal"] == UPDATES:
        return []
    rows = [
        f"  {name}: {one['update']:.4g} {found['unit']} per update, {one['steps']:,} steps"
        for name, one in found["recipes"].items()
    ]
    return [budget_text(found), *rows]


def budget_text(equal: JSONObject) -> str:
    """What was made equal, as one sentence without its end. equal: the entry of comparison.json."""
    text = KINDS[equal["equal"]]
    if equal["equal"] != UPDATES:
        text += f": {equal['budget']:.4g} {equal['unit']} per run"
        text += "" if "minutes" in equal else f", those of {equal['first']} with its steps"
        if equal["equal"] == TIME:
            text += f" ({equal['clock']}, measured before the first run)"
    return text + (f", and {KINDS[PARAMETERS]} (within 5 %)" if equal.get("parameters") else "")


def samples_per_update(recipe: Recipe) -> float:
    """The rows that an update reads and no update before it; the tokens of these rows for text in `data.segment`s.

    A rollout reads `rollout.stride` new batches per update; a batch of text has one segment per row. Rows count whole,
    with their padding. Where tokens limit a batch as well (`data.batch_tokens`), its rows are the mean over an epoch
    (`Task.mean_rows`). Opens the data.
    """
    data: DataConfig = recipe.data
    rows = data.build().mean_rows(recipe.train.batch_size)
    return rows * recipe.train.rollout.stride * int(getattr(data, "segment", 1))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of updates, and everything that is counted in updates in proportion.

    It logs, evaluates and saves as often in a run as before. Warm-up and drop of the learning rate stay the same share
    of the run, except for the schedules inverse_sqrt and lra, whose rate at a step does not depend on the number of
    steps. A warm-up that is a share of the steps stays as it is.
    """
    before = recipe.train.steps

    def share(updates: int) -> int:
        return -(-updates * steps // before)  # rounded up: not one evaluation more

    train = replace(
        recipe.train,
        steps=steps,
        log_every=share(recipe.train.log_every),
        eval_every=share(recipe.train.eval_every),
        checkpoint_every=share(recipe.train.checkpoint_every),
    )
    optim: OptimConfig = recipe.optim
    if optim.schedule.name not in _STEADY:
        before_drops = optim.schedule.drop_at
        drops = share(before_drops) if isinstance(before_drops, int) else tuple(map(share, before_drops))
        warmup = optim.schedule.warmup
        schedule = replace(optim.schedule, warmup=warmup if warmup < 1 else share(int(warmup)), drop_at=drops)
        optim = replace(optim, schedule=schedule)
    return replace(recipe, optim=optim, train=train)


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
    with _measuring(recipes) as meters:
        for meter in meters:
            meter.send(("warm", SECONDS, WARM))
        clocks = {meter.receive() for meter in meters}
        together: Clock = "CPU time" if clocks == {"CPU time"} else "elapsed time"
        times: list[list[float]] = [[] for _ in recipes]
        for i in range(ROUNDS):
            order = [(i + k) % len(meters) for k in range(len(meters))]
            for group in (order[k : k + jobs] for k in range(0, len(order), jobs)):
                for k in group:
                    meters[k].send(("seconds", together, SECONDS, LEAST))
                for k in group:
                    times[k].append(meters[k].receive())
    return [Seconds(statistics.median(found), tuple(found), together) for found in times]


def update_flops(recipes: Sequence[Recipe]) -> list[float]:
    """FLOPs of an update of each recipe, in their order (`count_update_flops`), after `WARM` updates.

    The same recipes give the same numbers. Cost: the updates, and the start of a process each. Raises as
    `update_seconds`.
    """
    found = []
    for recipe in recipes:
        with _measuring([recipe]) as (meter,):
            meter.send(("flops", WARM))
            found.append(meter.receive())
    return found


class _Meter:
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
def _measuring(recipes: Sequence[Recipe]) -> Iterator[list[_Meter]]:
    meters: list[_Meter] = []
    try:
        for recipe in recipes:
            meters.append(_Meter(recipe))  # noqa: PERF401 - those that were started are closed if another fails
        yield meters
    finally:
        for meter in meters:
            meter.close()


def _serve(recipe: JSONObject, pipe: Connection) -> None:
    """The process of a meter: call the method that the parent names and send its result, until the parent is done."""
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
            loop.update(self.learner)
            count += 1
        return (now() - start) / count

    def flops(self, updates: int) -> float | None:
        """FLOPs of an update, after so many updates; None for several processes."""
        for _ in range(updates):
            loop.update(self.learner)
        return count_update_flops(self.learner)

    def _elapsed(self) -> float:
        if not self._on_cpu:
            torch.accelerator.synchronize()
        return time.perf_counter()
