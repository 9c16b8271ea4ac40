"""What the recipes of a comparison have in common, and the checks that they do. What is scored never differs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mnemos.lab.run.checks import complete
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig
from mnemos.lab.tasks.task import DataConfig, Task
from mnemos.types import InputError

KINDS = {
    "updates": "equal updates of equal batches",
    "samples": "an equal number of training samples",
    "flops": "equal training FLOPs",
    "time": "equal training time",
    "parameters": "equal parameters",
}
UPDATES, SAMPLES, FLOPS, TIME, PARAMETERS = KINDS
# Of `TrainConfig`: what an update costs, and what follows from the number of updates.
_COST = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every", "rollout")


def read_equal(text: str) -> tuple[str, ...]:
    """The kinds of a list such as parameters,time, in the order of `KINDS`. Raises InputError for unknown and two
    budgets.
    """
    words = text.split(",")
    if unknown := next((word for word in words if word not in KINDS), None):
        raise InputError(f"--equal: expected one of {', '.join(KINDS)}, found {unknown!r}; change it")
    budgets = [kind for kind in KINDS if kind in words and kind != PARAMETERS]
    if len(budgets) > 1:
        raise InputError(f"--equal: expected one budget, found {' and '.join(budgets)}; leave one out")
    return (*(budgets or [UPDATES]), *([PARAMETERS] if PARAMETERS in words else []))


def check_equal(recipes: Sequence[Recipe], budget: str = UPDATES) -> None:
    """Raise InputError for recipes that differ in data or training settings that the budget does not let differ.

    "updates": only `RolloutConfig` may differ, because it belongs to the memory, but an update reads as many new
    batches. Other budgets: also what belongs to the cost, the number of updates, the batch and `data.segment`.
    """

    def data(recipe: Recipe) -> Any:
        free = budget != UPDATES and hasattr(recipe.data, "segment")
        return replace(recipe.data, segment=1) if free else recipe.data  # type: ignore[call-arg]

    def train(recipe: Recipe) -> TrainConfig:
        if budget == UPDATES:  # the number of batches that an update reads for the first time
            return replace(recipe.train, rollout=RolloutConfig(segments=recipe.train.rollout.stride))
        default: Any = TrainConfig()
        return replace(recipe.train, **{name: getattr(default, name) for name in _COST})

    first = recipes[0]
    for other in recipes[1:]:
        for part, settings in (("data", data), ("train", train)):
            if settings(other) != settings(first):
                more = ", or make the cost equal with --equal samples, flops or time" if budget == UPDATES else ""
                raise InputError(
                    f"compare: expected recipes with equal {part} settings, found that {first.name} and {other.name} "
                    f"differ; make them equal with --{part}.FIELD{more}"
                )


def completed(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes with the sizes of their data, which are closed again before the runs start."""
    tasks: list[tuple[DataConfig, Task]] = []  # of data that cannot be hashed
    try:
        whole = []
        for recipe in recipes:
            task = next((task for data, task in tasks if data == recipe.data), None)
            if task is None:
                task = recipe.data.build()
                tasks.append((recipe.data, task))
            whole.append(complete(recipe, task))
        return whole
    finally:
        for _, task in tasks:
            task.close()


def scored_alike(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes with a number in place of -1 (rows that are scored are left open); completed if one has it.

    It is that of the first recipe that gives one, else what the first one's length makes it; 0 where batches differ.
    """
    first, names = recipes[0], ("valid_rows", "test_rows")
    numbers = {name: [getattr(one.train, name) for one in recipes] for name in names}
    if min(map(min, numbers.values())) >= 0:
        return list(recipes)
    alike = all((one.data, one.train.batch_size) == (first.data, first.train.batch_size) for one in recipes)
    whole = completed(recipes)
    for name in names:
        fixed = [number for number in numbers[name] if number >= 0]
        rows: Any = fixed[0] if fixed else getattr(whole[0].train, name) if alike else 0
        for i, number in enumerate(numbers[name]):
            if number < 0:
                whole[i] = replace(whole[i], train=replace(whole[i].train, **{name: rows}))
    return whole


def check_scored(recipes: Sequence[Recipe]) -> None:
    """Raise InputError for recipes that are scored on different rows: a part of a split depends on its batches."""
    first = recipes[0]
    for other in recipes[1:]:
        alike = (other.data, other.train.batch_size) == (first.data, first.train.batch_size)
        if not alike and (first.train.valid_rows or first.train.test_rows):
            raise InputError(
                f"compare: expected recipes that are scored on the same rows, found a part of the splits in the "
                f"different batches of {first.name} and {other.name}; use --train.valid-rows 0 --train.test-rows 0"
            )
