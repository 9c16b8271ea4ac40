"""Updates without end: one training process, watched from outside, must not grow or slow down.

The run has what a long one has: a carried state, a cache that training writes, an average of weights, evaluations,
checkpoints that replace older ones, and the best weights. At its end SIGTERM asks for a checkpoint.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from usage import Usage, tenths, usage

FIELDS = {
    "model": "dim 16 layers 1 num-heads 2 mlp 32 cache.length 4 cache.scope shared attention.memory 32",
    "data": "segment 32",
    "optim": "schedule.name constant schedule.warmup 0",
    "train": "batch-size 4 log-every 20 checkpoint-every 200 eval-every 1000 valid-rows 8 keep-best True "
    "accelerator cpu steps 1000000000",
}
MEMORY = 8 * 2**20  # bytes by which the last tenth may exceed the first: less than 20 bytes an update in an hour
SLOWER = 1.5  # times the processor's time per update; other programs share its caches


def options() -> list[str]:
    """The recipe's fields as options."""
    words = []
    for part, text in FIELDS.items():
        names = text.split()
        for name, value in zip(names[::2], names[1::2], strict=True):
            words += [f"--{part}.{name}", value]
    return words


def write_text(path: Path, lines: int = 3000) -> None:
    """Some text of random words."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 8))) for _ in range(300)]
    path.write_text("".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(lines)))


def run(share: float, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train for `share` of an hour; what was measured, and what failed."""
    seconds = 3600 * share
    write_text(folder / "text.txt")
    command = [sys.executable, "-m", "mnemos", "train", "text-xl-cached", "--data.path", str(folder / "text.txt")]
    with (folder / "said").open("w") as said:
        child = subprocess.Popen([*command, *options(), "--out", str(folder / "run")], stdout=said, stderr=said)
        try:
            found = watch(child, folder / "run/metrics.jsonl", seconds, say)
            child.send_signal(signal.SIGTERM)
            code = child.wait(120)
        finally:
            child.kill()
            child.wait()
    lines = [line for line in (folder / "said").read_text().splitlines() if line.startswith("mnemos: ")]
    report, failed = judge(found)
    if code != 130 or len(lines) != 1 or "a checkpoint is saved" not in lines[0]:
        failed.append(f"expected exit code 130 and one line after SIGTERM, found {code} and {lines}")
    kept = sorted(path.name.partition("-")[0] for path in (folder / "run/checkpoints").iterdir())
    if kept.count("step") > 2 or kept.count("best") > 3 or len(kept) > 5:
        failed.append(f"expected two checkpoints and the best weights they refer to, found {kept}")
    return {**report, "failed": failed}


def watch(
    child: subprocess.Popen[bytes], metrics: Path, seconds: float, say: Callable[[str], None]
) -> list[tuple[int, Usage]]:
    """(updates, usage) from the first update on, for so many seconds."""
    found: list[tuple[int, Usage]] = []
    began = time.monotonic()
    every = max(0.5, seconds / 400)
    while not found or time.monotonic() - found[0][1].at < seconds:
        time.sleep(every)
        if child.poll() is not None:
            raise RuntimeError(f"the training ended with {child.returncode}; see {metrics.parents[1] / 'said'}")
        step = last_step(metrics)
        if not step and time.monotonic() - began > 300:
            raise RuntimeError("the training has not begun after 300 s")
        if step and (not found or step > found[-1][0]):
            found.append((step, usage(child.pid)))
            now = found[-1][1]
            say(f"{step:,} updates, {now.rss / 2**20:.0f} MiB, {now.handles} handles, {now.threads} threads")
    return found


def last_step(metrics: Path) -> int:
    """The update of the last whole line of training; 0 before the first."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, os.path.getsize(metrics) - 4096))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if line.startswith(b'{"kind": "train"'):
            return int(json.loads(line)["step"])
    return 0


def judge(found: list[tuple[int, Usage]]) -> tuple[dict[str, Any], list[str]]:
    """The measured numbers, and one line for each that grew."""
    uses = [use for _, use in found]
    each = [(later[1].cpu - earlier[1].cpu) / (later[0] - earlier[0]) for earlier, later in itertools.pairwise(found)]
    cpu, rss = tenths(each), tenths([use.rss for use in uses])
    handles, threads = tenths([use.handles for use in uses]), tenths([use.threads for use in uses])
    updates = found[-1][0]
    report = {
        "updates": updates,
        "seconds_of_updates": round(uses[-1].at - uses[0].at, 1),
        "processor_ms_per_update": [round(1000 * x, 4) for x in cpu],
        "rss_mib": [round(x / 2**20, 2) for x in rss],
        "handles": [round(x) for x in handles],
        "threads": [round(x) for x in threads],
    }
    failed = []
    if rss[1] - rss[0] > MEMORY:
        grown = (rss[1] - rss[0]) / 2**20
        failed.append(f"the memory grew by {grown:.1f} MiB in {updates:,} updates")
    if cpu[1] > SLOWER * cpu[0]:
        failed.append(f"an update took {1000 * cpu[0]:.3f} ms of the processor at first and {1000 * cpu[1]:.3f} later")
    for name, (first, last) in {"open handles": handles, "threads": threads}.items():
        if last > first:
            failed.append(f"the process had {first:.0f} {name} at first and {last:.0f} later")
    return report, failed
