"""The CPU time of an update in the tasks of `mnemos bench-memory`, and what whole runs cost.

    python benchmarks/memory_updates.py [--tasks mqar listops] [--updates 5] [--out FILE.json]

One thread, CPU time of the process, the median over updates after a first one. Each task is measured in a process of
its own, whose peak of resident memory counts Python and PyTorch too. "core_hours" is the time of all updates of all
memories: each is trained at four rates, and with two further seeds. Start, evaluations and controls are not in it.
"""

import json
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from command import command, write

from mnemos.lab.bench.memories import MEMORIES
from mnemos.lab.bench.run import RATES, SEEDS, recipe
from mnemos.lab.bench.tasks import BENCHMARKS, DEFAULT
from mnemos.lab.run import devices
from mnemos.lab.run.checks import complete
from mnemos.lab.run.learner import Learner
from mnemos.lab.run.loop import update

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
    parser = command(__doc__, choices={"tasks": sorted(BENCHMARKS)}, tasks=list(TASKS), updates=5)
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
    }
    print(json.dumps(result, indent=1))
    write(options.out, result)


if __name__ == "__main__":
    main()
