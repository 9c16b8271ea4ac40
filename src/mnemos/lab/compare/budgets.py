"""Budgets of a comparison: the number of updates of each recipe, so that all cost the same.

    steps(recipe) = budget / cost of one update,   budget = steps(first) × cost(first), or the minutes that were given

Costs are written to budget.json before the first run and read again when the comparison is continued, so its runs keep
their steps. To measure updates, each recipe has a process of its own with the real data; after a warm-up they take
turns, a short round each, so that a machine that becomes slower affects all alike:

    seconds(recipe) = median over rounds ( seconds of the round / updates in it )

The median, because rounds read different data: the minimum would be that of the cheapest data. The clock is the CPU
time of the process where one thread on the CPU does all the work; otherwise the time that passes.
"""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
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
from mnemos.lab.run.recipe import Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.types import InputError, JSONObject

from .equal import FLOPS, KINDS, PARAMETERS, TIME, UPDATES
from .processes import begin_child, shielded

FILE = "budget.json"
_TYPES: Types = {"equal": str, "recipes": dict, "budget": (int, float)}
ROUNDS = 5
SECONDS = 1.0  # of a round and of the warm-up: long beside the clock's resolution and the change of data
LEAST = 3  # updates of a round
WARM = 5  # updates before anything is measured, in which carried memories fill, unless they grow with the document
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

        Costs that the file does not have are measured (jobs: the runs at a time). {"equal", "unit", "budget": of a run,
        in the unit, "first": name, "minutes" (if set), "clock" (time), "recipes": {name: {"update": cost of one,
        "rounds" (time), "steps", "given": the recipe before}}, "provenance"}; only {"equal"} for equal updates. Raises
        InputError if the file is of other recipes, or a recipe cannot do one update.
        """
        if self.kind == UPDATES:
            return list(recipes), {"equal": UPDATES}
        if multiple := next((one for one in recipes if one.train.processes > 1), None):
            raise InputError(
                f"--equal {self.kind}: expected recipes that train in one process, found {multiple.train.processes} of "
                f"{multiple.name}; use --train.devices 1"
            )
        path = folder / FILE
        spent = self._read(path, recipes) if path.exists() else {"recipes": {}}
        if new := [one for one in recipes if one.name not in spent["recipes"]]:
            spent = self._measure(recipes[0], new, spent, jobs)
            write_json(path, spent)
        return [with_steps(one, spent["recipes"][one.name]["steps"]) for one in recipes], spent

    def _measure(self, first: Recipe, new: Sequence[Recipe], before: JSONObject, jobs: int) -> JSONObject:
        """The content of budget.json with further recipes, measured beside the first and scaled to its cost before."""
        measured = [first, *(one for one in new if one.name != first.name)]
        about: JSONObject = {"equal": self.kind}

        # --- the cost of an update ---
        clock: JSONObject = {}
        extra: list[JSONObject] = [{}] * len(measured)
        if self.kind == TIME:
            times = update_seconds(measured, jobs)
            costs, about["unit"], clock = [one.median for one in times], "seconds", {"clock": times[0].clock}
            extra = [{"rounds": list(one.rounds)} for one in times]
        elif self.kind == FLOPS:
            costs, about["unit"] = update_flops(measured), "FLOPs"
        else:
            samples = [samples_per_update(one) for one in measured]
            costs, about["unit"] = [number for number, _ in samples], samples[0][1]
        of_first = before["recipes"].get(first.name, {}).get("update", costs[0])
        budget = before.get("budget", of_first * first.train.steps if self.minutes is None else 60 * self.minutes)
        about |= {"budget": budget, "first": first.name, **clock}
        about |= {} if self.minutes is None else {"minutes": self.minutes}

        # --- the steps that a budget allows ---
        entries: JSONObject = {}
        for one, cost, more in zip(measured, costs, extra, strict=True):
            cost = cost * of_first / costs[0] if costs[0] else cost
            if not 0 < cost <= budget:
                raise InputError(
                    f"--equal {self.kind}: expected a budget of at least one update, found {budget:.3g} and an update "
                    f"of {one.name} of {cost:.3g}; raise {'--minutes' if self.minutes else '--train.steps'}"
                )
            entries[one.name] = {"update": cost, **more, "steps": round(budget / cost), "given": as_json(one)}
        about["provenance"] = provenance(first.train.seed, "")
        return about | before | {"recipes": entries | before["recipes"]}

    def _read(self, path: Path, recipes: Sequence[Recipe]) -> JSONObject:
        spent = read_object(path, _TYPES)
        fix = "name another folder with --out"
        if (spent["equal"], spent.get("minutes")) != (self.kind, self.minutes):
            was = f"--equal {spent['equal']}" + (f" --minutes {spent['minutes']:g}" if "minutes" in spent else "")
            raise InputError(f"{path}: expected the budget of this comparison, found one of {was}; {fix}")
        if spent.get("first") != recipes[0].name:
            raise InputError(f"{path}: expected {spent.get('first')} as the first, found {recipes[0].name}; {fix}")
        for recipe in recipes:
            if recipe.name not in spent["recipes"]:  # it is added now
                continue
            before: Any = as_written(spent["recipes"][recipe.name]["given"])
            own: Any = as_json(recipe)
            if self.kind != TIME:  # threads change no other cost
                own["train"] = own["train"] | {"threads": before["train"]["threads"]}
            if difference := differing(before, own):
                jobs = "use the --jobs of before, or " if difference.startswith("train.threads ") else ""
                raise InputError(
                    f"{path}: expected the recipes whose updates were measured, found that {recipe.name} differs in "
                    f"{difference}; {jobs}{fix}"
                )
        return spent


def budget_text(equal: JSONObject) -> str:
    """What was made equal, as one sentence without its end. equal: the entry of comparison.json."""
    text = KINDS[equal["equal"]]
    if equal["equal"] != UPDATES:
        text += f": {equal['budget']:.4g} {equal['unit']} per run"
        text += "" if "minutes" in equal else f", those of {equal['first']} with its steps"
        if equal["equal"] == TIME:
            text += f" ({equal['clock']}, measured before the first run)"
    text += f", and {KINDS[PARAMETERS]} (within 5 %)" if equal.get("parameters") else ""
    early = ", ".join(equal.get("early", ()))
    return text + (f"; but train.patience stopped runs of {early} before that" if early else "")


def samples_per_update(recipe: Recipe) -> tuple[float, str]:
    """The rows that an update reads and no update before it, and "rows"; of streams in `data.segment`s their "tokens".

    Rows count whole, with their padding; where tokens limit a batch as well they are the mean over an epoch
    (`Task.mean_rows`). Opens the data, and closes them.
    """
    with contextlib.closing(recipe.data.build()) as task:
        rows: float = task.mean_rows(recipe.train.batch_size) * recipe.train.rollout.stride
        # A row of a stream is a segment; that of a text to classify has several.
        segment: int | None = getattr(recipe.data, "segment", None) if task.carries_state else None
    return (rows, "rows") if segment is None else (rows * segment, "tokens")


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of updates, and everything that is counted in updates in proportion.

    Warm-up and drop of the learning rate stay the same share of the run, except for the schedules inverse_sqrt and lra,
    whose rate at a step does not depend on the number of steps. The data stay as they are, also a curriculum in the
    first updates (`data.grow`).
    """

    def share(updates: int) -> int:
        return -(-updates * steps // recipe.train.steps)  # rounded up: not one evaluation more

    every: dict[str, Any] = {
        name: share(getattr(recipe.train, name)) for name in ("log_every", "eval_every", "checkpoint_every")
    }
    optim, schedule = recipe.optim, recipe.optim.schedule
    if schedule.name not in _STEADY:
        drops = share(schedule.drop_at) if isinstance(schedule.drop_at, int) else tuple(map(share, schedule.drop_at))
        warmup = schedule.warmup if schedule.warmup < 1 else share(int(schedule.warmup))
        optim = replace(optim, schedule=replace(schedule, warmup=warmup, drop_at=drops))
    return replace(recipe, optim=optim, train=replace(recipe.train, steps=steps, **every))


@dataclass(frozen=True)
class Seconds:
    """Seconds per update: the median over rounds, each round, and the clock."""

    median: float
    rounds: tuple[float, ...]
    clock: Clock


def update_seconds(recipes: Sequence[Recipe], jobs: int = 1) -> list[Seconds]:
    """Seconds of an update of each recipe, in their order. Cost: about `ROUNDS` + 1 seconds per recipe, and its start.

    jobs: processes at a time, as the runs of the comparison. All models are in memory at once. Raises InputError for a
    recipe that cannot start, and TrainingFailed for one that fails.
    """
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(_process(one)) for one in recipes]
        clocks = {call(_warm, SECONDS, WARM).result() for call in calls}
        together: Clock = "CPU time" if clocks == {"CPU time"} else "elapsed time"
        times: list[list[float]] = [[] for _ in recipes]
        for i in range(ROUNDS):
            order = [(i + k) % len(calls) for k in range(len(calls))]
            for group in (order[k : k + jobs] for k in range(0, len(order), jobs)):
                rounds = [calls[k](_seconds, together, SECONDS, LEAST) for k in group]
                for k, one in zip(group, rounds, strict=True):
                    times[k].append(one.result())
    return [Seconds(statistics.median(each), tuple(each), together) for each in times]


