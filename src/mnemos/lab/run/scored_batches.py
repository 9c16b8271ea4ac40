"""The batches of a held-out split that an evaluation scores: all of them, or a fixed random part for quick runs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from mnemos.lab.evaluate.controls import ROWS, SEGMENTS
from mnemos.lab.tasks.batch import row_count
from mnemos.lab.tasks.task import HeldOut, Task
from mnemos.types import JSONObject

from .progress import NoProgress
from .recipe import Recipe, TrainConfig

_HELD: tuple[HeldOut, ...] = ("valid", "test")


def scored_batches(task: Task, split: HeldOut, config: TrainConfig, display: NoProgress) -> Iterator[Any]:
    """The batches of a split that the run scores (`TrainConfig.valid_rows` and `test_rows`), shown on the display."""
    rows = config.valid_rows if split == "valid" else config.test_rows
    if not rows:
        return display.evaluation(split, task.size(split), task.batches(split, config.batch_size), task.count)
    return display.evaluation(split, rows, part(task, split, config.batch_size, rows), row_count, "rows")


def scored_segments(task: Task, split: HeldOut, config: TrainConfig, display: NoProgress) -> Iterator[Any]:
    """`scored_batches` in the segments of the rollout."""
    for batch in scored_batches(task, split, config, display):
        yield from task.segments(batch, config.rollout.segment_length)


def limited(recipe: Recipe, task: Task) -> Recipe:
    """The recipe with a number of rows in place of -1 (`TrainConfig.valid_rows`), so that a short run trains longer
    than it evaluates; it depends on the recipe and the data alone.

    valid_rows: those that the updates between two evaluations read. test_rows: half of those that all updates read: an
    update of a row costs about three times its forward, and the test split may be read four times (`controls`). 0, all,
    if the split is known to have no more.
    """
    train = recipe.train
    read = train.batch_size * train.rollout.stride
    most = {"valid": min(train.eval_every, train.steps) * read, "test": max(1, train.steps * read // 2)}
    rows: JSONObject = {}
    for split in _HELD:
        if getattr(train, f"{split}_rows") < 0:
            known = task.rows_of_batches(split, train.batch_size)
            rows[f"{split}_rows"] = 0 if known is not None and sum(known) <= most[split] else most[split]
    return replace(recipe, train=replace(train, **rows)) if rows else recipe


def control_segments(config: TrainConfig) -> int:
    """How many segments the controls of the state read, so that they take no longer than training; three are the least.

    They read each about ten times with `ROWS` rows; an update of a row costs about three times its forward. A run that
    scores all rows reads `SEGMENTS`.
    """
    read = config.steps * config.batch_size * config.rollout.stride
    return SEGMENTS if not config.test_rows else max(3, min(SEGMENTS, read // (10 * ROWS)))


def part(task: Task, split: HeldOut, batch_size: int, rows: int) -> Iterator[Any]:
    """Batches of a split that together have at least `rows` rows, in the order of the task; all, if it has fewer.

    The choice depends on the data, `batch_size` and `rows` only: the first ones if the task evaluates in a random order
    (`Task.shuffled`) or carries a state from batch to batch, else some at random, which costs one more pass over the
    split unless the task knows their sizes (`Task.rows_of_batches`).
    """
    # A batch that may continue the rows of the one before says which rows it resets.
    if task.shuffled or task.resets(next(iter(task.batches(split, batch_size)))) is not None:
        yield from first_rows(task.batches(split, batch_size), rows)
        return
    sizes = task.rows_of_batches(split, batch_size)
    if sizes is None:
        sizes = [row_count(batch) for batch in task.batches(split, batch_size)]
    order = np.random.default_rng(0).permutation(len(sizes))
    before = np.cumsum([0, *(sizes[i] for i in order[:-1])])
    chosen = set(order[before < rows].tolist())
    for i, batch in task.chosen_batches(split, batch_size, chosen):
        yield batch
        chosen.discard(i)
        if not chosen:  # the batches after the last one are not read
            return


def first_rows(batches: Iterator[Any], rows: int) -> Iterator[Any]:
    """The first batches that together have at least `rows` rows; 0: all."""
    done = 0
    for batch in batches:
        yield batch
        done += row_count(batch)
        if rows and done >= rows:
            return
