"""Checks before a run's first update: that settings, model and data fit together."""

import dataclasses
import typing
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from mnemos import libraries
from mnemos.config import ModelConfig
from mnemos.errors import near_name
from mnemos.lab.tasks.metrics import LOSS, SumMetric
from mnemos.lab.tasks.task import Task
from mnemos.types import InputError

from . import optim
from .recipe import OWN, Recipe, TrainConfig
from .scored_batches import limited

VALID_IS_TEST = "found the test split in its place; set data.valid_size, or choose by nothing"
ANY = "any"  # `inputs` of a model that accepts every kind of input
# What the trainer and `evaluate` write beside the metrics; a metric of such a name would replace it.
RESERVED = {"kind", "step", "loss", "auxiliary_loss", "lr", "grad_norm", "seconds", "tokens", "count", "layers"}
AT_LEAST = ("vocab_size", "max_length")  # the model's value may exceed the data's; all other sizes must be equal
_LEAST = {  # of the settings of training: the least value, and what to do below it
    **dict.fromkeys(("steps", "batch_size", "accumulate", "devices", "num_nodes", "rollout.segments"), (1, "raise it")),
    **dict.fromkeys(("log_every", "eval_every", "checkpoint_every", "keep"), (1, "raise it")),
    **dict.fromkeys(("seed", "rollout.segment_length", "rollout.slide", "rollout.horizon"), (0, "raise it")),
    **dict.fromkeys(("valid_rows", "test_rows"), (-1, "use 0 for all rows")),
    "threads": (0, "use 0"),
    "patience": (0, "use 0 to train all steps"),
    "average": (0, "use 0 for no average"),
}


def unresolved(recipe: Recipe) -> bool:
    """Whether `complete` may take something from the data: any size of the model, or rows of -1."""
    rows = min(recipe.train.valid_rows, recipe.train.test_rows)
    return rows < 0 or bool(recipe.from_data([field.name for field in dataclasses.fields(recipe.model)]))


def complete(recipe: Recipe, task: Task) -> Recipe:
    """Fill in what the recipe takes from its data: the model's sizes (`Task.sizes`), and rows that are -1."""
    recipe = limited(recipe, task)
    found = {name: task.sizes[name] for name in recipe.from_data(task.sizes) if task.sizes[name]}
    if not found:
        return recipe
    _check_inputs(recipe, task)
    return replace(recipe, model=replace(recipe.model, **found))


def check_settings(recipe: Recipe, processes: int) -> None:
    """Raise InputError for training, rollout or optimiser settings out of range, or a log whose library is missing."""
    train, rollout = recipe.train, recipe.train.rollout
    states, pieces = rollout.checkpoints, processes * train.accumulate
    known = states in ("all", "sqrt") if isinstance(states, str) else states >= 2
    near = max(1, round(train.batch_size / max(1, pieces))) * pieces
    of_processes = f"a multiple of {pieces} ({processes} process(es) × {train.accumulate} micro-batch(es))"
    both, most = bool(train.average and train.keep_best), f"at most train.rollout.segments, {rollout.segments}"
    logs = typing.get_args(typing.get_type_hints(TrainConfig)["log"])
    nearest = near_name(str(train.log), logs, "use one of them")
    for name, right, expected, fix in (
        *((name, attrgetter(name)(train) >= n, f"at least {n}", fix) for name, (n, fix) in _LEAST.items()),
        ("average", not both, "0 beside train.keep_best", "use 0, or leave train.keep_best out"),
        ("rollout.slide", rollout.slide <= rollout.segments, most, "use 0 for updates that share no batch"),
        ("rollout.checkpoints", known, "all, sqrt or an integer ≥ 2", "use all"),
        ("batch_size", not train.batch_size % max(1, pieces), of_processes, f"use {near}"),
        ("log", train.log in logs, f"one of {', '.join(logs)}", nearest),
    ):
        if not right:
            raise InputError(f"train.{name}: expected {expected}, found {attrgetter(name)(train)!r}; {fix}")
    # --- what is chosen by the validation split ---
    plateau = recipe.optim.schedule.name == "plateau"
    choices = {"train.keep_best": train.keep_best, "train.patience": train.patience, "optim.schedule": plateau}
    if (choice := next((name for name, on in choices.items() if on), None)) and recipe.data.valid_is_test:
        raise InputError(f"{choice}: expected a validation split of its own to choose by, {VALID_IS_TEST}")
    if train.log != "none":
        getattr(libraries, train.log)()  # or how to install it
    optim.check(recipe.optim)


def check_run(recipe: Recipe, task: Task, model: nn.Module | None, processes: int) -> nn.Module:
    """Raise InputError unless recipe, data and batches fit; returns `model`, or the recipe's on meta."""
    check_task(recipe, task)
    pieces, fewest = processes * recipe.train.accumulate, task.fewest_rows(recipe.train.batch_size)
    if fewest < pieces:
        raise InputError(
            f"data.batch_tokens: expected training batches of at least {pieces} rows ({processes} process(es) × "
            f"{recipe.train.accumulate} micro-batch(es)), found one of {fewest}; raise it, or lower data.longest or "
            "train.accumulate"
        )
    checked = on_meta(recipe.model) if model is None else model
    if not any(x.requires_grad for x in checked.parameters()):
        raise InputError("model: expected parameters to train, found none that require gradient; call requires_grad_()")
    check_state(checked, task)
    task.check_model(checked)
    return checked


