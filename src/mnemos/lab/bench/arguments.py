"""The arguments of `mnemos bench-memory`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from mnemos.lab.compare.rates import read_rates
from mnemos.types import InputError

from .memories import MEMORIES
from .run import SEEDS, Options
from .tasks import BENCHMARKS, DEFAULT

ABOUT = "Train every memory on the benchmarks of memory, at its best learning rate, and write a table and a page."


def read(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Options:
    """The options in the arguments; adds them to the parser. Raises InputError for impossible rates and sizes."""
    default = Options(Path("runs") / "bench-memory")
    known = "\n".join(f"  {name:18} {one.about}" for name, one in BENCHMARKS.items())
    parser.epilog = f"Tasks (default: {', '.join(DEFAULT)}):\n{known}\n\nMemories: {', '.join(MEMORIES)}."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help="tasks; see below")
    add(
        "--quick", action="store_true", help="two tasks, five memories, 1,000 steps, one seed: ten minutes on two cores"
    )
    add("--memories", metavar="A,B", default="", help="memories, by default all")
    add("--seeds", type=int, metavar="N", help=f"runs at the best rate ({SEEDS}; 1 with --quick)")
    add("--steps", type=int, metavar="N", help="steps (updates) per run, by default the task's own")
    add("--dim", type=int, metavar="N", help="width of the models, by default the task's own")
    add("--rates", metavar="R1,R2", help="learning rates, by default four from 1e-4 to 1e-2")
    add("--books", metavar="PATH", help="a text or a folder of texts for facts and needle")
    add("--jobs", type=int, default=default.jobs, metavar="N", help="runs at a time, one thread each (%(default)s)")
    add("--out", type=Path, default=default.out, metavar="DIR", help="the folder of the results (%(default)s)")
    fields = vars(parser.parse_args(arguments))
    fields["memories"] = tuple(filter(None, fields["memories"].split(",")))
    for name in ("seeds", "steps", "dim"):
        if fields[name] is not None and fields[name] < 1:
            raise InputError(
                f"--{name}: expected at least 1, found {fields[name]}; leave the option out for its default"
            )
        fields[name] = fields[name] or 0
    rates = fields.pop("rates")
    fields["rates"] = default.rates if rates is None else read_rates(rates)
    return Options(**fields)
