"""What a run is asked before its first update: do recipe, model and data fit together?"""

import math
from typing import Any

import torch

from mnemos.data.batch import IGNORE, Batch, Task
from mnemos.types import InputError

from . import optim
from .recipe import Recipe, TrainConfig


def check_settings(recipe: Recipe, processes: int) -> None:
    """Raise InputError for numbers that no run can have."""
    train = recipe.train
    for name in ("steps", "batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every", "keep", "devices"):
        if getattr(train, name) < 1:
            raise InputError(f"train.{name} must be at least 1, found {getattr(train, name)}")
    if train.seed < 0:
        raise InputError(f"train.seed must be at least 0, found {train.seed}")
    _check_split(train, processes)
    optim.check(recipe.optim)


def _check_split(train: TrainConfig, processes: int) -> None:
    pieces = processes * train.accumulate
    if train.batch_size % pieces:
        near = max(1, round(train.batch_size / pieces)) * pieces
        raise InputError(
            f"train.batch_size {train.batch_size} does not divide into {processes} process(es) × {train.accumulate} "
            f"micro-batch(es); {near} would"
        )


def check_task(recipe: Recipe, task: Task) -> None:
    """Raise InputError where the model cannot hold the task's tokens, classes or lengths."""
    model: Any = recipe.model
    head = getattr(model, "head", model)
    if getattr(model, "vocab_size", math.inf) < task.vocab_size:
        raise InputError(
            f"model.vocab_size is {model.vocab_size}, but the data has {task.vocab_size} tokens; "
            f"use model.vocab_size {task.vocab_size}"
        )
    if getattr(head, "classes", task.classes) != task.classes:
        where = "model.classes" if head is model else "model.head.classes"
        wanted = f"{task.classes} classes" if task.classes else "no classes, it is a language (classes 0)"
        raise InputError(f"{where} is {head.classes}, but the data has {wanted}; use {where} {task.classes}")
    if task.carries_state and getattr(getattr(model, "attention", None), "window", 0) is None:
        raise InputError(
            "model.attention.window is None, but the data's streams have no end and the keys of all of them would be "
            f"kept; use model.attention.window {task.max_length}, or another attention"
        )
    if task.carries_state and getattr(model, "position", None) == "learned":
        raise InputError("model.position is learned, but the data's streams have no end; use sinusoidal or rotary")
    if getattr(model, "max_length", math.inf) < task.max_length:
        raise InputError(
            f"model.max_length is {model.max_length}, but the data has sequences of {task.max_length}; "
            f"use model.max_length {task.max_length}"
        )


def check_batch(batch: Batch, task: Task, where: str) -> Batch:
    """The batch; InputError where tokens, targets or shapes are not what the task promises. Cost: one look at each."""
    rows, length = batch.inputs.shape
    wanted = (rows,) if task.classes else (rows, length)
    if batch.targets.shape != wanted:
        found = tuple(batch.targets.shape)
        raise InputError(f"{where}: expected targets of shape {wanted}, found {found}; check the data")
    if length > task.max_length:
        raise InputError(f"{where}: expected at most {task.max_length} tokens a row, found {length}; check the data")
    low, high = _range(batch.inputs)
    if low < 0 or high >= task.vocab_size:
        raise InputError(f"{where}: expected tokens 0 to {task.vocab_size - 1}, found {low} to {high}; check the data")
    limit = task.classes or task.vocab_size
    low, high = _range(batch.targets[batch.targets != IGNORE])
    if low < 0 or high >= limit:
        raise InputError(f"{where}: expected targets 0 to {limit - 1}, found {low} to {high}; check the data")
    if task.carries_state and batch.reset is None:
        raise InputError(f"{where}: expected `reset`, as the task carries state, found none; check the data")
    return batch


def _range(tokens: torch.Tensor) -> tuple[int, int]:
    if not tokens.numel():
        return 0, 0
    low, high = torch.aminmax(tokens)
    return int(low), int(high)
