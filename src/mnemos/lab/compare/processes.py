"""The runs of a comparison: each in a process of its own, sharing neither memory nor threads; several at a time.

A terminal sends Ctrl-C to all of them, but only the main process listens: it ends its children by SIGTERM, after which
a run saves a checkpoint. A child whose main process was killed ends itself in the same way.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from mnemos.config import to_dict
from mnemos.errors import plural, say
from mnemos.lab.errors import Interrupted, TrainingFailed, one_line
from mnemos.lab.run.files import Result, read_object
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.lab.run.progress import RUN_NUMBER, RunNumber
from mnemos.lab.run.recipe import Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.lab.run.stopping import calling
from mnemos.types import InputError, JSONObject

Planned = tuple[Recipe, Path]  # a recipe and the folder of its run


@dataclass
class Count:
    """Counts the runs of a comparison. all: those that it trains; begun and ended: those of an earlier call, too."""

    all: int
    begun: int = 0
    ended: int = 0
    names: list[str] = field(default_factory=list)  # the recipes of the runs that began now

    def begin(self, name: str) -> RunNumber:
        """Count a run that begins now; its number among all."""
        self.begun += 1
        number = RunNumber(self.begun, self.all, first=not self.names, new=name not in self.names)
        self.names.append(name)
        return number


class _Working(NamedTuple):
    recipe: Recipe
    folder: Path
    child: BaseProcess


def train_several(
    runs: Sequence[Planned],
    jobs: int = 1,
    *,
    quiet: bool = True,
    tell: bool = True,
    keep_going: bool = False,
    count: Count | None = None,
) -> None:
    """Train runs in their folders, `jobs` at a time, or continue them there; finished ones are left as they are.

    A run that is continued keeps the threads it was begun with, so that a comparison may continue with other `--jobs`.

    quiet: the runs print nothing. tell: print a line for each run that ends now: its score on the validation split, its
    seconds, and how many runs have ended. count: of these runs together with others; by default alone. keep_going: a
    run that fails is reported and left out; otherwise the first failure stops all runs, which save a checkpoint, and
    raises TrainingFailed. Raises InputError if a folder has a run of another recipe or a run cannot start, and
    `Interrupted` after a signal, when all runs have ended and saved.
    """
    waiting = deque((_as_begun(recipe, path), path) for recipe, path in runs)
    working, stopping, count = dict[int, _Working](), False, count or Count(len(runs))

    def stop() -> None:
        # It raises nothing: an error while a child is being started would leave that child without an owner.
        nonlocal stopping
        stopping = True
        for run in working.values():
            run.child.terminate()  # which ends the waiting below

    with calling(stop):
        try:
            while (waiting or working) and not stopping:
                # --- start runs, up to `jobs` at a time ---
                while waiting and len(working) < jobs and not stopping:
                    recipe, path = waiting.popleft()
                    if Result.exists(path) and Result.read(path).assessed:  # it has ended, with its measurements
                        count.begun, count.ended = count.begun + 1, count.ended + 1
                        continue
                    number = count.begin(recipe.name)
                    child = _start(recipe, path, quiet, number if tell else None)
                    working[child.sentinel] = _Working(recipe, path, child)

                # --- wait for one to end ---
                for sentinel in connection.wait(list(working)) if working else ():
                    run = working.pop(sentinel)  # type: ignore[arg-type]
                    run.child.join()
                    code = run.child.exitcode or 0
                    stopping = stopping or code == 130  # a signal was sent to this process alone
                    if stopping:
                        break
                    if code == 2:
                        raise InputError(f"{run.folder}: the run could not start; the line above gives the reason")
                    why = "the lines above give the reason"
                    if code < 0:  # the system ended it, and it could not say anything
                        why = "it was killed, perhaps for want of memory: use fewer --jobs"
                    problem = f"{run.folder}: the run failed with exit code {code}; {why}" if code else None
                    if problem and not keep_going:
                        raise TrainingFailed(problem)
                    count.ended += 1
                    if problem or tell:
                        say(f"  {problem or _score(run)} ({count.ended} of {plural(count.all, 'run')})", flush=True)
        finally:
            for run in working.values():
                run.child.terminate()
            for run in working.values():
                run.child.join()
    if stopping:
        folder = os.path.commonpath([path for _, path in runs])
        raise Interrupted(f"{folder}: interrupted; the same command continues from the last checkpoints")


def _score(run: _Working) -> str:
    result = Result.read(run.folder)
    value, before = result.valid[result.metric], result.before.get(result.metric, math.nan)
    score = "none" if math.isnan(value) else format(value, ".4g")
    score += f" ({before:.4g} before training)" if math.isfinite(before) else ""
    which = f"{run.recipe.name} at learning rate {run.recipe.optim.lr:.1e}, seed {run.recipe.train.seed}"
    return f"{which}: validation {result.metric} {score}, {result.seconds or 0:.0f} s"


def _as_begun(recipe: Recipe, folder: Path) -> Recipe:
    if not (folder / "recipe.json").is_file():
        return recipe
    begun: Any = as_written(read_object(folder / "recipe.json", {"train": dict}))
    recipe = replace(recipe, train=replace(recipe.train, threads=begun["train"].get("threads")))
    if difference := differing(begun, as_json(recipe)):
        raise InputError(
            f"{folder}: expected a run of this recipe, found one that differs in {difference}; name another folder "
            "with --out, or remove this one"
        )
    return recipe


def _start(recipe: Recipe, folder: Path, quiet: bool, among: RunNumber | None) -> BaseProcess:
    """Start the process that trains a run or continues it. among: its number among all, for its progress bar."""
    arguments = (to_dict(recipe), str(folder), (folder / "recipe.json").is_file(), quiet, among)
    child: BaseProcess = multiprocessing.get_context("spawn").Process(target=_run, args=arguments)
    with shielded():
        child.start()
    return child


def _run(recipe: JSONObject, folder: str, resume: bool, quiet: bool, among: RunNumber | None) -> None:
    """The work of a child: it ends with an exit code and, after an error, one line."""
    begin_child()  # before the import, which takes seconds: a child that is told to end then ends
    from mnemos.lab.run.session import run

    keep_freed_memory()
    RUN_NUMBER.set(among)
    try:
        run(from_json(recipe), Path(folder), resume=resume, quiet=quiet)
    except Interrupted:  # without a line: the main process says how the command continues
        raise SystemExit(130) from None
    except Exception as error:
        line = str(error) if isinstance(error, (InputError, TrainingFailed)) else one_line(error)
        if line is None:
            raise
        say(f"mnemos: {line}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """A process that is started inside the `with` never gets SIGINT, also while its interpreter starts."""
    multiprocessing.resource_tracker.ensure_running()  # a first start of it inside would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_child() -> None:
    """Let SIGTERM alone end this process, and send it when the process that started this one has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # again: a fork of a server has the server's mask
    parent = multiprocessing.parent_process()

    def stop_with_parent() -> None:
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_with_parent, daemon=True).start()
