"""A run in a process of its own, so that runs share neither memory nor threads."""

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from mnemos.config import to_dict
from mnemos.errors import Interrupted, TrainingFailed, one_line
from mnemos.lab.run.kept_memory import keep_freed_memory
from mnemos.lab.run.progress import PLACE, Place
from mnemos.lab.run.recipe import Recipe, as_json, as_written, differing
from mnemos.lab.run.recipe_files import from_json
from mnemos.lab.run.run_files import read_object, read_result
from mnemos.types import InputError, JSONObject


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
    return (place / "result.json").is_file() and "flops" in read_result(place)


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
        print(f"mnemos: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"mnemos: {line}", file=sys.stderr)
        raise SystemExit(1) from None


def _stop_with_parent() -> None:
    """Wait for the parent process to end, then stop this process with SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
