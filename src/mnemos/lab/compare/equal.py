"""What the recipes of a comparison have in common, and the checks that they do.

Settings that belong to the cost of a recipe may differ if its number of updates follows from a budget. What is scored
never differs.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mnemos.lab.run.checks import complete
from mnemos.lab.run.progress import NoProgress
from mnemos.lab.run.recipe import Recipe, RolloutConfig, TrainConfig
from mnemos.lab.run.scored_batches import scored_batches
from mnemos.lab.tasks.batch import IGNORE
from mnemos.lab.tasks.task import DataConfig, HeldOut, Task
from mnemos.types import InputError, JSONObject

from .baselines import NEAR, parameters, with_parameters

KINDS = {
    "updates": "equal updates of equal batches",
    "samples": "an equal number of training samples",
    "flops": "equal training FLOPs",
    "time": "equal training time",
    "parameters": "equal parameters",
}
UPDATES, SAMPLES, FLOPS, TIME, PARAMETERS = KINDS
_SPLITS: tuple[HeldOut, ...] = ("valid", "test")
# Of `TrainConfig`: what an update costs, and what follows from the number of updates.
_COST = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every", "rollout")


def read_equal(text: str) -> tuple[str, ...]:
    """The kinds of a list such as parameters,time, in the order of `KINDS`; without a budget, equal updates are added.

    Raises InputError for unknown kinds and for two budgets.
    """
    given = text.split(",")
    if unknown := next((word for word in given if word not in KINDS), None):
        raise InputError(f"--equal: expected one of {', '.join(KINDS)}, found {unknown!r}; change it")
    budgets = [kind for kind in KINDS if kind in given and kind != PARAMETERS]
    if len(budgets) > 1:
        raise InputError(
            f"--equal: expected one of updates, samples, flops and time, found {' and '.join(budgets)}; leave one out"
        )
    return (*(budgets or [UPDATES]), *([PARAMETERS] if PARAMETERS in given else []))


def check_equal(recipes: Sequence[Recipe], budget: str = UPDATES) -> None:
    """Raise InputError for recipes that differ in data or training settings that the budget does not let differ.

    "updates": only `RolloutConfig` may differ, because it belongs to the memory, but an update reads as many new
    batches. Other budgets: the number of updates, the batch and the rollout may differ, because they belong to the
    cost, and so may the segment that the data are read in (`data.segment`).
    """
    first = recipes[0]
    for other in recipes[1:]:
        for part, equal in (
            ("data", _data(other, budget) == _data(first, budget)),
            ("train", _train(other.train, budget) == _train(first.train, budget)),
        ):
            if not equal:
                more = ", or make the cost equal with --equal samples, flops or time" if budget == UPDATES else ""
                raise InputError(
                    f"compare: expected recipes with equal {part} settings, found that {first.name} and {other.name} "
                    f"differ; make them equal with --{part}.FIELD{more}"
                )


def _data(recipe: Recipe, budget: str) -> DataConfig:
    data: Any = recipe.data
    return replace(data, segment=1) if budget != UPDATES and _has_segments(data) else data


def _has_segments(data: DataConfig) -> bool:
    return any(field.name == "segment" for field in dataclasses.fields(data))


def _train(train: TrainConfig, budget: str) -> TrainConfig:
    if budget == UPDATES:  # the number of batches that an update reads for the first time
        return replace(train, rollout=RolloutConfig(segments=train.rollout.stride))
    default: Any = TrainConfig()
    return replace(train, **{name: getattr(default, name) for name in _COST})


def completed(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes with the sizes of their data, which are closed again before the runs start."""
    tasks: list[tuple[DataConfig, Task]] = []
    try:
        found = []
        for recipe in recipes:
            task = next((task for data, task in tasks if data == recipe.data), None)
            if task is None:
                task = recipe.data.build()
                tasks.append((recipe.data, task))
            found.append(complete(recipe, task))
        return found
    finally:
        for _, task in tasks:
            task.close()


