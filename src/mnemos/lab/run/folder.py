"""The folder of a run, as docs/run-folder.md has it. result.json is written last: a run that has it is finished."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

from mnemos.atomic import (
    append,
    check_output_folder,
    is_temporary,
    open_to_append,
    remove_temporary,
    write_json,
    write_text,
)
from mnemos.config import from_dict, to_dict
from mnemos.errors import say
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, JSONObject

from . import checkpoint
from .files import Measurement, Provenance, Result, read_object
from .provenance import changed_since, check_data, command_line, data_read, made_with, now, provenance
from .recipe import OWN, OptimConfig, Recipe, as_json, as_written, differing
from .sinks import Sink, open_sink

_OURS = {"run.json", "metrics.jsonl", "checkpoints"}


class RunFolder:
    """A run's folder, locked for one writer. `start` makes a new one; `resume` opens an existing one."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
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
            about_run = provenance(recipe.train.seed, device, recipe.data)
            Provenance(**about_run, weights=weights or {}, warnings=warnings).write(folder)
            write_text(folder / Measurement.FILE, "")
            write_json(folder / "recipe.json", to_dict(recipe))  # last: a folder with a recipe is a run
        return run

    @classmethod
    def resume(cls, folder: str | Path, recipe: Recipe) -> "RunFolder":
        """Open an existing run. Raises InputError if there is none, its recipe differs, or it is in use."""
        folder = Path(folder)
        if not (folder / "recipe.json").is_file():
            raise InputError(f"{folder}: expected a run to resume, found no recipe.json; start it anew")
        refuse_other(folder, read_object(folder / "recipe.json"), recipe)
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

    # --- going on from a checkpoint ---

    def newest(self, weights: JSONObject | None = None) -> tuple[int, JSONObject | None]:
        """Read the checkpoint to continue from, and remove what was written after it: (step, checkpoint or None).

        Records in run.json that the run continues, and prints what has changed since. weights: `Start.source` of a run
        without a checkpoint, which starts again from another run's weights as they are now.
        """
        newest = checkpoint.newest(self.checkpoints)
        step, saved, notes = newest or (0, None, ["no checkpoint yet: the run starts again from its first update"])
        for later in checkpoint.steps(self.checkpoints, "best"):  # the run evaluates after its best once more
            if later > (saved["best"]["step"] if saved else 0):
                checkpoint.path_of(self.checkpoints, later, "best").unlink(missing_ok=True)
        about, today = Provenance.read(self.folder), made_with()
        entry = {
            "step": step,
            "at": now(),
            "commit": today["commit"],
            "dirty": today["dirty"],
            "command": command_line(),
        }
        entry |= {name: today[name] for name in ("source_sha256", "versions") if today[name] != about.latest(name)}
        if weights is not None and weights["sha256"] != (about.latest("weights") or {}).get("sha256"):
            entry["weights"] = weights
            notes.append(f"the weights of {weights['run']} have changed since the start; the run has the new ones")
        replace(about, resumed=[*about.resumed, entry]).write(self.folder)
        self.trim(step, saved["evaluation"]["step"] if saved else 0)
        for note in [*notes, *changed_since(about, today)]:
            say(note, file=sys.stderr)
        return step, saved

    def trim(self, step: int, evaluated: int = 0) -> None:
        """Remove the lines of metrics.jsonl that were written after the checkpoint of `step`; the run repeats them.

        A checkpoint is saved after the training line of its step and before the evaluation at that step. evaluated: the
        step of the last evaluation that it knows; 0: none.
        """
        kept = [
            one.to_line()
            for one in Measurement.read_all(self.folder)
            if one.step < step or (one.step == step > 0 and (one.kind == "train" or step == evaluated))
        ]
        write_text(self.folder / Measurement.FILE, "".join(kept))
        self._trimmed = step

    # --- writing ---

    def record(self, lines: Sequence[Measurement]) -> None:
        """Append lines to metrics.jsonl, whole or not at all, then send them where `TrainConfig.log` says.

        Raises TrainingFailed if the disk is full or refuses; the file then ends with the lines before.
        """
        if self._metrics is None:
            if self._recipe.train.log != "none":
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
        first = next(Measurement.read_all(self.folder), None)
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


def refuse_other(folder: Path, saved: JSONObject, recipe: Recipe) -> None:
    """Raise InputError if the recipe that a run has saved is another one."""
    if difference := differing(as_written(saved), as_json(recipe)):
        raise InputError(f"{folder}: the run has another {difference}; resume it with its own settings")


def extend(folder: Path, longer: Recipe) -> None:
    """Change the number of steps of a run, finished or not, so that resuming it with `longer` trains up to its steps.

    Checkpoints of updates whose rate would have been another (`ScheduleConfig.last_constant`) and the result are
    removed. Raises InputError, and changes nothing, for a number that the run has reached already, for a run that
    stopped early, and for a recipe that differs in more than the steps.
    """
    recipe, steps = read_object(folder / "recipe.json", {"train": dict, "optim": dict}), longer.train.steps
    lock = _lock(folder)
    try:
        done = next(iter(checkpoint.steps(folder / "checkpoints")), 0)
        result = Result.read(folder) if Result.exists(folder) else None
        if result is not None and result.stopped_early:
            own = longer.model.name == OWN
            how = "fit(...) with this model in another folder" if own else f"--from {folder}"
            raise InputError(
                f"{folder}: expected a run that trained all its steps, found one that stopped early; start another "
                f"with its weights by {how}"
            )
        if steps < done or (result is not None and steps == done):
            raise InputError(f"train.steps: expected more than {done:,}, which {folder} has trained, found {steps:,}")
        extended = recipe | {"train": recipe["train"] | {"steps": steps}}
        refuse_other(folder, extended, longer)
        schedule = from_dict(OptimConfig, recipe["optim"]).schedule
        constant = min(schedule.last_constant(n) for n in (steps, recipe["train"]["steps"]))
        for step in checkpoint.steps(folder / "checkpoints") if schedule.name == "trapezoid" else ():
            if step > constant:
                checkpoint.path_of(folder / "checkpoints", step).unlink(missing_ok=True)
        (folder / Result.FILE).unlink(missing_ok=True)
        write_json(folder / "recipe.json", extended)
    finally:
        if lock is not None:
            os.close(lock)


def check_unchanged(folder: Path, data: DataConfig, longer: bool = False) -> None:
    """Raise InputError if a run would go on with other data than it has read so far; longer: a finished run goes on."""
    if Provenance.exists(folder) and (longer or not Result.exists(folder) or not Result.read(folder).assessed):
        check_data(str(folder), Provenance.read(folder).latest("data"), data_read(data))


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
