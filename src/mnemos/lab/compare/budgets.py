"""Equal time: the number of updates of each recipe that take as many seconds as the others'.

    steps(recipe) = budget / seconds(recipe),   budget = steps(first) × seconds(first), or the minutes that were given

Seconds are written to budget.json before the first run and read again when the comparison is continued, so its runs
keep their steps. To measure them, each recipe has a process of its own with the real data; after a warm-up they take
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run import devices, loop
from mnemos.lab.run.checks import check_settings, check_task, complete
from mnemos.lab.run.files import Types, read_object
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.provenance import provenance
from mnemos.lab.run.recipe import Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.types import InputError, JSONObject

from .equal import KINDS, PARAMETERS, TIME
from .processes import begin_child, shielded

FILE = "budget.json"
_TYPES: Types = {"recipes": dict, "budget": (int, float)}
ROUNDS = 5
SECONDS = 1.0  # of a round and of the warm-up: long beside the clock's resolution and the change of data
LEAST = 3  # updates of a round
WARM = 5  # updates before anything is measured, in which carried memories fill, unless they grow with the document
_STEADY = ("inverse_sqrt", "lra")  # schedules that do not depend on the number of steps

Clock = Literal["CPU time", "elapsed time"]


def at_equal_time(
    recipes: Sequence[Recipe], folder: Path, minutes: float | None = None, jobs: int = 1
) -> tuple[list[Recipe], JSONObject]:
    """The recipes with the steps that a budget of time gives them, and what folder/budget.json has about it.

    minutes: of updates per run; None: as long as the first recipe with its steps. jobs: the runs at a time. The file:
    {"equal", "unit", "budget": of a run, in seconds, "first": name, "minutes" (if set), "clock", "recipes": {name:
    {"update": seconds of one, "steps", "given": the recipe before}}, "provenance"}. Raises InputError if the file is of
    other recipes, or a recipe cannot do one update.
    """
    first, path = recipes[0], folder / FILE
    if multiple := next((one for one in recipes if one.train.processes > 1), None):
        raise InputError(
            f"--equal time: expected recipes that train in one process, found {multiple.train.processes} of "
            f"{multiple.name}; use --train.devices 1"
        )
    if path.exists():
        spent = read_object(path, _TYPES)
        measured = {name: as_written(one["given"]) for name, one in spent["recipes"].items()}
        fix = "use the recipes and options of before, or name another folder with --out"
        if (spent.get("minutes"), [*measured]) != (minutes, [one.name for one in recipes]):
            was = " ".join(measured) + (f" --minutes {spent['minutes']:g}" if "minutes" in spent else "")
            raise InputError(f"{path}: expected the budget of this comparison, found that of {was}; {fix}")
        for one in recipes:
            if difference := differing(measured[one.name], as_json(one)):
                raise InputError(
                    f"{path}: expected the recipes whose updates were measured, found that {one.name} differs in "
                    f"{difference}; {fix}"
                )
    else:
        seconds, clock = update_seconds(recipes, jobs)
        budget = seconds[0] * first.train.steps if minutes is None else 60 * minutes
        entries = {}
        for one, update in zip(recipes, seconds, strict=True):
            if update > budget:
                raise InputError(
                    f"--equal time: expected a budget of at least one update, found {budget:.3g} s and an update of "
                    f"{one.name} of {update:.3g} s; raise {'--train.steps' if minutes is None else '--minutes'}"
                )
            entries[one.name] = {"update": update, "steps": round(budget / update), "given": as_json(one)}
        spent = {"equal": TIME, "unit": "seconds", "budget": budget, "first": first.name, "clock": clock}
        spent |= {} if minutes is None else {"minutes": minutes}
        spent |= {"recipes": entries, "provenance": provenance(first.train.seed, "")}
        write_json(path, spent)
    return [with_steps(one, spent["recipes"][one.name]["steps"]) for one in recipes], spent


def budget_text(equal: JSONObject) -> str:
    """What was made equal, as one sentence without its end. equal: the entry of comparison.json."""
    text = KINDS[equal["equal"]]
    if equal["equal"] == TIME:
        text += f": {equal['budget']:.4g} {equal['unit']} per run"
        text += "" if "minutes" in equal else f", those of {equal['first']} with its steps"
        text += f" ({equal['clock']}, measured before the first run)"
    text += f", and {KINDS[PARAMETERS]} (within 5 %)" if equal.get("parameters") else ""
    early = ", ".join(equal.get("early", ()))
    return text + (f"; but train.patience stopped runs of {early} before that" if early else "")


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with another number of updates, and everything that is counted in updates in proportion.

    Warm-up and drop of the learning rate stay the same share of the run, except for the schedules inverse_sqrt and lra,
    whose rate at a step does not depend on the number of steps.
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


def update_seconds(recipes: Sequence[Recipe], jobs: int = 1) -> tuple[list[float], Clock]:
    """Seconds of an update of each recipe, and the clock. Cost: about `ROUNDS` + 1 seconds per recipe, and its start.

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
    return [statistics.median(each) for each in times], together


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