def schedule_warning(recipe: Recipe) -> str | None:
    """One line for a run that ends before its learning rate has risen; None for any other run."""
    steps = recipe.train.steps
    warmup = recipe.optim.schedule.warmup_steps(steps)
    if warmup <= steps:
        return None
    highest = optim.factor(recipe.optim.schedule, steps, steps)
    if recipe.model.name == OWN:  # of mnemos linearise, which has no such option, or of mnemos.fit
        return (
            f"the learning rate rises for {warmup:,} updates and the training has {steps:,}: it ends at {highest:.2g} "
            "times the highest rate; train on more tokens or for more updates"
        )
    return (
        f"optim.schedule.warmup is {warmup:,} steps and the run has {steps:,}: it ends within the warm-up, at "
        f"{highest:.2g} times optim.lr; train for more steps, or lower optim.schedule.warmup"
    )


def check_task(recipe: Recipe, task: Task) -> None:
    """Raise InputError if the model's inputs, sizes or rollout do not fit the task's data, or metrics share names."""
    model, rollout = recipe.model, recipe.train.rollout
    _check_inputs(recipe, task)

    # --- metrics: at least one, each with a name of its own in results and lines of metrics ---
    if not task.metrics:
        raise InputError("the task's metrics: expected at least one, found none; add mnemos.lab.tasks.metrics.LOSS")
    names = [metric.name for metric in task.metrics]
    for i, metric in enumerate(task.metrics):
        loss = isinstance(metric, SumMetric) and metric.sums is None and metric.name == LOSS.name
        if metric.name in names[:i] or (metric.name in RESERVED and not loss):
            taken = "another metric" if metric.name in names[:i] else "the trainer"
            raise InputError(
                f"the task's metrics: expected a name of its own for each, found {metric.name!r}, which {taken} has; "
                "rename the metric"
            )

    # --- the rollout: segments of rows, or successive batches ---
    length, count = rollout.segment_length, rollout.count(task.max_length)
    apart = "the data's batches do not continue one another"
    segments = f"train.rollout.segment_length is {length}, but "
    split = "use train.rollout.segment_length to split rows into segments" if task.splits_rows else "use 1"
    problem = ""
    if length and not task.splits_rows:
        problem = f"{segments}this task's rows cannot be split into segments; use train.rollout.segment_length 0"
    elif length and task.carries_state:
        problem = (
            f"{segments}the data are already in segments (data.segment); use train.rollout.segment_length 0, and "
            "train.rollout.segments for several per update"
        )
    elif rollout.segments > 1 and not task.carries_state:
        problem = f"train.rollout.segments is {rollout.segments}, but {apart}; {split}"
    elif rollout.slide and not task.carries_state:
        problem = f"train.rollout.slide is {rollout.slide}, but {apart}; use 0"
    elif rollout.horizon > count:
        found = f"the segments of an update, found {rollout.horizon}"
        problem = f"train.rollout.horizon: expected at most {count}, {found}; use {count}, or 0 for all"
    if problem:
        raise InputError(problem)

    # --- sizes: the fields of those names of the model, or of the model's head ---
    for name, size in task.sizes.items():
        owner: Any = model if hasattr(model, name) else getattr(model, "head", None)
        own = getattr(owner, name, None)
        if own is None or own == size or (name in AT_LEAST and own > size):
            continue
        if not any(field.name == name for field in dataclasses.fields(owner)):
            raise InputError(
                f"the data has {name} {size}, but the model {model.name} supports only {name} {own}; choose another "
                f"model, with a field model.{name}"
            )
        where = f"model.{name}" if owner is model else f"model.head.{name}"
        needs = (f"at least {size}" if name in AT_LEAST else f"{size}") if size else "none (0)"
        raise InputError(f"{where} is {own}, but the data needs {needs}; use {where} {size}")
    # Positions of a model without max_length restart in every segment.
    if task.carries_state and getattr(model, "position", None) == "learned" and hasattr(model, "max_length"):
        raise InputError(
            "model.position: expected rotary, because the data's streams have no end, found a table of learned "
            "positions; use rotary"
        )


def check_state(model: object, task: Task) -> None:
    """Raise InputError if a task's streams have no end and the model declares a state that grows with every token."""
    if task.carries_state and getattr(model, "state_kind", None) == "growing":
        raise InputError(
            "model: expected a state that does not grow, because the data's streams have no end, found "
            f"{type(model).__name__} with a state that keeps every token; use model.attention linear or relative, or "
            f"softmax with model.attention.window {task.max_length}"
        )


def _check_inputs(recipe: Recipe, task: Task) -> None:
    model = recipe.model
    if model.inputs not in (task.inputs, ANY):
        layout = f", or data.layout {'image' if model.inputs == 'images' else 'pixels'}"
        raise InputError(
            f"the model {model.name} takes {model.inputs}, but the data {recipe.data.name} gives {task.inputs}; "
            f"use another recipe{layout if hasattr(recipe.data, 'layout') else ''}"
        )


def on_meta(config: ModelConfig) -> nn.Module:
    """The model on the meta device, where it takes no memory. Raises InputError for sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            model: nn.Module = config.build()
    except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
        if isinstance(error, TypeError) and "Overflow" not in str(error):
            raise
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model: expected sizes of which tensors can be made, found {problem}; lower them") from None
    return model
