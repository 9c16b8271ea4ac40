"""What a run is asked before its first update: do recipe, model and data fit together?"""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import torch

from mnemos.data.batch import IGNORE, Batch, Task
from mnemos.types import InputError

from . import optim
from .recipe import Recipe, RolloutConfig, TrainConfig


def complete(recipe: Recipe) -> Recipe:
    """The recipe with what it leaves to the data: classes, image and channels of an image model that are 0.

    Opens the data where there is such a field.
    """
    model: Any = recipe.model
    left = [name for name in ("classes", "image", "channels") if model.inputs == "images" and getattr(model, name) == 0]
    if not left:
        return recipe
    task = recipe.data.build()
    _check_kind(recipe, task)
    _, channels, side, _ = task.sample().shape
    found = {"classes": task.classes, "image": side, "channels": channels}
    return replace(recipe, model=replace(model, **{name: found[name] for name in left}))


def check_settings(recipe: Recipe, processes: int) -> None:
    """Raise InputError for numbers that no run can have."""
    train = recipe.train
    for name in ("steps", "batch_size", "accumulate", "log_every", "eval_every", "checkpoint_every", "keep", "devices"):
        if getattr(train, name) < 1:
            raise InputError(f"train.{name} must be at least 1, found {getattr(train, name)}")
    if train.seed < 0:
        raise InputError(f"train.seed must be at least 0, found {train.seed}")
    rollout = train.rollout
    for name, least in (("segment_length", 0), ("segments", 1), ("horizon", 0)):
        if getattr(rollout, name) < least:
            raise InputError(f"train.rollout.{name} must be at least {least}, found {getattr(rollout, name)}")
    if rollout.checkpoints not in ("all", "sqrt") and (isinstance(rollout.checkpoints, str) or rollout.checkpoints < 2):
        raise InputError(f"train.rollout.checkpoints is all, sqrt or a number from 2, found {rollout.checkpoints!r}")
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
    """Raise InputError where the model cannot hold what the task gives, its classes or lengths."""
    model: Any = recipe.model
    _check_kind(recipe, task)
    _check_rollout(recipe.train.rollout, task)
    head = getattr(model, "head", model)
    if getattr(model, "vocab_size", math.inf) < task.vocab_size:
        raise InputError(
            f"model.vocab_size is {model.vocab_size}, but the data has {task.vocab_size} tokens; "
            f"use model.vocab_size {task.vocab_size}"
        )
    if getattr(head, "classes", task.classes) != task.classes:
        if not any(f.name == "classes" for f in dataclasses.fields(head)):
            raise InputError(
                f"the model {model.name} says the next token; the data has {task.classes} classes: take another"
            )
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


def _check_rollout(rollout: RolloutConfig, task: Task) -> None:
    """Steps are pieces of rows, or batches that continue one another; what is no language has neither."""
    if task.kind != "language" and rollout.segment_length:
        raise InputError(
            f"train.rollout.segment_length is {rollout.segment_length}, but only a language's rows can be read in "
            "pieces, not those "
            f"of {task.kind}; use train.rollout.segment_length 0"
        )
    if task.carries_state and rollout.segment_length:
        raise InputError(
            f"train.rollout.segment_length is {rollout.segment_length}, but the data comes in segments already "
            "(data.segment); use "
            "train.rollout.segments to take several of them in an update"
        )
    if rollout.segments > 1 and not task.carries_state:
        fix = "use train.rollout.segment_length to read rows in pieces" if task.kind == "language" else "use 1"
        raise InputError(
            f"train.rollout.segments is {rollout.segments}, but the data's batches do not continue one another; {fix}"
        )
    count = rollout.count(task.max_length)
    if rollout.horizon > count:
        raise InputError(
            f"train.rollout.horizon is {rollout.horizon}, but an update has {count} step(s); use at most as many, or 0 "
            "for all"
        )