def scored_alike(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes with a number in place of -1 (rows that are scored are left open); completed if one has it.

    The number is that of the first recipe that gives one, else what the first one's length makes it. Where batches or
    segments differ, whole splits are scored (`check_scored`).
    """
    first = recipes[0]
    names = ("valid_rows", "test_rows")
    given = {name: [getattr(one.train, name) for one in recipes] for name in names}
    if min(map(min, given.values())) >= 0:
        return list(recipes)
    alike = all((one.data, one.train.batch_size) == (first.data, first.train.batch_size) for one in recipes)
    made = completed(recipes)
    rows: dict[str, int] = {}
    for name in names:
        fixed = [number for number in given[name] if number >= 0]
        rows[name] = fixed[0] if fixed else getattr(made[0].train, name) if alike else 0
    found = []
    for i, one in enumerate(made):
        filled: JSONObject = {name: rows[name] for name in names if given[name][i] < 0}
        found.append(replace(one, train=replace(one.train, **filled)))
    return found


def check_scored(recipes: Sequence[Recipe]) -> None:
    """Raise InputError unless all recipes are scored on the same targets of the validation and the test split.

    Equal data are scored whole whatever the batch. A part of a split depends on its batches, so recipes of other
    batches or segments score whole splits. Data in other segments are read: the targets that are counted, as a
    multiset, must be equal. Cost: one pass over both splits for each length of segment.
    """
    first = recipes[0]
    for other in recipes[1:]:
        if (other.data, other.train.batch_size) == (first.data, first.train.batch_size):
            continue
        if first.train.valid_rows or first.train.test_rows:
            raise InputError(
                f"compare: expected recipes that are scored on the same rows, found a part of the splits in the "
                f"different batches of {first.name} and {other.name}; use --train.valid-rows 0 --train.test-rows 0"
            )
    different = [first, *(one for one in recipes[1:] if one.data != first.data)]
    if len(different) == 1:
        return
    scored = [_count_targets(recipe) for recipe in different]
    for other, found in zip(different[1:], scored[1:], strict=True):
        for split, mine, theirs in zip(_SPLITS, scored[0], found, strict=True):
            if mine.shape != theirs.shape or not torch.equal(mine, theirs):
                raise InputError(
                    f"compare: expected recipes that are scored on the same targets of the {split} split, found "
                    f"{int(mine.sum()):,} of {first.name} and {int(theirs.sum()):,} of {other.name}, which differ; "
                    "make --data.segment equal"
                )


def _count_targets(recipe: Recipe) -> list[Tensor]:
    """For each held-out split, how often each target is counted: int64 [classes]."""
    task = recipe.data.build()
    try:
        return [_count_split(recipe, task, split) for split in _SPLITS]
    finally:
        task.close()


def _count_split(recipe: Recipe, task: Task, split: HeldOut) -> Tensor:
    total = torch.zeros(max(task.vocab_size, task.classes), dtype=torch.int64)
    for batch in scored_batches(task, split, recipe.train, NoProgress()):
        targets = batch.targets
        total += torch.bincount(targets[targets != IGNORE], minlength=len(total))
    return total


def of_equal_parameters(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes with the widths of their MLPs set so that each has as many parameters as the first.

    The sizes of the models must be known (`completed`). Parameters that differ by no more than 5 % are equal, and such
    a recipe stays as it is. Raises InputError if no width comes within 5 %.
    """
    wanted = parameters(recipes[0].model)
    return [recipes[0], *(with_parameters(recipe, wanted, recipes[0].name) for recipe in recipes[1:])]


def check_parameters(recipes: Sequence[Recipe]) -> None:
    """Raise InputError unless each recipe has as many parameters as the first, within 5 %."""
    wanted = parameters(recipes[0].model)
    for recipe in recipes[1:]:
        found = parameters(recipe.model)
        if abs(found / wanted - 1) > NEAR:
            raise InputError(
                f"--equal parameters: expected {wanted:,} parameters as of {recipes[0].name}, within {NEAR:.0%}, found "
                f"{found:,} of {recipe.name}; leave it out"
            )