def update_flops(recipes: Sequence[Recipe]) -> list[float]:
    """FLOPs of an update of each recipe (`count_update_flops`), after `WARM` updates. Raises as `update_seconds`."""
    counts = []
    for one in recipes:
        with _process(one) as call:
            call(_seconds, "elapsed time", 0.0, WARM).result()
            counts.append(call(count_update_flops).result())
    return counts


@contextlib.contextmanager
def _process(recipe: Recipe) -> Iterator[Callable[..., Future[Any]]]:
    """A process with a model in training. Its function call(function, *arguments) gives functions the learner."""
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin_child) as pool:

            def call(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
                return pool.submit(_with_learner, to_dict(recipe), function, *arguments)

            with shielded():  # Ctrl-C ends this process, and this one ends the other, which starts at the first call
                call(type)
            yield call
    except BrokenProcessPool as error:
        raise TrainingFailed(f"--equal: expected updates that can be measured, found that {error}") from None


# --- the functions of such a process ---
_LEARNERS: list[Learner] = []  # one, when it is open


def _with_learner(content: JSONObject, function: Callable[..., Any], *arguments: Any) -> Any:
    recipe = from_json(content)
    try:
        if not _LEARNERS:
            if recipe.train.threads:
                torch.set_num_threads(recipe.train.threads)
            fabric = devices.connect(recipe.train)
            check_settings(recipe, fabric.world_size)
            task = recipe.data.build()
            recipe = complete(recipe, task)
            check_task(recipe, task)
            _LEARNERS.append(Learner(fabric, recipe, task))
        return function(_LEARNERS[0], *arguments)
    except (InputError, TrainingFailed) as error:
        raise type(error)(f"{recipe.name}: its update could not be measured: {error}") from None


def _warm(learner: Learner, seconds: float, updates: int) -> Clock:
    """Train for at least so many seconds and updates; returns the clock that could measure later ones."""
    _seconds(learner, "elapsed time", seconds, updates)
    # What processes that prepare data compute is not this process's time.
    alone = learner.fabric.device.type == "cpu" and torch.get_num_threads() == 1
    return "CPU time" if alone and not multiprocessing.active_children() else "elapsed time"


def _seconds(learner: Learner, clock: Clock, seconds: float, updates: int) -> float:
    def now() -> float:
        if clock == "CPU time":
            return time.process_time()
        if learner.fabric.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    began, start, count = time.perf_counter(), now(), 0
    while count < updates or time.perf_counter() - began < seconds:
        loop.update(learner)
        count += 1
    return (now() - start) / count