def _check_kind(recipe: Recipe, task: Task) -> None:
    """Tokens to a model of tokens, images of its size and colours to one of images, frames of its bands to a third."""
    model: Any = recipe.model
    if model.inputs != task.inputs:
        layout = f", or data.layout {'image' if model.inputs == 'images' else 'pixels'}"
        raise InputError(
            f"the model {model.name} takes {model.inputs}, but the data {recipe.data.name} gives {task.inputs}; "
            f"take another recipe{layout if hasattr(recipe.data, 'layout') else ''}"
        )
    sizes = task.sample().shape
    fields = {"tokens": {}, "images": {"image": 2, "channels": 1}, "frames": {"bands": 2}}[task.inputs]
    for name, given in ((name, sizes[axis]) for name, axis in fields.items()):
        wanted = getattr(model, name, given)
        if wanted not in (0, given):
            raise InputError(f"model.{name} is {wanted}, but the data's is {given}; use model.{name} {given}")


def check_batch(batch: Batch, task: Task, where: str) -> Batch:
    """The batch; InputError where inputs, targets or shapes are not what the task promises. Cost: one look at each."""
    {"tokens": _check_tokens, "images": _check_images, "frames": _check_frames}[task.inputs](batch, task, where)
    return batch


def _check_tokens(batch: Batch, task: Task, where: str) -> None:
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
    _check_targets(batch.targets, limit, where)
    if task.carries_state and batch.reset is None:
        raise InputError(f"{where}: expected `reset`, as the task carries state, found none; check the data")


def _check_frames(batch: Batch, task: Task, where: str) -> None:
    rows, length = batch.inputs.shape[:2]
    bands, wanted = task.sample().shape[2], f"frames [{rows}, at most {task.max_length}, {task.sample().shape[2]}]"
    if batch.inputs.shape[2:] != (bands,) or length > task.max_length or batch.inputs.dtype != torch.float32:
        found = f"{batch.inputs.dtype} of shape {tuple(batch.inputs.shape)}"
        raise InputError(f"{where}: expected {wanted} of float32, found {found}; check the data")
    if not batch.inputs.isfinite().all():
        raise InputError(f"{where}: expected finite frames, found NaN or infinity; check the recordings")
    if batch.mask is not None and bool((batch.mask[:, 1:] & ~batch.mask[:, :-1]).any()):
        raise InputError(f"{where}: expected a row's frames first and padding behind them; check the mask")
    if batch.targets.dim() != 2 or len(batch.targets) != rows:
        raise InputError(f"{where}: expected targets [{rows}, L], found {tuple(batch.targets.shape)}; check the data")
    _check_targets(batch.targets, task.vocab_size, where)


def _check_targets(targets: torch.Tensor, limit: int, where: str) -> None:
    low, high = _range(targets[targets != IGNORE])
    if low < 0 or high >= limit:
        raise InputError(f"{where}: expected targets 0 to {limit - 1}, found {low} to {high}; check the data")


def _check_images(batch: Batch, task: Task, where: str) -> None:
    rows, wanted = len(batch.inputs), tuple(task.sample().shape[1:])
    if batch.inputs.shape[1:] != wanted or batch.inputs.dtype != torch.float32:
        found = f"{batch.inputs.dtype} of shape {tuple(batch.inputs.shape)}"
        raise InputError(f"{where}: expected images {wanted} of float32, found {found}; check the data")
    targets = batch.targets
    shape = (rows, task.classes) if targets.is_floating_point() else (rows,)
    if targets.shape != shape:
        raise InputError(f"{where}: expected targets of shape {shape}, found {tuple(targets.shape)}; check the data")
    if targets.is_floating_point():
        if targets.min() < 0 or not torch.allclose(targets.sum(1), torch.ones(rows), atol=1e-3):
            raise InputError(f"{where}: expected targets that are probabilities, found others; check the data")
    else:
        _check_targets(targets, task.classes, where)


def _range(tokens: torch.Tensor) -> tuple[int, int]:
    if not tokens.numel():
        return 0, 0
    low, high = torch.aminmax(tokens)
    return int(low), int(high)
