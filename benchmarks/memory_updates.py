"""The CPU time of an update in the tasks of `mnemos bench-memory`, and what whole runs cost.

    python benchmarks/memory_updates.py [--tasks mqar listops] [--updates 5] [--out FILE.json]

One thread, CPU time of the process, the median over updates after a first one. Each task is measured in a process of
its own, whose peak of resident memory counts Python and PyTorch too. "core_hours" is the time of all updates of all
memories: each is trained at four rates, and with two further seeds. Start, evaluations and controls are not in it.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mnemos.lab.bench.memories import MEMORIES
from mnemos.lab.bench.run import RATES, SEEDS, recipe
from mnemos.lab.bench.tasks import BENCHMARKS, DEFAULT
from mnemos.lab.run import devices
from mnemos.lab.run.checks import complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.loop import update
from mnemos.lab.run.provenance import provenance

TASKS = (*DEFAULT, "mqar-64x4", "mqar-128x8", "mqar-256x16", "mqar-512x64", "listops")
RUNS = len(RATES) + SEEDS - 1  # per memory


def cost(learner: Learner, updates: int) -> float:
    """The seconds of CPU time of an update."""
    update(learner)
    found = []
    for _ in range(updates):
        began = time.process_time()
        update(learner)
        found.append(time.process_time() - began)
    return statistics.median(found)


def measure(name: str, updates: int) -> dict[str, Any]:
    """The costs of one task, by memory."""
    torch.set_num_threads(1)
    data: Any = BENCHMARKS[name].data
    benchmark = replace(BENCHMARKS[name], data=replace(data, rows=2))  # held-out rows are not read
    task = benchmark.data.build()
    seconds = {}
    for memory in MEMORIES:
        made = complete(recipe(memory, benchmark, RATES[0], 0), task)
        seconds[memory] = cost(Learner(devices.connect(made.train), made, task), updates)
        print(f"{name} {memory}: {seconds[memory]:.3f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    hours = sum(seconds.values()) * benchmark.steps * RUNS / 3600
    sizes = {"steps": benchmark.steps, "batch": benchmark.batch}
    return {**sizes, "seconds": seconds, "core_hours": hours, "peak_bytes": peak}


def main() -> None:
    """Measure the tasks and print or write the result."""
    parser = argparse.ArgumentParser(description="The CPU time of updates in the benchmarks of memory")
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=sorted(BENCHMARKS))
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {}
    for name in options.tasks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[name] = pool.apply(measure, (name, options.updates))
    default = [found[name]["core_hours"] for name in DEFAULT if name in found]
    result = {
        "threads": 1,
        "clock": "CPU time of the process",
        "updates": options.updates,
        "runs": RUNS,
        "tasks": found,
        "default_core_hours": sum(default) if len(default) == len(DEFAULT) else None,
        "provenance": provenance(0, "cpu"),
    }
    text = json.dumps(result, indent=1)
    print(text) if options.out is None else options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
