"""Real faults in small runs: kills, full disks, damaged checkpoints, races. After each the run is the undisturbed one.

Processes are forked from this one, which has imported everything; signals, disks and locks are the system's. Full disks
are small tmpfs mounts in a namespace of their own, which need the right to mount: elsewhere that trial is left out, and
the result says so.
"""

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import Process, launch
from soak_updates import last_step
from test_resume import same
from train_standins import Toys, work

from mnemos.lab.cli import main
from mnemos.lab.cli.verbs import _say as tell
from mnemos.lab.run import checkpoint

KILLS, PAIRS, DISKS, DAMAGED, RACES = 50, 4, 20, 40, 20
LONG = Toys(
    language=True,
    model={"cached": True},
    train={"steps": 150, "checkpoint_every": 3, "log_every": 1, "eval_every": 10, "keep_best": True},
)
SHORT = Toys(language=True, train={"accumulate": 2, "checkpoint_every": 3, "log_every": 1})
NEW_NAMESPACE = 0x00020000
Say = Callable[[str], None]


class Child(Process):
    """A function in a process that is forked from this one."""

    context = multiprocessing.get_context("fork")

    def wait(self, timeout: float = 600) -> tuple[int, str]:
        """The exit code, and what it wrote to the standard error."""
        ended = super().wait(timeout)
        return ended.returncode, ended.stderr

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def train(folder: str, toys: Toys, resume: bool) -> None:
    """`work`, whose errors are lines and exit codes as the command line's."""
    from mnemos.errors import InputError
    from mnemos.lab.errors import TrainingFailed, one_line

    try:
        work(folder, toys, resume, quiet=False)
    except (InputError, TrainingFailed) as error:
        tell(str(error))
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except OSError as error:
        tell(str(one_line(error)))
        raise SystemExit(1) from None


def one_line_of(said: str) -> str | None:
    """The line of an error; None if there is none, several, or a traceback."""
    lines = [line for line in said.splitlines() if line.startswith("mnemos: ")]
    return lines[0] if len(lines) == 1 and "Traceback" not in said else None


def differs(folder: Path, reference: Path, steps: int) -> str | None:
    """How a finished run differs from the undisturbed one."""
    try:
        same(folder, reference, steps)
    except Exception as error:
        return f"it is not the undisturbed run: {type(error).__name__} {str(error)[:300]}"
    return None


