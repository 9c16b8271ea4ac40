"""The runs of a comparison: each in a process of its own, sharing neither memory nor threads; several at a time."""

import contextlib
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from mnemos.config import to_dict
from mnemos.errors import say
from mnemos.lab.errors import Interrupted, TrainingFailed, one_line
from mnemos.lab.run.files import Result, read_object
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.lab.run.progress import PLACE, Place, clock
from mnemos.lab.run.recipe import Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.lab.run.stopping import raising
from mnemos.types import InputError, JSONObject

Planned = tuple[Recipe, Path]  # a recipe and the folder of its run


class RunsLeft:
    """Counts runs by the name of their recipe, because recipes differ in cost.

    The time that is left is estimated as

        Σ_name  runs left(name) · mean seconds of its finished runs  /  jobs

    A recipe without a finished run counts with the mean of all. Runs that were finished before count as done, and not
    as time. names: of all runs, each as often as it has runs. jobs: runs at a time. now: a clock in seconds. Several
    threads may use it.
    """

    def __init__(self, names: Iterable[str], jobs: int = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._left: dict[str, int] = {}
        for name in names:
            self._left[name] = self._left.get(name, 0) + 1
        self._started = self._finished = 0  # runs that began, and runs that were finished before
        self._begun: set[str] = set()
        self._seconds: dict[str, list[float]] = {}
        self._all, self._jobs, self._now = sum(self._left.values()), jobs, now
        self._began, self._lock = now(), threading.Lock()

    def started(self, name: str) -> Place:
        """Count a run that begins now, and was not finished before; its place among all."""
        with self._lock:
            self._started += 1
            new = name not in self._begun
            self._begun.add(name)
            return Place(self._finished + self._started, self._all, self._jobs, self._started == 1, new)

    def now(self) -> float:
        """The time in seconds, to be given to `done`."""
        return self._now()

    def done(self, name: str, began: float | None) -> str:
        """Count a run that began at that time, or None if it was finished before; what is done and left, in words."""
        with self._lock:
            self._left[name] -= 1
            self._finished += began is None
            if began is not None:
                self._seconds.setdefault(name, []).append(self._now() - began)
            left = sum(self._left.values())
            text = f"{self._all - left} of {self._all} run{'s' * (self._all > 1)}, {clock(self._now() - self._began)}"
            return f"{text}, about {clock(self._estimate())} left" if left and self._seconds else text

    def without(self, names: Iterable[str]) -> None:
        """Count runs of these recipes as not needed, for example because no run of a sweep was finished."""
        with self._lock:
            for name in names:
                self._all -= self._left.pop(name, 0)

    def _estimate(self) -> float:
        every = [s for seconds in self._seconds.values() for s in seconds]
        mean = {name: sum(s) / len(s) for name, s in {**dict.fromkeys(self._left, every), **self._seconds}.items()}
        return sum(count * mean[name] for name, count in self._left.items()) / self._jobs


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
        waiting: list[Future[None]] = []
        try:
            waiting.extend(pool.submit(job, *run) for run in runs)  # a signal may come before the last has begun
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
        say(f"  {error} ({left.done(recipe.name, began)})", flush=True)
        return
    finally:
        PLACE.reset(among)
    ended = left.done(recipe.name, began)
    if tell and began is not None:
        result = Result.read(place)
        value = result.valid[result.metric]
        score = f"validation {result.metric} {'none' if math.isnan(value) else format(value, '.4g')}"
        if math.isfinite(before := result.before.get(result.metric, math.nan)):
            score += f" ({before:.4g} before training)"
        where = f"{recipe.name} at learning rate {recipe.optim.lr:.1e}, seed {recipe.train.seed}"
        say(f"  {where}: {score}, {result.seconds or 0:.0f} s ({ended})", flush=True)


def train_apart(recipe: Recipe, place: Path, quiet: bool = False) -> None:
    """Train one recipe in a separate process, in the folder `place`, or continue it there. A finished run is read only.

    A run that is continued keeps the threads it was begun with, so that a comparison may continue with other `--jobs`.
    Raises InputError if the folder has a run of another recipe or the run cannot start, TrainingFailed if it fails, and
    `Interrupted` after Ctrl-C, when the run has saved. Only a call from the main thread handles signals.
    """
    resume = (place / "recipe.json").is_file()
    if resume:
        begun = as_written(read_object(place / "recipe.json"))
        recipe = with_threads(recipe, begun)
        if difference := differing(begun, as_json(recipe)):
            raise InputError(
                f"{place}: expected a run of this recipe, found one that differs in {difference}; name another folder "
                "with --out, or remove this one"
            )
    if finished(place):
        return
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(to_dict(recipe), str(place), resume, quiet, PLACE.get())
    )
    if _join(child):
        raise Interrupted(f"{place}: interrupted; the same command continues from the last checkpoint")
    if child.exitcode == 2:
        raise InputError(f"{place}: the run could not start; the line above gives the reason")
    if child.exitcode:
        raise TrainingFailed(
            f"{place}: the run failed with exit code {child.exitcode}; the lines above give the reason"
        )


def with_threads(recipe: Recipe, written: object) -> Recipe:
    """The recipe with the threads of one that was written as JSON; as it is if that has no number of them."""
    train = written.get("train") if isinstance(written, dict) else None
    threads = train.get("threads") if isinstance(train, dict) else None
    return replace(recipe, train=replace(recipe.train, threads=threads)) if type(threads) is int else recipe


def finished(place: Path) -> bool:
    """Whether the run in a folder has ended, with its measurements."""
    return Result.exists(place) and Result.read(place).assessed


def _join(child: BaseProcess) -> bool:
    """Start a process and wait for its end, passing SIGINT and SIGTERM on. Returns whether it was interrupted."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        start_shielded(child)
        child.join()
        return child.exitcode == 130
    signalled = []

    def pass_on(*_: object) -> None:
        signalled.append(True)
        if child.pid is not None:
            child.terminate()

    # A terminal sends Ctrl-C to parent and child. The child starts with SIGINT ignored, so that Ctrl-C cannot end it
    # before it is able to save. The SIGTERM that the parent sends ends the child at once while it starts up, and makes
    # it save later on.
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        signal.signal(signal.SIGTERM, pass_on)
        child.start()
        signal.signal(signal.SIGINT, pass_on)
        if signalled:
            child.terminate()
        child.join()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    return bool(signalled) or child.exitcode == 130


def start_shielded(child: BaseProcess) -> None:
    """Start a process in which SIGINT stays blocked, so that Ctrl-C of a terminal cannot end it with a traceback.

    It ends by the caller's SIGTERM, or by its own when the parent has ended (`child_of_comparison`).
    """
    multiprocessing.resource_tracker.ensure_running()  # a first start of it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(recipe: JSONObject, place: str, resume: bool, quiet: bool, among: Place | None) -> None:
    from mnemos.lab.run.session import run

    keep_freed_memory()
    PLACE.set(among)
    with child_of_comparison():
        run(from_json(recipe), Path(place), resume=resume, quiet=quiet)


@contextlib.contextmanager
def child_of_comparison() -> Iterator[None]:
    """Context of all work of a child process: it ends with its parent, and an error is one line and an exit code.

    An interruption has no line: the parent says how the command continues.
    """
    # The child must not work on after its parent was killed.
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        yield
    except Interrupted:
        raise SystemExit(130) from None
    except (InputError, TrainingFailed) as error:
        say(f"mnemos: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        say(f"mnemos: {line}", file=sys.stderr)
        raise SystemExit(1) from None


def _stop_with_parent() -> None:
    """Wait for the parent process to end, then stop this process with SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
