"""The folder of a run, as docs/run-folder.md has it. result.json is written last: a run that has it is finished."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

import torch

from mnemos.atomic import (
    append,
    check_output_folder,
    is_temporary,
    open_to_append,
    parse,
    read_bytes,
    remove_temporary,
    write_bytes,
    write_json,
)
from mnemos.config import from_dict, to_dict
from mnemos.errors import say
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import JSON, InputError, JSONObject

from . import checkpoint
from .files import Measurement, Provenance, Result, read_object
from .provenance import (
    changes,
    check_data,
    command_line,
    data_read,
    now,
    provenance,
    source,
    source_hash,
    versions,
)
from .recipe import OptimConfig, Recipe, as_json, as_written, differing
from .sinks import Sink, open_sink

_OURS = {"run.json", "metrics.jsonl", "checkpoints"}


class RunFolder:
    """A run's folder, locked for one writer. `start` makes a new one; `resume` opens an existing one."""

    def __init__(self, folder: Path, recipe: Recipe | None = None) -> None:
        self.folder, self._recipe = folder, recipe
        self.checkpoints = folder / "checkpoints"
        self._lock = _lock(folder)
        self._metrics: FileIO | None = None
        self._trimmed = 0  # the step after which the run continues
        self._sink: Sink | None = None
        self._new = False

    @classmethod
    def start(
        cls,
        folder: str | Path,
        recipe: Recipe,
        device: str,
        weights: JSONObject | None = None,
        about: Sequence[str] = (),
    ) -> "RunFolder":
        """Start a run in a new or empty folder. Raises InputError for any other folder, and deletes nothing in it.

        weights: `Start.source` of the run that the weights are taken from. about: the task's lines, whose warnings
        run.json has.
        """
        folder = Path(folder)
        check_output_folder(folder)
        if (folder / "recipe.json").exists():
            raise InputError(
                f"{folder}: expected a new or empty folder, found a run; name another folder, or continue it "
                f"with: {recipe.to_continue(folder)}"
            )
        # A start that was killed before it wrote the recipe leaves files of ours.
        inside = [p for p in folder.iterdir() if not is_temporary(p)] if folder.is_dir() else []
        if foreign := sorted(p.name for p in inside if p.name not in _OURS):
            raise InputError(f"{folder}: expected a new or empty folder, found {foreign[0]!r} in it; name another")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        run = cls(folder, recipe)
        with run._unlocked_on_error():
            remove_temporary(folder)
            run._new = True
            warnings = [line.removeprefix("warning: ") for line in about if line.startswith("warning: ")]
            made_with = provenance(recipe.train.seed, device, recipe.data)
            Provenance(**made_with, weights=weights or {}, warnings=warnings).write(folder)
            write_json(folder / "recipe.json", to_dict(recipe))
            run.trim(0)
        return run

    @classmethod
    def resume(cls, folder: str | Path, recipe: Recipe) -> "RunFolder":
        """Open an existing run. Raises InputError if there is none, its recipe differs, or it is in use."""
        folder = Path(folder)
        if not (folder / "recipe.json").is_file():
            raise InputError(f"{folder}: expected a run to resume, found no recipe.json; start it anew")
        if difference := differing(as_written(read_object(folder / "recipe.json")), as_json(recipe)):
            raise InputError(f"{folder}: the run has another {difference}; resume it with its own settings")
        run = cls(folder, recipe)
        with run._unlocked_on_error():
            run.checkpoints.mkdir(exist_ok=True)
            remove_temporary(folder)
            remove_temporary(run.checkpoints)
        return run

    @contextlib.contextmanager
    def _unlocked_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    @property
    def result(self) -> Result | None:
        return Result.read(self.folder) if Result.exists(self.folder) else None

    # --- going on from a checkpoint ---

    def newest(
        self, weights: JSONObject | None = None, accept_changed_data: bool = False
    ) -> tuple[int, JSONObject | None]:
        """Read the checkpoint to continue from, and remove what was written after it: (step, checkpoint or None).

        Prints what has changed since and what is lost. Raises InputError for a checkpoint of another run, and as
        `resumed`.
        """
        assert self._recipe is not None
        newest = checkpoint.newest(self.checkpoints)
        step, saved, notes = newest or (0, None, ["no checkpoint yet: the run starts again from its first update"])
        if saved is not None:
            path = checkpoint.path_of(self.checkpoints, step)
            checkpoint.weights(path, saved)  # there are any
            counters = saved.get("counters")
            if not isinstance(counters, dict) or counters.get("step") != step:
                raise InputError(
                    f"{path}: expected a checkpoint of update {step}, found one of another update; give the file back "
                    "its name, or remove it"
                )
            if _but_steps(as_written(saved.get("recipe"))) != _but_steps(as_json(self._recipe)):
                raise InputError(f"{path}: expected this recipe's checkpoint, found one of another recipe; remove it")
        if self._recipe.train.keep_best:
            self._return_to_best(saved.get("best", {}).get("step", 0) if saved else 0)
        notes += self.resumed(step, self._recipe.data, weights, accept_changed_data)
        notes += self.trim(step, (saved or {}).get("evaluation", {}).get("step", 0))
        for note in notes:
            say(note, file=sys.stderr)
        return step, saved

    def resumed(
        self, step: int, data: DataConfig, weights: JSONObject | None = None, accept_changed_data: bool = False
    ) -> list[str]:
        """Record in run.json that the run continues after `step`; returns a warning for each of data, code, libraries,
        weights and threads that changed.

        weights: `Start.source` of a run that had no checkpoint and starts again from another run's weights. Raises
        InputError for changed data, unless these are accepted.
        """
        about, notes = Provenance.read(self.folder), []
        made_with = {**source(), "source_sha256": source_hash(), "versions": versions()}
        before = {name: about.latest(name) for name in made_with}
        entry = {"step": step, "at": now(), **source(), "command": command_line()}
        files = data_read(data)
        try:
            check_data(str(self.folder), about.latest("data"), files)
        except InputError as error:
            if not accept_changed_data:
                raise
            entry["data"] = files
            notes.append(f"{str(error).rpartition('; ')[0]}; the results are not those of a run on either")
        notes += changes(before, made_with)
        if weights is not None and weights["sha256"] != (about.latest("weights") or {}).get("sha256"):
            entry["weights"] = weights
            notes.append(f"the weights of {weights['run']} have changed since the start; the run has the new ones")
        entry |= {name: made_with[name] for name in ("source_sha256", "versions") if made_with[name] != before[name]}
        replace(about, resumed=[*about.resumed, entry]).write(self.folder)
        threads = torch.get_num_threads()
        if about.threads not in (None, threads):
            notes.append(
                f"the run was started with {about.threads} threads and continues with {threads}, which may give other "
                f"numbers; set OMP_NUM_THREADS={about.threads} to continue exactly"
            )
        return notes

    def trim(self, step: int, evaluated: int = 0) -> list[str]:
        """Remove the lines of metrics.jsonl that were written after the checkpoint of `step`; the run repeats them.

        A checkpoint is saved after the training line of its step and before the evaluation at that step. evaluated: the
        step of the last evaluation that it knows; 0: none. Raises InputError for a line that is not a measurement,
        except for an incomplete last line. Returns a warning if lines of training up to `step` are missing.
        """
        path = self.folder / Measurement.FILE
        existed = path.exists()
        lines = read_bytes(path).splitlines(keepends=True) if existed else []
        left, trained = [], 0  # trained: the last update with a line
        for i, line in enumerate(lines, 1):
            try:
                entry = Measurement.from_json(parse(line.decode()))
            except (ValueError, AttributeError):  # InputError is a ValueError
                if i < len(lines):
                    problem = f"line {i}: expected a measurement, found {line[:40]!r}"
                    raise InputError(f"{path}: {problem}; remove this line") from None
                continue
            known = entry.step < step or entry.kind == "train" or 0 < step == evaluated
            if entry.step <= step and known and line.endswith(b"\n"):
                left.append(line)
                trained = entry.step if entry.kind == "train" else trained
        write_bytes(path, b"".join(left))
        self._trimmed = step
        every = self._recipe.train.log_every if self._recipe is not None else 1
        if trained >= step - step % every:
            return []
        state = f"the last of update {trained}" if lines else "an empty file" if existed else "no such file"
        return [f"{path}: expected the measurements up to update {step}, found {state}: those in between are lost"]

    def _return_to_best(self, step: int) -> None:
        """Make `step` the best evaluation again (0: none): the run evaluates after it again."""
        for later in checkpoint.steps(self.checkpoints, "best"):
            if later > step:
                checkpoint.path_of(self.checkpoints, later, "best").unlink(missing_ok=True)
        if step:
            try:
                checkpoint.read(checkpoint.path_of(self.checkpoints, step, "best"))
            except InputError as error:
                problem = str(error).rpartition("; ")[0]
                raise InputError(f"{problem}; put the file back, or start another from this one with --from") from None

    # --- writing ---

    def record(self, lines: Sequence[Measurement]) -> None:
        """Append lines to metrics.jsonl, whole or not at all, then send them where `TrainConfig.log` says.

        Raises TrainingFailed if the disk is full or refuses; the file then ends with the lines before.
        """
        if self._metrics is None:
            if self._recipe is not None and self._recipe.train.log != "none":
                self._sink = open_sink(self._recipe.train.log, self.folder, self._trimmed)
            self._metrics = open_to_append(self.folder / Measurement.FILE)
        with self._writing_metrics():
            append(self._metrics.fileno(), "".join(line.to_line() for line in lines).encode())
        if self._sink is not None:
            self._sink.write(lines)

    @contextlib.contextmanager
    def _writing_metrics(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingFailed(
                f"{self.folder / Measurement.FILE}: the measurements could not be written ({error.strerror or error}); "
                "free disk space, then resume the run"
            ) from error

    def save(self, step: int, value: JSONObject) -> None:
        """Write a checkpoint, and then delete others as `checkpoint.prune` does. Raises TrainingFailed as `record`."""
        assert self._recipe is not None
        train, schedule = self._recipe.train, self._recipe.optim.schedule
        if self._metrics is not None:
            with self._writing_metrics():
                os.fsync(self._metrics.fileno())
        checkpoint.write(checkpoint.path_of(self.checkpoints, step), value)
        constant = schedule.last_constant(train.steps) if schedule.name == "trapezoid" else None
        checkpoint.prune(self.checkpoints, step, max(train.keep, train.average), train.checkpoint_every, constant)
        checkpoint.prune_best(self.checkpoints)

    def save_best(self, step: int, value: object) -> None:
        checkpoint.write(checkpoint.path_of(self.checkpoints, step, "best"), value)
        checkpoint.prune_best(self.checkpoints)

    def save_average(self, step: int, value: object) -> None:
        """Write the averaged weights of a run that ends after `step` updates, and then delete those of earlier ends."""
        checkpoint.write(checkpoint.path_of(self.checkpoints, step, "averaged"), value)
        for other in checkpoint.steps(self.checkpoints, "averaged"):
            if other != step:
                checkpoint.path_of(self.checkpoints, other, "averaged").unlink(missing_ok=True)

    def finish(self, result: Result) -> Result:
        """Write the time of the end to run.json, and then result.json, with the scores before the first update."""
        replace(Provenance.read(self.folder), finished=now()).write(self.folder)
        # The file may have been removed meanwhile; `trim` says what is lost.
        lines = Measurement.read_all(self.folder) if (self.folder / Measurement.FILE).is_file() else iter(())
        first = next(lines, None)
        if first is not None and first.kind == "valid" and not first.step:
            before = {name: value for name, value in first.values.items() if name != "seconds"}
            result = replace(result, before=before)
        result.write(self.folder)
        return result

    def discard(self) -> None:
        """Close a run that was started here and has no checkpoint, and remove its files and its folder."""
        self.close()
        if not self._new or checkpoint.steps(self.checkpoints):
            return
        for name in ("recipe.json", "run.json", "metrics.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / "tensorboard", ignore_errors=True)
        for folder in (self.checkpoints, self.folder):
            with contextlib.suppress(OSError):  # a folder that holds something else stays
                folder.rmdir()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)
        self._metrics = self._lock = self._sink = None


def extend(folder: Path, steps: int) -> None:
    """Change the number of steps of a run, finished or not, so that resuming it trains up to `steps`.

    Checkpoints of updates whose rate would have been another (`ScheduleConfig.last_constant`) and the result are
    removed. Raises InputError for a number that the run has reached already, and for a run that stopped early.
    """
    recipe = read_object(folder / "recipe.json", {"train": dict, "optim": dict})
    done = next(iter(checkpoint.steps(folder / "checkpoints")), 0)
    run = RunFolder(folder)
    try:
        result = run.result
        if result is not None and result.stopped_early:
            raise InputError(
                f"{folder}: expected a run that trained all its steps, found one that stopped early; start another "
                f"from it with --from {folder}"
            )
        if steps < done or (result is not None and steps == done):
            raise InputError(f"train.steps: expected more than {done:,}, which {folder} has trained, found {steps:,}")
        schedule = from_dict(OptimConfig, recipe["optim"]).schedule
        constant = min(schedule.last_constant(n) for n in (steps, recipe["train"].get("steps") or steps))
        for step in checkpoint.steps(folder / "checkpoints") if schedule.name == "trapezoid" else ():
            if step > constant:
                checkpoint.path_of(folder / "checkpoints", step).unlink(missing_ok=True)
        (folder / Result.FILE).unlink(missing_ok=True)
        write_json(folder / "recipe.json", recipe | {"train": recipe["train"] | {"steps": steps}})
    finally:
        run.close()


def check_unchanged(folder: Path, data: DataConfig, longer: bool = False) -> None:
    """Raise InputError if a run would go on with other data than it has read so far; longer: a finished run goes on."""
    if Provenance.exists(folder) and (longer or not Result.exists(folder) or not Result.read(folder).assessed):
        check_data(str(folder), Provenance.read(folder).latest("data"), data_read(data))


def _but_steps(recipe: JSON) -> JSON:
    train = recipe.get("train") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(train, dict):
        return recipe
    return {**recipe, "train": {name: value for name, value in train.items() if name != "steps"}}


def _lock(folder: Path) -> int | None:
    """Lock the folder. The system releases the lock when the descriptor is closed or the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(f"{folder}: another process is training in it; wait for it, or name another folder") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor
