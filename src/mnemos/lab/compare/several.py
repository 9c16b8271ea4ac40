"""Several runs, each in a process of its own, a number of them at a time."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from mnemos.errors import Interrupted, TrainingFailed
from mnemos.lab.run.progress import PLACE
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.run_files import read_result
from mnemos.lab.run.stopping import raising

from .apart import finished, train_apart
from .runs_left import RunsLeft

Planned = tuple[Recipe, Path]  # a recipe and the folder of its run


def train_several(
    runs: Sequence[Planned],
    jobs: int = 1,
    *,
    quiet: bool = True,
    tell: bool = True,
    keep_going: bool = False,
    left: RunsLeft | None = None,
) -> None:
    """Train runs in their folders, `jobs` at a time; finished ones are left as they are (`train_apart`).

    quiet: the runs print nothing. tell: print a line for each run that ends now: its score on the validation split, its
    seconds, and how many runs and about how much time are left. left: counts these runs together with others; by
    default alone. keep_going: a run that fails is reported and left out; otherwise the first failure stops all runs,
    which save a checkpoint, and raises TrainingFailed. Raises InputError and `Interrupted` as `train_apart`; after a
    signal all runs have ended and saved, and one line names the folder of them all.
    """
    left = left or RunsLeft([recipe.name for recipe, _ in runs], jobs)
    stopped = threading.Event()
    if jobs == 1:
        for recipe, place in runs:  # in the main thread, which passes signals on
            _train(recipe, place, quiet, tell, keep_going, left, stopped)
        return

    def job(recipe: Recipe, place: Path) -> None:
        """Train a run, unless another one has stopped all."""
        if stopped.is_set():
            return
        try:
            _train(recipe, place, quiet, tell, keep_going, left, stopped)
        except BaseException:
            stopped.set()  # here and not by the thread that waits, which may be late
            raise

    if not runs:
        return
    folder = os.path.commonpath([place for _, place in runs])
    interrupted = Interrupted(f"{folder}: interrupted; the same command continues from the last checkpoints")
    with raising(interrupted), ThreadPoolExecutor(jobs) as pool:
        waiting: list[Future[None]] = [pool.submit(job, *run) for run in runs]
        try:
            for future in as_completed(waiting):
                future.result()
        except BaseException:
            stopped.set()
            while True:
                for child in multiprocessing.active_children():
                    child.terminate()  # a run that is told to end saves a checkpoint
                if not wait(waiting, timeout=1).not_done:  # else a thread may have started a run just now
                    break
            raise


def _train(
    recipe: Recipe, place: Path, quiet: bool, tell: bool, keep_going: bool, left: RunsLeft, stopped: threading.Event
) -> None:
    """Train a run and print its line. A run that was finished before is counted and not printed."""
    began = None if finished(place) else left.now()
    among = PLACE.set(left.started(recipe.name) if tell and began is not None else None)
    try:
        train_apart(recipe, place, quiet)
    except TrainingFailed as error:
        if not keep_going or stopped.is_set():  # a child that is stopped while it starts has not failed
            raise
        print(f"  {error} ({left.done(recipe.name, began)})", flush=True)
        return
    finally:
        PLACE.reset(among)
    ended = left.done(recipe.name, began)
    if tell and began is not None:
        result = read_result(place)
        value = result["valid"][result["metric"]]
        score = f"validation {result['metric']} {'none' if value is None else format(value, '.4g')}"
        if (before := result.get("before", {}).get(result["metric"])) is not None:
            score += f" ({before:.4g} before training)"
        where = f"{recipe.name} at learning rate {recipe.optim.lr:.1e}, seed {recipe.train.seed}"
        print(f"  {where}: {score}, {result['seconds']:.0f} s ({ended})", flush=True)
