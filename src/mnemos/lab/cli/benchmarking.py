"""The command `mnemos bench-memory`."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from mnemos.errors import InputError
from mnemos.lab.bench.memories import MEMORIES
from mnemos.lab.bench.run import RATES, SEEDS, Options
from mnemos.lab.bench.run import bench_memory as train_all
from mnemos.lab.bench.tasks import BENCHMARKS, DEFAULT
from mnemos.lab.compare.runs import read_rates

_TASKS = "; ".join(f"{name}: {one.about}" for name, one in BENCHMARKS.items()) + f". Default: {', '.join(DEFAULT)}"


def bench_memory(
    tasks: Annotated[tuple[str, ...], arg(metavar="[TASKS]", help=_TASKS)] = (),
    *,
    quick: bool = False,
    memories: Annotated[str, arg(help=f"of {', '.join(MEMORIES)}, with commas between; by default all")] = "",
    seeds: Annotated[int | None, arg(help=f"runs at the best rate ({SEEDS}; 1 with --quick)")] = None,
    steps: int | None = None,
    dim: int | None = None,
    rates: str | None = None,
    jobs: int = 2,
    out: Path = Path("runs") / "bench-memory",
) -> int:
    """Train every memory on the benchmarks of memory, at its best learning rate, and write a table and a page.

    Args:
        quick: two tasks, five memories, 1,000 steps, one seed: ten minutes on two cores
        steps: steps (updates) per run, by default the task's own
        dim: width of the models, by default the task's own
        rates: learning rates, such as 1e-3,3e-3; by default four from 1e-4 to 1e-2
        jobs: runs at a time, one thread each
        out: the folder of the results
    """
    for name, value in (("seeds", seeds), ("steps", steps), ("dim", dim), ("jobs", jobs)):
        if value is not None and value < 1:
            raise InputError(f"--{name}: expected at least 1, found {value}; leave the option out for its default")
    train_all(
        Options(
            out=out,
            tasks=tasks,
            memories=tuple(filter(None, memories.split(","))),
            quick=quick,
            seeds=seeds or 0,
            steps=steps or 0,
            dim=dim or 0,
            rates=RATES if rates is None else read_rates(rates),
            jobs=jobs,
        )
    )
    return 0
