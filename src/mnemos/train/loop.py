"""The loop: a recipe in, a run folder out, stopped and resumed at any moment without a trace.

    update → line of metrics → checkpoint → evaluation (validation split, gates) → next

**Resume is exact.** A run that was killed, at any moment, and resumed gives the losses and weights that the run
would have given, bit for bit: a checkpoint holds the weights, the optimiser, the carried state, the sums behind
the next line of metrics and every random generator; the place in the data is the number of the update; and looking
at the model puts all generators back. It takes the same code and libraries on the same kind of machine, the same
number of processes and of threads within operations (`torch.get_num_threads()`, noted in run.json: sums over
other splits round differently), and, on a GPU, operations that are themselves deterministic
(`torch.use_deterministic_algorithms`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from mnemos import generators
from mnemos.data.batch import each, row_count
from mnemos.data.metrics import MAJORITY
from mnemos.data.task import Task
from mnemos.evaluate.metrics import Uncounted, evaluate, told
from mnemos.types import InputError, JSONObject

from . import checkpoint, devices
from .checks import check_settings, check_state, check_task, complete
from .learner import Learner
from .progress import Silent, progress
from .recipe import Recipe, as_json
from .run import RunFolder
from .stopping import Interrupted, StopSignals, TrainingFailed

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Watch = Callable[[nn.Module, int], JSONObject | None]


def train(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    watch: Watch | None = None,
    quiet: bool = False,
    task: Task | None = None,
    model: nn.Module | None = None,
) -> JSONObject:
    """Run a recipe in a folder (see `run.py` for what is in it) and return what result.json then holds.

    {"recipe", "seed", "steps", "test": {"loss" and each metric of the task}, "valid": {the same}, "metric" (the name of
    the task's first metric, by which runs are compared), "metrics": {name: {"higher_is_better", "about"}}, "reference":
    {name: score in that metric}, "majority" (the share of the most frequent class; null without classes), "parameters",
    "seconds" (in updates), "peak_bytes" (of the GPU, or the growth of the process since before the model), "tokens" (or
    images, or frames: as the task counts), "epoch_seconds" (in the updates of one epoch; null where its length is not
    known), and, if there are several, "rollout_segments" (per update)}

    task: the recipe's data, already open; otherwise they are opened here. Fields of the model that the recipe leaves to
    the data are filled in (`complete`). model: a model to train in place, from its weights, instead of the recipe's.
    `resume` continues from the newest undamaged checkpoint; a finished run's result is returned unchanged.
    `watch(model, step)` is called on the first process at every evaluation; what it returns becomes a line of kind
    "gates". With several processes it must not run the model. `quiet`: no progress.

    With several devices and no torchrun, the other processes run this same program from its start.
    Raises InputError where recipe, data, machine or folder do not fit; TrainingFailed for a loss or gradient that
    is not finite, the last checkpoint untouched; Interrupted after SIGINT or SIGTERM, with a checkpoint saved.
    """
    fabric = devices.connect(recipe.train)
    check_settings(recipe, fabric.world_size)
    task = recipe.data.build() if task is None else task
    recipe = complete(recipe, task)
    check_task(recipe, task)
    if model is None:
        with torch.device("meta"):  # a model that cannot be built must not leave a folder behind
            check_state(recipe.model.build(), task)
    else:
        check_state(model, task)
    run, saved, result = _open(fabric, recipe, Path(folder), resume)
    try:
        if result is not None:
            return result
        learner = Learner(fabric, recipe, task, model)
        if saved is not None:
            learner.restore(saved)
        voice = progress(quiet or run is None, recipe.name, recipe.train.steps, learner.count.step)
        with StopSignals() as signals, voice:
            return _Session(fabric, learner, run, voice, signals, watch).work()
    finally:
        task.close()
        if run is not None:
            run.close()


class _Session:
    """The loop itself, with what it needs at hand. `run` is None on all processes but the first."""

    def __init__(
        self,
        fabric: Fabric,
        learner: Learner,
        run: RunFolder | None,
        voice: Silent,
        signals: StopSignals,
        watch: Watch | None,
    ) -> None:
        self.fabric, self.learner, self.run, self.voice, self.signals = fabric, learner, run, voice, signals
        self.recipe: Recipe = learner.recipe
        self.task: Task = learner.task
        self.watch = watch
        self.saved = learner.count.step
        self.valid: dict[str, float] = {}

    def work(self) -> JSONObject:
        """Train to the end and return the result; where a signal asks for an end, save first."""
        config = self.recipe.train
        try:
            if self.step and self._due(config.eval_every):
                self._evaluate()  # a checkpoint is saved before the evaluation at its update
            while self.step < config.steps:
                update = self.learner.update()
                self.voice.updated(self.step, update, self.learner.count.peak_bytes)
                if self._due(config.log_every):
                    self._record([self.learner.line(update)])
                self._heed_signals()
                if self._due(config.checkpoint_every):
                    self._save()
                if self._due(config.eval_every):
                    self._evaluate()
            return self._finish()
        except _StopAskedError:
            if self.saved != self.step or not self.step:
                self._save()
            where = "" if self.run is None else f"{self.run.folder}: "
            raise Interrupted(f"{where}interrupted and saved after update {self.step}; go on with --resume") from None
        except TrainingFailed as error:
            last = f"the checkpoint of update {self.saved} is whole" if self.saved else "there is no checkpoint yet"
            raise TrainingFailed(f"{error} ({last})") from error

    @property
    def step(self) -> int:
        """Updates done."""
        return self.learner.count.step

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.recipe.train.steps

    def _record(self, lines: list[JSONObject]) -> None:
        if self.run is not None:
            self.run.record(lines)

    def _save(self) -> None:
        snapshot = self.learner.snapshot()  # by all processes together
        if self.run is not None:
            self.run.save(self.step, snapshot, self.recipe.train.keep)
        self.saved = self.step

    def _evaluate(self) -> None:
        """Score the validation split, and call `watch` with the model."""
        began = time.perf_counter()
        self.valid = self._measure("valid")
        self.learner.evaluated(self.valid["loss"])  # at its end: an evaluation that was cut short is run again
        seconds = round(time.perf_counter() - began, 3)
        lines = [{"kind": "valid", "step": self.step, **self.valid, "seconds": seconds}]
        if self.run is not None and self.watch is not None:
            with generators.kept():
                seen = self.watch(self.learner.model, self.step)
            if seen is not None:
                lines.append({"kind": "gates", "step": self.step, **seen})
        self._record(lines)
        rest = told(self.task, self.valid)
        self.voice.say(f"{self.recipe.name} {self.step}: valid loss {self.valid['loss']:.4f} {rest}".rstrip())

    def _measure(self, split: Literal["valid", "test"]) -> dict[str, float]:
        """What `evaluate` finds of a split; each process scores its share of every batch's rows."""

        def total(sums: torch.Tensor) -> torch.Tensor:
            device = self.fabric.device
            return self.fabric.all_reduce(sums.to(device), reduce_op="sum").cpu()  # type: ignore[union-attr]

        def gather(value: object) -> list[Any]:
            return devices.gather(self.fabric, value)

        with generators.kept(), self.fabric.autocast():
            several = total if self.fabric.world_size > 1 else None
            found = evaluate(self.learner.model, self._shares(split), self.task, several, gather)
        return {key: value for key, value in found.items() if key != "count"}

    def _shares(self, split: Literal["valid", "test"]) -> Iterator[Any]:
        """This process's rows of every batch, in segments."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        batches = self.task.batches(split, self.recipe.train.batch_size)
        scored = self.voice.scoring(split, self.task.size(split), batches, self.task.count)
        for i, batch in enumerate(scored):
            self._heed_signals()
            self.task.check(batch, f"{split} batch {i}")
            rows = row_count(batch)
            first, end = rows * rank // world, rows * (rank + 1) // world
            ours = first < end  # every process must call the model; one without rows runs a row that another one counts
            span = slice(first, end) if ours else slice(0, 1)
            share = each(batch, lambda x, span=span: x[span])  # type: ignore[misc]
            for part in self.task.segments(share, self.recipe.train.rollout.segment_length):
                yield part if ours else Uncounted(part)

    def _heed_signals(self) -> None:
        if devices.any_of(self.fabric, self.signals.asked):
            raise _StopAskedError

    def _finish(self) -> JSONObject:
        learner, count = self.learner, self.learner.count
        epoch = self.task.epoch(self.recipe.train.batch_size)
        result = {
            "recipe": self.recipe.name,
            "seed": self.recipe.train.seed,
            "steps": count.step,
            "test": self._measure("test"),
            "valid": self.valid,
            "metric": self.task.metrics[0].name,
            "metrics": {metric.name: metric.described() for metric in self.task.metrics},
            "reference": dict(self.task.reference),
            "majority": self.task.reference.get(MAJORITY),
            "parameters": learner.parameters,
            "seconds": round(count.seconds, 3),
            "peak_bytes": count.peak_bytes,
            "tokens": count.tokens,
            "epoch_seconds": round(count.seconds / count.step * epoch, 3) if epoch else None,
        }
        if (steps := self.recipe.train.rollout.count(self.task.max_length)) > 1:
            result["rollout_segments"] = steps
        if self.run is not None:
            self.run.finish(result)
        return result


class _StopAskedError(Exception):
    """Some process was sent a signal."""


def _open(
    fabric: Fabric, recipe: Recipe, folder: Path, resume: bool
) -> tuple[RunFolder | None, JSONObject | None, JSONObject | None]:
    """(the run, on the first process alone; the checkpoint to go on from; the result, where there is one already)."""
    run, saved, problem, step, result = None, None, None, 0, None
    if fabric.is_global_zero:
        try:
            if resume:
                run = RunFolder.resume(folder, recipe)
                result = run.result
                if result is None:
                    step, saved = _prepare(run, recipe)
            else:
                run = RunFolder.start(folder, recipe, devices.device_name(fabric.device))
        except InputError as error:
            problem = str(error)
            if run is not None:
                run.close()
    # Every process raises what the first one found; otherwise the others would wait without end.
    problem, step, result = fabric.broadcast((problem, step, result))
    if problem is not None:
        raise InputError(problem)
    if step and saved is None:
        saved = checkpoint.read(checkpoint.path_of(folder / "checkpoints", step))
    return run, saved, result


def _prepare(run: RunFolder, recipe: Recipe) -> tuple[int, JSONObject | None]:
    """Find the checkpoint to go on from and cut the measurements back to it: (step, checkpoint)."""
    found = checkpoint.newest(run.checkpoints)
    step, saved, notes = found or (0, None, ["no checkpoint yet: the run starts again from its beginning"])
    if saved is not None and as_json(saved["recipe"]) != as_json(recipe):
        raise InputError(f"{checkpoint.path_of(run.checkpoints, step)}: of another recipe; resume its own run")
    run.trim(step)
    notes.append(run.resumed(step) or "")
    for note in filter(None, notes):
        print(note, file=sys.stderr)
    return step, saved
