"""The training loop: it runs a recipe and writes a run folder.

    update → line of metrics → checkpoint → evaluation (validation split, gates) → next update

**Resume is exact.** A run that was killed at any moment and resumed gives the same losses and weights, bit for bit, as
a run that was not. A checkpoint holds the weights, the optimiser, the carried state, the sums behind the next line of
metrics and every random generator; the position in the data is the number of the update; an evaluation restores all
generators. Conditions: the same code, data and libraries, the same kind of machine, the same number of processes and of
threads within operations (`torch.get_num_threads()`, recorded in run.json; sums split in another way round
differently) and, on a GPU, deterministic operations (`torch.use_deterministic_algorithms`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from mnemos import generators
from mnemos.errors import Interrupted, TrainingFailed, one_line, out_of_memory
from mnemos.lab.evaluate.scores import CountedElsewhere, evaluate, metrics_text
from mnemos.lab.tasks.batch import each, row_count
from mnemos.lab.tasks.metrics import MAJORITY
from mnemos.lab.tasks.task import Task
from mnemos.types import JSONObject

from . import checkpoint, devices
from .averaging import average, parameter_names
from .checks import check_rows, check_settings, check_state, check_task, complete, precision_warning, schedule_warning
from .continuing import Start, final_weights
from .files import Measurement, Result
from .learner import Learner
from .model_size import check_batch, check_memory, on_meta
from .opening import Opening, open_run_folder
from .progress import PLACE, NoProgress, progress
from .recipe import Recipe
from .run import RunFolder
from .scored_batches import scored_batches
from .sharding import load_model_state, model_state
from .stopping import StopSignals

if TYPE_CHECKING:
    from lightning_fabric import Fabric

EvaluationHook = Callable[[nn.Module, int], JSONObject | None]


def train(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    on_evaluation: EvaluationHook | None = None,
    quiet: bool = False,
    task: Task | None = None,
    model: nn.Module | None = None,
    longer: bool = False,
    accept_changed_data: bool = False,
    count_flops: bool = False,
) -> Result:
    """Train a recipe in a folder (`run.py` lists its files) and return its result.

    task: the recipe's data if they are open already; by default the recipe opens them. Model fields that are 0 are
    filled in from the task (`complete`). model: a model to train in place instead of building the recipe's.
    resume: continue from the newest intact checkpoint; the result of a finished run is returned unchanged, and its
    weights are loaded into a given `model`. longer: the run resumes with another number of steps, that of `recipe`,
    which `continuing.extend` writes to its folder. accept_changed_data: resume although the data are others than those
    of the checkpoint; a line says so. count_flops: count those of an update at the end, which reads 4 batches more.
    on_evaluation(model, step): called on the first process after each evaluation; the dict that it returns becomes a
    line of kind "gates" in metrics.jsonl. With several processes it must not run the model. quiet: print neither
    progress nor what the splits hold (`Task.about`).

    With several devices and without torchrun, the other processes run this program from its start.
    Raises InputError if recipe, data, machine or folder do not fit, TrainingFailed if a loss or gradient is not finite
    (the last checkpoint stays as it is), and Interrupted after SIGINT or SIGTERM, with a checkpoint saved.
    """
    fabric = devices.connect(recipe.train)
    folder = Path(fabric.broadcast(str(folder)))  # a name with the time of day differs between processes
    check_settings(recipe, fabric.world_size)
    with devices.threads(recipe.train.threads):
        opening = Opening(resume, longer, accept_changed_data)
        return _train(fabric, recipe, folder, opening, on_evaluation, quiet, task, model, count_flops)


def _train(
    fabric: Fabric,
    recipe: Recipe,
    folder: Path,
    opening: Opening,
    on_evaluation: EvaluationHook | None,
    quiet: bool,
    task: Task | None,
    model: nn.Module | None,
    count_flops: bool,
) -> Result:
    task = recipe.data.build() if task is None else task
    run: RunFolder | None = None
    try:
        recipe = complete(recipe, task)
        check_task(recipe, task)
        check_rows(recipe.train, task, fabric.world_size)
        # Wrong model settings, and weights that do not fit, must raise before the folder exists.
        checked = on_meta(recipe.model) if model is None else model
        check_memory(checked, recipe.train, fabric.device)
        if model is None:  # with a model of the user's, the data loader has made batches already
            check_batch(task, recipe.train)
        check_state(checked, task)
        task.check_model(checked)
        start = None
        if recipe.train.init_from is not None and not checkpoint.steps(folder / "checkpoints"):
            start = Start.of(recipe.train.init_from, checked, task.preprocessing())
        run, saved, result = open_run_folder(fabric, recipe, folder, opening, start.source if start else None)
        if result is not None:
            if model is not None:
                load_model_state(model, final_weights(folder))
            return result
        place = PLACE.get()
        if run is not None and (not quiet if place is None else place.first):  # once for all runs of a comparison
            for line in task.about:
                print(f"{recipe.name if place is None else 'data'}: {line}", flush=True)
        if run is not None and start is not None and (not quiet if place is None else place.new):
            print(f"{recipe.name}: {start.about}", flush=True)
        learner = Learner(fabric, recipe, task, model)
        ended = False
        if saved is not None:
            learner.restore(saved)
            ended = learner.count.step == saved["recipe"]["train"]["steps"]
        elif start is not None:
            start.load(learner.model)
        if run is not None and not quiet:
            for warning in filter(None, (schedule_warning(recipe), precision_warning(recipe, fabric.device.type))):
                print(f"{recipe.name}: warning: {warning}", file=sys.stderr)
        display = progress(quiet or run is None, recipe.name, recipe.train.steps, learner.count.step)
        with StopSignals() as signals, display:
            session = _Session(fabric, learner, run, folder, display, signals, on_evaluation)
            return session.work(ended, count_flops)
    except (RuntimeError, MemoryError, OSError) as error:
        line = one_line(error)
        if line is None:
            raise
        if run is not None and out_of_memory(error):
            run.discard()  # it has trained nothing, unless there is a checkpoint
        raise TrainingFailed(line) from error
    finally:
        task.close()
        if run is not None:
            run.close()


class _Session:
    """The loop and the objects that it uses. `run` is None on all processes except the first."""

    def __init__(
        self,
        fabric: Fabric,
        learner: Learner,
        run: RunFolder | None,
        folder: Path,
        display: NoProgress,
        signals: StopSignals,
        on_evaluation: EvaluationHook | None,
    ) -> None:
        self.fabric, self.learner, self.run, self.display, self.signals = fabric, learner, run, display, signals
        self.folder = folder
        self.recipe: Recipe = learner.recipe
        self.task: Task = learner.task
        self.on_evaluation = on_evaluation
        self.saved = learner.count.step
        self.valid: dict[str, float] = {}
        self.scored: dict[str, int] = {}  # rows of each split in its last evaluation

    def work(self, ended: bool = False, count_flops: bool = False) -> Result:
        """Train to the last step and return the result. After a signal to stop, save a checkpoint, then raise.

        ended: the checkpoint was the last one of a run that is now trained for longer. count_flops: see `train`.
        """
        config = self.recipe.train
        try:
            if not self.step and self.recipe.train.init_from is not None:
                self._evaluate_start()
            if self.step and (ended or self._due(config.eval_every)):
                self._evaluate()  # the checkpoint was saved before the evaluation at its step
            while self.step < config.steps and not self._stalled():
                update = self.learner.update()
                self.display.updated(self.step, update, partial(devices.peak_bytes, self.fabric.device))
                if self._due(config.log_every):
                    self._record([self.learner.line(update)])
                self._check_signals()
                if self._due(config.checkpoint_every):
                    self._save()
                if self._due(config.eval_every):
                    self._evaluate()
            if self.saved != self.step:  # stopped early
                self._save()
            return self._finish(count_flops)
        except _StopRequestedError:
            if self.saved != self.step or not self.step:
                self._save()
            where = "" if self.run is None else f"{self.run.folder}: "
            raise Interrupted(
                f"{where}interrupted; a checkpoint is saved after update {self.step}; continue with "
                f"{self.recipe.resuming}"
            ) from None
        except TrainingFailed as error:
            last = f"the last checkpoint is of update {self.saved}" if self.saved else "there is no checkpoint yet"
            raise TrainingFailed(f"{error} ({last})") from error

    @property
    def step(self) -> int:
        """The number of updates done."""
        return self.learner.count.step

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.recipe.train.steps

    def _stalled(self) -> bool:
        """Whether the last `train.patience` evaluations brought no better score."""
        return 0 < self.recipe.train.patience <= self.learner.best.since

    def _record(self, lines: list[Measurement]) -> None:
        if self.run is not None:
            self.run.record(lines)

    def _save(self) -> None:
        snapshot = self.learner.snapshot()  # collective: every process calls it
        if self.run is not None:
            config = self.recipe.train
            self.run.save(self.step, snapshot, max(config.keep, config.average), config.checkpoint_every)
        self.saved = self.step

    def _save_best(self) -> None:
        weights = model_state(self.learner.model)  # collective
        if self.run is not None:
            self.run.save_best(self.step, {"step": self.step, "model": weights})

    def _restore_best(self) -> None:
        """Load the weights of the best evaluation, if the run keeps them and has evaluated."""
        if self.recipe.train.keep_best and self.learner.best.step:
            self.fabric.barrier()  # the first process may still be writing the file
            best = checkpoint.best_path(self.folder / "checkpoints", self.learner.best.step)
            load_model_state(self.learner.model, checkpoint.read(best)["model"])
            self.valid = self.learner.best.valid

    def _use_average(self) -> list[int]:
        """Load and store the averaged weights that the recipe asks for; the steps of checkpoints that were averaged."""
        if self.learner.ema is not None and not self.recipe.train.keep_best:  # the best weights are averages already
            self.learner.ema.use()
            self._save_averaged(model_state(self.learner.model), [])
        count, every = self.recipe.train.average, self.recipe.train.checkpoint_every
        if not count:
            return []
        self.fabric.barrier()  # the first process may still be writing the last checkpoint
        found = average(self.folder / "checkpoints", count, parameter_names(self.learner.model), every)
        load_model_state(self.learner.model, found.weights)
        self._save_averaged(found.weights, found.steps)
        self.valid = self._scores("valid")
        return found.steps

    def _save_averaged(self, weights: dict[str, torch.Tensor], steps: list[int]) -> None:
        """Store the weights of the run's model where they are not those of its last checkpoint."""
        if self.run is not None:
            self.run.save_average(self.step, {"step": self.step, "steps": steps, "model": weights})

    def _evaluate_start(self) -> None:
        """Score the weights that the run starts with, so that it can be seen what training adds."""
        began = time.perf_counter()
        scores = self._scores("valid")
        seconds = round(time.perf_counter() - began, 3)
        self._record([Measurement("valid", 0, {**scores, "seconds": seconds})])
        self._told(scores, "before training: ")

    def _told(self, scores: dict[str, float], when: str = "") -> None:
        said = f"{when}valid loss {scores['loss']:.4f}  {metrics_text(self.task, scores)}".rstrip()
        self.display.message(f"{self.recipe.name} {self.step}: {said}")

    def _evaluate(self) -> None:
        """Evaluate the validation split, keep the weights if it is the best time, then call `on_evaluation`."""
        with contextlib.nullcontext() if self.learner.ema is None else self.learner.ema.used():
            self._evaluate_weights()

    def _evaluate_weights(self) -> None:
        """`_evaluate` with the weights that the model has."""
        began = time.perf_counter()
        self.valid = self._scores("valid")
        self.learner.evaluated(self.valid)  # only now: an interrupted evaluation is repeated from its start
        if self.recipe.train.keep_best and self.learner.best.step == self.step:
            self._save_best()
        seconds = round(time.perf_counter() - began, 3)
        lines = [Measurement("valid", self.step, {**self.valid, "seconds": seconds})]
        if self.run is not None and self.on_evaluation is not None:
            with generators.kept():
                measured = self.on_evaluation(self.learner.model, self.step)
            if measured is not None:
                lines.append(Measurement("gates", self.step, measured))
        self._record(lines)
        self._told(self.valid)

    def _scores(self, split: Literal["valid", "test"]) -> dict[str, float]:
        """Evaluate a split; each process evaluates its share of every batch's rows."""

        def total(sums: torch.Tensor) -> torch.Tensor:
            device = self.fabric.device
            return self.fabric.all_reduce(sums.to(device), reduce_op="sum").cpu()  # type: ignore[union-attr]

        def gather(value: object) -> list[object]:
            return devices.gather(self.fabric, value)

        with generators.kept(), self.fabric.autocast():
            several = total if self.fabric.world_size > 1 else None
            found = evaluate(self.learner.model, self._shares(split), self.task, several, gather)
        return {key: value for key, value in found.items() if key != "count"}

    def _shares(self, split: Literal["valid", "test"]) -> Iterator[object]:
        """This process's rows of every batch, in the segments of the rollout."""
        rank, world = self.fabric.global_rank, self.fabric.world_size
        self.scored[split] = 0
        for i, batch in enumerate(scored_batches(self.task, split, self.recipe.train, self.display)):
            self._check_signals()
            self.task.check(batch, f"{split} batch {i}")
            rows = row_count(batch)
            self.scored[split] += rows
            first, end = rows * rank // world, rows * (rank + 1) // world
            counted_here = first < end
            # Every process must call the model. One without rows runs a row that another process counts.
            span = slice(first, end) if counted_here else slice(0, 1)
            share = each(batch, lambda x, span=span: x[span])  # type: ignore[misc]
            for part in self.task.segments(share, self.recipe.train.rollout.segment_length):
                yield part if counted_here else CountedElsewhere(part)

    def _check_signals(self) -> None:
        if devices.any_of(self.fabric, self.signals.asked):
            raise _StopRequestedError

    def _finish(self, count_flops: bool) -> Result:
        learner, count = self.learner, self.learner.count
        epoch = self.task.epoch(self.recipe.train.batch_size)
        flops = learner.update_flops() if count_flops else None
        self._restore_best()
        averaged = self._use_average()
        reference = _reference(self.task)
        result = Result(
            recipe=self.recipe.name,
            seed=self.recipe.train.seed,
            steps=count.step,
            test=self._scores("test") if self.task.has_test else None,
            valid=self.valid,
            scored_rows=self.scored,
            metric=self.task.metrics[0].name,
            metrics={metric.name: metric.described() for metric in self.task.metrics},
            reference=reference,
            majority=reference.get(MAJORITY),
            parameters=learner.parameters,
            seconds=round(count.seconds, 3),
            peak_bytes=count.peak_bytes,
            tokens=count.tokens,
            unit=self.task.unit,
            update_flops=flops,
            epoch_seconds=round(count.seconds / count.step * epoch, 3) if epoch else None,
            rollout_segments=max(1, self.recipe.train.rollout.count(self.task.max_length)),
            best_step=learner.best.step if self.recipe.train.keep_best else 0,
            averaged_steps=averaged,
            stopped_early=count.step < self.recipe.train.steps,
            before={} if self.run is None else self.run.scores_before(),
        )
        if self.run is not None:
            self.run.finish(result)
        return result


def _reference(task: Task) -> dict[str, float]:
    """`Task.reference`; {} and a warning if it fails, because a run that is trained must get its result."""
    try:
        return dict(task.reference)
    except Exception as error:  # of a plug-in's task it may be any; MemoryError of long text
        found = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"mnemos: warning: the result lacks the scores without learning, which failed: {found}", file=sys.stderr)
        return {}


class _StopRequestedError(Exception):
    """A process received SIGINT or SIGTERM."""
