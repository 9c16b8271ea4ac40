"""A run: a recipe is trained in a folder, and the trained model is measured.

    run = Run.open(recipe, folder)
    run.train()      # update → line of metrics → checkpoint → evaluation (validation split, gates) → next update
    run.assess()

**Resume is exact**: a run that was killed at any moment and resumed gives the same losses and weights, bit for bit.
Conditions: the same code, data and libraries, the same kind of machine, the same number of processes and of threads
within operations (sums split in another way round differently) and, on a GPU, `torch.use_deterministic_algorithms`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from mnemos import generators
from mnemos.atomic import write_json
from mnemos.config import ModelConfig, to_dict
from mnemos.errors import say
from mnemos.lab.errors import Interrupted, TrainingFailed, one_line, out_of_memory
from mnemos.lab.evaluate.controls import control_names, controls
from mnemos.lab.evaluate.explain import explain
from mnemos.lab.evaluate.gates import measure_gates
from mnemos.lab.evaluate.predict import PREPROCESSING
from mnemos.lab.evaluate.scores import CountedElsewhere, evaluate
from mnemos.lab.measure.flops import task_flops, task_state_bytes
from mnemos.lab.tasks.batch import each, row_count
from mnemos.lab.tasks.metrics import MAJORITY, CorpusMetric
from mnemos.lab.tasks.task import HeldOut, Task
from mnemos.memory.gated_cache import caches, hold_caches
from mnemos.models.store import RUN_MODEL, save
from mnemos.ops import dense_layer
from mnemos.types import InputError, JSONObject

from . import checkpoint, devices, loop
from .checkpoint import load_model_state, model_state
from .checks import check_run, check_settings, complete, schedule_warning
from .files import Measurement, Provenance, Result
from .flops import count_update_flops
from .folder import RunFolder, check_unchanged, extend
from .learner import Evaluation, Learner
from .progress import RUN_NUMBER, NoProgress, progress
from .recipe import Recipe
from .recipe_files import read_recipe
from .scored_batches import control_segments, scored_batches, scored_segments
from .stopping import calling
from .weights import Start, average, final_weights, trained_model

if TYPE_CHECKING:
    from lightning_fabric import Fabric

EvaluationHook = Callable[[nn.Module, int], JSONObject | None]
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}  # errors of a disk that is full or fails


class Run:
    """A recipe in training. `open` makes it; it is used once."""

    learner: Learner  # the model in training, with its optimiser; only while there is something to train
    dense: dense_layer.Choice  # of the run's first process, on all of them

    def __init__(self, recipe: Recipe, task: Task, path: Path, fabric: Fabric, model: nn.Module | None, quiet: bool):
        self.recipe, self.task, self.path, self.fabric, self.quiet = recipe, task, path, fabric, quiet
        self.model = model  # None before a finished run is assessed
        self.given = model is not None
        self.first = fabric.is_global_zero  # the process that writes the folder
        self.files: RunFolder | None = None  # the folder, locked for this run; None on all other processes
        self.result: Result | None = None  # None until the run is trained
        self.saved = 0  # the step of the last checkpoint
        self.ended = False  # the checkpoint is the last one of a run that is now trained for longer
        self.display = NoProgress()
        self._asked_to_stop = False
        self._first: object = None

    @classmethod
    def open(
        cls,
        recipe: Recipe | None,
        folder: str | Path,
        resume: bool = False,
        *,
        steps: int | None = None,
        task: Task | None = None,
        model: nn.Module | None = None,
        quiet: bool = False,
    ) -> Run:
        """Open a recipe's run in a new or empty folder, or continue the run of a folder; everything is checked before
        it exists.

        recipe: None to resume with the run's own. resume: continue from the newest intact checkpoint; a finished run
        has its `result`, and its weights are loaded into a given `model`. steps: train up to this number of steps, also
        if the run is finished (`folder.extend`). task: the recipe's data if they are open already. model: one to train
        in place instead of building the recipe's.

        With several devices and without torchrun, the other processes run this program from its start. Raises
        InputError if recipe, data, machine or folder do not fit, and TrainingFailed if the system refuses.
        """
        recipe = read_recipe(Path(folder)) if recipe is None else recipe
        if steps is not None:
            recipe = replace(recipe, train=replace(recipe.train, steps=steps))
        fabric = devices.connect(recipe.train, folder if resume else None)
        path = Path(fabric.broadcast(str(folder)))  # a name with the time of day differs between processes
        check_settings(recipe, fabric.world_size)
        dense_layer.choice()  # a wrong MNEMOS_DENSE is refused before there is a folder
        with devices.threads(recipe.train.threads):
            run = cls(recipe, recipe.data.build() if task is None else task, path, fabric, model, quiet)
            with run._closed_on_error():
                run._open(resume, steps is not None)
        return run

    def _open(self, resume: bool, longer: bool) -> None:
        self.recipe = recipe = complete(self.recipe, self.task)
        model = check_run(recipe, self.task, self.model, self.fabric.world_size)
        start = None
        if recipe.train.init_from is not None and not checkpoint.steps(self.path / "checkpoints"):
            start = Start.of(recipe.train.init_from, model, self.task.preprocessing())
        saved = self._open_folder(resume, longer, start.source if start else None)
        if self.result is not None:
            if self.model is not None:
                load_model_state(self.model, final_weights(self.path))
            self.close()
            return
        number = RUN_NUMBER.get()
        if self.files is not None and (not self.quiet if number is None else number.first):
            for line in self.task.about:
                say(f"{recipe.name if number is None else 'data'}: {line}", flush=True)
        if self.files is not None and start is not None and (not self.quiet if number is None else number.new):
            say(f"{recipe.name}: {start.about}", flush=True)
        self.learner = Learner(self.fabric, recipe, self.task, self.model)
        self.model = self.learner.model
        if saved is not None:
            self.learner.restore(saved)
            self.ended = self.step == saved["recipe"]["train"]["steps"]
        elif start is not None:
            start.load(self.model)
        self.saved, self._generators = self.step, generators.take()
        if self.files is not None and not self.quiet and (warning := schedule_warning(recipe)):
            say(f"{recipe.name}: warning: {warning}", file=sys.stderr)

    def _open_folder(self, resume: bool, longer: bool, weights: JSONObject | None) -> JSONObject | None:
        """Set `files` and `result`; returns the checkpoint to go on from. All processes raise the first one's error."""
        saved, step, dense = None, 0, {}
        error: Exception | None = None
        if self.first:
            try:
                if resume:  # before anything in the folder changes
                    check_unchanged(self.path, self.recipe.data, longer)
                if longer:
                    extend(self.path, self.recipe)
                if resume:
                    self.files = RunFolder.resume(self.path, self.recipe)
                    self.result = Result.read(self.path) if Result.exists(self.path) else None
                    if self.result is None:
                        step, saved = self.files.newest(weights)
                else:
                    gpu = self.fabric.device.type == "cuda"
                    device = torch.cuda.get_device_name(self.fabric.device) if gpu else self.fabric.device.type
                    self.files = RunFolder.start(self.path, self.recipe, device, weights, self.task.about)
                dense = Provenance.read(self.path).dense if Provenance.exists(self.path) else {}
            except InputError as problem:
                error = problem
            except (OSError, TrainingFailed) as problem:
                error = TrainingFailed(one_line(problem) or str(problem))
        error, step, self.result, dense = self.fabric.broadcast((error, step, self.result, dense))
        if error is not None:
            raise error
        self.dense = dense_layer.Choice.from_json(dense)
        if step and saved is None:
            saved = checkpoint.read(checkpoint.path_of(self.path / "checkpoints", step))
        return saved

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the run if the block raises; what the system refuses becomes TrainingFailed."""
        try:
            yield
        except BaseException as error:
            before_updates = isinstance(error, Exception) and not ("learner" in vars(self) and self.step)
            disk = {getattr(one, "errno", None) for one in (error, error.__cause__)} & _OF_THE_DISK
            before_updates = before_updates and not disk  # with more room it may be resumed
            if self.files is not None and (out_of_memory(error) or before_updates):
                self.files.discard()  # without a checkpoint, so that a corrected call may name the same folder
            self.close()
            line = one_line(error) if isinstance(error, RuntimeError | MemoryError | OSError) else None
            if line is None:
                raise
            raise TrainingFailed(line) from error

    def close(self) -> None:
        self.task.close()
        if self.files is not None:
            self.files.close()

    @property
    def step(self) -> int:
        return self.learner.count.step

    def train(self, on_evaluation: EvaluationHook | None = None, count_flops: bool = True) -> Result:
        """Train to the last step and return the result, which is in the folder then; of a finished run, what it has.

        on_evaluation(model, step): called on the first process after each evaluation; the dict that it returns becomes
        a line of kind "gates". With several processes it must not run the model. count_flops: count those of an update
        at the end, which reads more batches.

        Raises InputError for data that do not fit, TrainingFailed if a loss or gradient is not finite (the last
        checkpoint stays as it is), and Interrupted after SIGINT or SIGTERM, with a checkpoint saved.
        """
        if self.result is not None:
            return self.result
        shown = progress(self.quiet or self.files is None, self.recipe.name, self.recipe.train.steps, self.step)
        threads = devices.threads(self.recipe.train.threads)
        dense = dense_layer.using(self.dense)
        with threads, dense, self._closed_on_error(), calling(self._stop), shown as self.display:
            generators.put(self._generators)  # whatever was drawn since the run was opened
            try:
                loop.train(self, on_evaluation or self.gates)
                self.result = self._finish(count_flops)
            except _StopRequestedError:
                if self.saved != self.step or not self.step:
                    self.save()
                if self.files is None:
                    raise Interrupted(f"interrupted after update {self.step}") from None
                raise Interrupted(
                    f"{self.path}: interrupted; a checkpoint is saved after update {self.step}; continue with: "
                    f"{self.recipe.to_continue(self.path)}"
                ) from None
            except TrainingFailed as error:
                last = f"the last checkpoint is of update {self.saved}" if self.saved else "there is no checkpoint yet"
                raise TrainingFailed(f"{error} ({last})") from error
        self.close()
        del self.learner  # the optimiser's memory
        return self.result

    def assess(self) -> Result:
        """Measure the model of a trained run, and return the complete result, which is in the folder then.

        Adds FLOPs, the bytes of the state, the controls of gated caches and the task's artifacts; writes RUN/model and
        what the report explains it by. Of several processes only the first does it, alone: no process may train
        afterwards.
        """
        devices.part()
        assert self.result is not None, "train() comes first"
        if not self.result.assessed and self.first:
            with dense_layer.using(self.dense):
                self.result = self._assess(self.result)
        return self.result

    def _assess(self, result: Result) -> Result:
        recipe, task, folder, length = self.recipe, self.task, self.path, self.recipe.train.rollout.segment_length
        split = result.split

        # --- the model as training left it; from its checkpoint where it is not here, or in shards or other types ---
        elsewhere = recipe.train.strategy == "fsdp" or recipe.train.precision in ("bf16-true", "64-true")
        if self.model is None or (elsewhere and not self.given):
            self.model = trained_model(folder, recipe)
        model = self.model if self.given else self.model.cpu().eval()

        # --- its costs, and what its caches are worth ---
        model.train()
        with hold_caches(model):
            flops = task_flops(model, task, task.example(), length)
        model.eval()
        state = task_state_bytes(model, task, task.example(), length)
        names = control_names(model)
        with progress(self.quiet, recipe.name, 0, 0) as display:
            if names:
                display.message(f"{recipe.name}: scoring the {split} split with the caches {', '.join(names)}")
            batches = partial(scored_segments, task, split, recipe.train, display)
            # In the precision of the score that they are compared with; weights of another type are float32 here.
            kind, _, mixed = recipe.train.precision.partition("-")
            half = torch.float16 if kind == "16" else torch.bfloat16
            device = next(model.parameters()).device.type  # no longer the run's, if that is a GPU
            with torch.autocast(device, half, enabled=mixed == "mixed"):
                scores = controls(model, batches, task)

        # --- files: the model, what the task shows, what the report explains ---
        if isinstance(getattr(model, "config", None), ModelConfig):
            save(model, folder / RUN_MODEL)
            if (about := task.preprocessing()) is not None:
                write_json(folder / RUN_MODEL / PREPROCESSING, to_dict(about))
        with progress(self.quiet, recipe.name, 0, 0) as display:
            artifacts = task.scored_artifacts(model, folder, split, scored_batches(task, split, recipe.train, display))
            if names or getattr(model, "state_kind", None):
                display.message(f"{recipe.name}: measuring what the memory holds, for the report")
        result = replace(result, flops=flops, state_bytes=state, controls=scores, artifacts=artifacts)
        result.write(folder)
        explain(model, task, folder, length, control_segments(recipe.train))
        return result

    def gates(self, model: nn.Module, step: int) -> JSONObject | None:
        """What the gates and caches of a model do (`measure_gates`); None without a cache or with several processes."""
        if self.recipe.train.processes > 1 or not caches(model):
            return None
        if self._first is None:  # batch of the validation split
            self._first = next(scored_segments(self.task, "valid", self.recipe.train, NoProgress()))
        return measure_gates(model, self._first, self.task)

    def record(self, lines: list[Measurement]) -> None:
        if self.files is not None:
            self.files.record(lines)

    def save(self) -> None:
        snapshot = self.learner.snapshot()  # collective: every process calls it
        if self.files is not None:
            self.files.save(self.step, snapshot)
        self.saved = self.step

    def save_best(self) -> None:
        weights = model_state(self.learner.model)  # collective
        if self.files is not None:
            self.files.save_best(self.step, {"step": self.step, "model": weights})

    def scores(self, split: HeldOut) -> Evaluation:
        """Score the rows of a split that the run scores; each process reads its share of every batch."""
        rank, world, rows = self.fabric.global_rank, self.fabric.world_size, 0

        def shares() -> Iterator[object]:
            nonlocal rows
            for i, batch in enumerate(scored_batches(self.task, split, self.recipe.train, self.display)):
                self.check_signals()
                self.task.check(batch, f"{split} batch {i}")
                count = row_count(batch)
                rows += count
                # Every process must call the model. One without rows runs a row that another process counts.
                span = slice(count * rank // world, count * (rank + 1) // world)
                counted_here = span.start < span.stop
                share = each(batch, lambda x, span=span if counted_here else slice(1): x[span])  # type: ignore[misc]
                for part in self.task.segments(share, self.recipe.train.rollout.segment_length):
                    yield part if counted_here else CountedElsewhere(part)

        def total(sums: torch.Tensor) -> torch.Tensor:
            device = self.fabric.device
            return self.fabric.all_reduce(sums.to(device), reduce_op="sum").cpu()  # type: ignore[union-attr]

        def gather(value: object) -> list[object]:
            return devices.gather(self.fabric, value)

        with generators.preserve(), self.fabric.autocast():
            found = evaluate(self.learner.model, shares(), self.task, total if world > 1 else None, gather)
        targets = int(found.pop("count"))
        return Evaluation(self.step, found, rows, targets)

    def _stop(self) -> None:
        """Let the update that is running be completed first; a second Ctrl-C ends the program at once."""
        first, self._asked_to_stop = not self._asked_to_stop, True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if first and not self.quiet and self.files is not None:
            with contextlib.suppress(OSError):  # Ctrl-C has ended the reader of a pipe too
                # Not by `print`, inside which the signal may have come.
                os.write(2, b"\nstopping as soon as a checkpoint can be saved; the next Ctrl-C ends at once\n")

    def check_signals(self) -> None:
        if devices.any_of(self.fabric, self._asked_to_stop):
            raise _StopRequestedError

    def _finish(self, count_flops: bool) -> Result:
        learner, count = self.learner, self.learner.count
        epoch = self.task.epoch(self.recipe.train.batch_size)
        flops = count_update_flops(learner) if count_flops else None
        config, folder, valid = self.recipe.train, self.path / "checkpoints", learner.evaluation
        averaged: list[int] = []

        # --- the run's model: the weights of the best evaluation, a mean of checkpoints, the last ---
        if config.keep_best or config.average:
            self.fabric.barrier()  # the first process may still be writing the files
        if config.keep_best and learner.best.step:
            best = checkpoint.path_of(folder, learner.best.step, "best")
            load_model_state(learner.model, checkpoint.read(best)["model"])
        if config.average:
            mean, averaged = average(folder, config.average, learner.model, config.checkpoint_every)
            load_model_state(learner.model, mean)
            weights = model_state(learner.model)  # collective; they are not those of the last checkpoint
            if self.files is not None:
                self.files.save_average(self.step, {"step": self.step, "steps": averaged, "model": weights})
            valid = self.scores("valid")

        reference, of_rows = dict(self.task.reference), isinstance(self.task.metrics[0], CorpusMetric)
        test = self.scores("test") if self.task.has_test else None
        scored = {"valid": valid} | ({"test": test} if test else {})
        result = Result(
            recipe=self.recipe.name,
            seed=config.seed,
            steps=count.step,
            test=test.scores if test else None,
            valid=learner.best.valid if config.keep_best and learner.best.step else valid.scores,
            scored_rows={split: one.rows for split, one in scored.items()},
            scored_targets={} if of_rows else {split: one.targets for split, one in scored.items()},
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
            best_step=learner.best.step if config.keep_best else 0,
            averaged_steps=averaged,
            stopped_early=count.step < config.steps,
        )
        return result if self.files is None else self.files.finish(result)


class _StopRequestedError(Exception): ...
