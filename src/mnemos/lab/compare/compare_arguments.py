"""The options of `mnemos compare`."""

import argparse
from typing import Any

ABOUT = (
    "Train recipes on the same data, seeds and data order, and compare their scores and costs. By default all make "
    "equal updates of equal batches; --equal makes something else equal."
)
TAKES = (
    "RECIPE [RECIPE ...] [--field value ...] [--seeds N] [--jobs N] [--out DIR] [--unwritten] [--baselines] "
    "[--vary FIELD V1,V2 ...] [--equal KIND] [--minutes M] [--rates R1,R2] [--against NAME]"
)
EQUAL = """updates (the default): equal updates of equal batches; samples, flops, time: the steps of each recipe are
set so that it reads as many new rows (of text in segments: tokens), computes as many training FLOPs (forward, backward
and what memory replay computes again), or trains as long as the first recipe with its steps, and batch, rollout and
data.segment may differ; parameters: the widths of MLPs are set so that all have as many as the first, within 5 %%;
also parameters,time and so on"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to a parser."""
    add = parser.add_argument
    add("--seeds", type=int, default=1, metavar="N", help="runs per recipe (%(default)s)")
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time (%(default)s); several have one thread each")
    add("--out", metavar="DIR", help="the comparison's folder; by default a new one in runs")
    about = "add, for each recipe with a gated cache or slots, the baseline whose memory is never written"
    add("--unwritten", action="store_true", help=about)
    add("--baselines", action="store_true", help="add that baseline, and one of equal parameters without the memory")
    about = "train each recipe once with each of these values of a field, such as model.cache.length 8,32; given for "
    about += "several fields, with each combination of their values"
    add("--vary", nargs=2, metavar=("FIELD", "V1,V2"), action="append", default=[], help=about)
    add("--equal", metavar="KIND", default="updates", help=" ".join(EQUAL.split()))
    about = "with --equal time: minutes of updates per run, for which the updates of each recipe are measured before "
    about += "the first run; by default those of the first recipe with its steps"
    add("--minutes", type=float, metavar="M", help=about)
    about = "learning rates, such as 3e-4,1e-3,3e-3: each recipe is trained with each and its first seed, and the one "
    about += "with the best score on the validation split gets the other seeds and is reported"
    add("--rates", metavar="R1,R2", help=about)
    about = "the recipe that the others are tested against, with several seeds (the first)"
    add("--against", metavar="NAME", help=about)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `compare` that the options give, beside recipes and folder. Raises InputError for wrong ones."""
    from .equal import read_equal  # loads torch, which help does not need
    from .rates import read_rates

    return {
        "seeds": options.seeds,
        "unwritten": options.unwritten,
        "baselines": options.baselines,
        "equal": read_equal(options.equal),
        "minutes": options.minutes,
        "rates": () if options.rates is None else read_rates(options.rates),
        "jobs": options.jobs,
        "against": options.against,
    }