def run(share: float, folder: Path, say: Say) -> dict[str, Any]:
    """Every kind of fault; how many there were of each, and what failed."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    failed: list[str] = []
    for kind, most in ((kills, KILLS), (pairs, PAIRS), (disks, DISKS), (damaged, DAMAGED), (races, RACES)):
        place = folder / kind.__name__
        place.mkdir()
        say(kind.__name__)
        count, problems = kind(place, max(1, math.ceil(most * share)), say)
        found[kind.__name__] = count
        failed += [f"{kind.__name__}: {problem}" for problem in problems]
        shutil.rmtree(place, ignore_errors=True)
    return {**found, "failed": failed}


def kills(folder: Path, count: int, say: Say) -> tuple[int, list[str]]:
    """SIGKILLs of one run at random moments, a fifth of them while it starts."""
    steps = LONG.train["steps"]
    if Child(train, str(folder / "whole"), LONG, False).wait()[0]:
        return 0, ["the undisturbed run failed"]
    draw, place, done, metrics = random.Random(0), folder / "run", 0, folder / "run/metrics.jsonl"
    while not (place / "result.json").exists():
        child = Child(train, str(place), LONG, (place / "recipe.json").exists())
        if done < count:
            start, target = time.monotonic(), last_step(metrics) + draw.randint(1, max(1, 3 * steps // (2 * count)))
            early = draw.uniform(0.0, 0.3) if draw.random() < 0.2 else math.inf
            while child.process.is_alive() and last_step(metrics) < target and time.monotonic() - start < early:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            child.kill()
        code, said = child.wait()
        done += code == -signal.SIGKILL
        if code not in (0, -signal.SIGKILL):
            return done, [f"after {done} kills the run ended with {code}: {said[-300:]}"]
        say(f"kills: {done}, {last_step(metrics)} of {steps} updates")
    problems = [differs(place, folder / "whole", steps)]
    problems += [f"the run ended before {count} kills"] if done < count else []
    return done, [problem for problem in problems if problem]


FEW = "--data.train-size 40 --data.valid-size 4 --data.test-size 4 --model.dim 8 --model.layers 1 --model.mlp 8"
FEW += " --train.batch-size 4 --train.steps 60 --train.log-every 1 --train.checkpoint-every 5 --train.eval-every 20"
FEW += " --train.accelerator cpu --train.devices 2"


def member(words: list[str]) -> None:
    raise SystemExit(main(words))


def pairs(folder: Path, count: int, say: Say) -> tuple[int, list[str]]:
    """One of two processes of a training is killed; the other ends with one line, and the run resumes exactly."""
    start = ["train", "short-listops-cached", *FEW.split(), "--out"]
    for child in launch(member, [*start, str(folder / "whole")], kind=Child):
        code, said = child.wait()
        if code:
            return 0, [f"the undisturbed run ended with {code}: {said[-300:]}"]
    draw, place, failed = random.Random(1), folder / "run", []
    words = [*start, str(place)]
    for number in range(count):
        two, killed = launch(member, words, kind=Child), draw.randrange(2)
        target = last_step(place / "metrics.jsonl") + draw.randint(1, 12)
        while two[killed].process.is_alive() and last_step(place / "metrics.jsonl") < target:
            time.sleep(0.005)
        two[killed].kill()
        code, said = two[1 - killed].wait()
        two[killed].wait()
        if code != 1 or one_line_of(said) is None:
            failed.append(f"the other of two processes ended with {code}: {said[-300:]}")
        words = ["train", "--resume", str(place)]
        say(f"pairs: {number + 1}, {last_step(place / 'metrics.jsonl')} updates")
    if any(child.wait()[0] for child in launch(member, words, kind=Child)):
        return count, [*failed, "the run did not resume"]
    same_numbers = numbers(place) == numbers(folder / "whole")
    return count, failed + ([] if same_numbers else ["its metrics are not those of the undisturbed run"])


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without its times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def disks(folder: Path, count: int, say: Say) -> tuple[int | str, list[str]]:
    """Disks of different sizes that a run fills; with more space it goes on exactly. And a report on a full disk."""
    if Child(train, str(folder / "whole"), SHORT, False).wait()[0]:
        return 0, ["the undisturbed run failed"]
    if Child(mount, folder / "trial", 64).wait()[0]:
        return "left out: no right to mount", []
    whole = sum(path.stat().st_blocks * 512 for path in (folder / "whole").rglob("*"))
    failed = []
    for number in range(count):
        size = 8 + int((whole / 1024 - 8) * number / count)
        code, said = Child(on_small_disk, folder, size).wait()
        if code:
            failed.append(f"a disk of {size} KiB: {said[-400:]}")
        say(f"disks: {number + 1}, {size} KiB")
    return count, failed


def mount(place: Path, size: int, again: bool = False) -> None:
    """A disk of so many KiB, in a namespace of this process, or another size for it."""
    place.mkdir(exist_ok=True)
    if not again and ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE):
        raise SystemExit(1)
    if not again:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    how = ["-o", f"{'remount,' if again else ''}size={size}k", "mnemos-soak", str(place)]
    subprocess.run(["mount", "-t", "tmpfs", *how], check=True, capture_output=True)


def on_small_disk(folder: Path, size: int) -> None:
    """A run on a disk of so many KiB; exits with what is wrong."""
    mount(folder / "trial", size)
    place = folder / "trial/run"
    code, said = Child(train, str(place), SHORT, False).wait()
    if code and (code != 1 or one_line_of(said) is None):
        sys.exit(f"exit code {code}: {said[-300:]}")
    if code and "result.json" in os.listdir(folder / "trial"):
        sys.exit("a result without a run")
    before = checkpoint.steps(place / "checkpoints")
    for step in before:
        checkpoint.read(checkpoint.path_of(place / "checkpoints", step))  # what is there is whole
    if not code:
        out = folder / "trial/report.html"
        filler = folder / "trial/filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        code, said = Child(member, ["report", str(place), "--out", str(out)]).wait()
        if code != 1 or one_line_of(said) is None or out.exists():
            sys.exit(f"a report on a full disk: exit code {code}, {said[-300:]}")
        return
    mount(folder / "trial", 65536, again=True)
    code, said = Child(train, str(place), SHORT, (place / "recipe.json").exists()).wait()
    if code:
        sys.exit(f"with more space: exit code {code}: {said[-300:]}")
    if problem := differs(place, folder / "whole", 12):
        sys.exit(problem)


def damaged(folder: Path, count: int, say: Say) -> tuple[int, list[str]]:
    """The newest checkpoint is cut, a bit of it flipped, gone, or comes and goes while it is read."""
    if Child(train, str(folder / "whole"), SHORT, False).wait()[0]:
        return 0, ["the undisturbed run failed"]
    Child(work, str(folder / "killed"), SHORT, False, "mid-update", 8).wait()
    draw, failed = random.Random(2), []
    for number in range(count):
        place = folder / f"run-{number}"
        shutil.copytree(folder / "killed", place)
        newest = checkpoint.path_of(place / "checkpoints", 6)
        content = bytearray(newest.read_bytes())
        kind = ("cut", "flipped", "gone", "blinks")[number % 4]
        stop = threading.Event()
        if kind == "cut":
            newest.write_bytes(content[: draw.randrange(len(content))])
        elif kind == "flipped":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            newest.write_bytes(content)
        elif kind == "gone":
            newest.unlink()
        child = Child(train, str(place), SHORT, True)
        blinking = threading.Thread(target=blink, args=(newest, stop))
        if kind == "blinks":
            blinking.start()
        code, said = child.wait()
        stop.set()
        if kind == "blinks":
            blinking.join()
        problem = f"exit code {code}: {said[-300:]}" if code else differs(place, folder / "whole", 12)
        if problem:
            failed.append(f"a checkpoint {kind}: {problem}")
        shutil.rmtree(place)
        say(f"damaged: {number + 1}")
    return count, failed


def blink(path: Path, stop: threading.Event) -> None:
    """A file that another program moves away and back, until the run has written others."""
    away = path.with_name("away")
    end = time.monotonic() + 0.5
    while not stop.is_set() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            path.rename(away)
            time.sleep(0.001)
            away.rename(path)
            time.sleep(0.001)
    away.unlink(missing_ok=True)


def races(folder: Path, count: int, say: Say) -> tuple[int, list[str]]:
    """Two processes begin, or resume, one folder at once: one trains, the other says that it does."""
    Child(train, str(folder / "whole"), SHORT, False).wait()
    Child(work, str(folder / "killed"), SHORT, False, "mid-update", 8).wait()
    failed = []
    for number in range(count):
        place, resume = folder / f"run-{number}", number % 2 == 1
        if resume:
            shutil.copytree(folder / "killed", place)
        both = [Child(train, str(place), SHORT, resume) for _ in range(2)]
        ended = sorted(child.wait() for child in both)
        codes = [code for code, _ in ended]
        refused = [said for code, said in ended if code]
        late = codes == [0, 0] and resume  # the other had finished before it looked
        if not late and (codes != [0, 2] or one_line_of(refused[0]) is None):
            failed.append(f"two processes in one folder ended with {codes}: {' '.join(refused)[-300:]}")
        elif problem := differs(place, folder / "whole", 12):
            failed.append(problem)
        shutil.rmtree(place)
        say(f"races: {number + 1}")
    return count, failed
