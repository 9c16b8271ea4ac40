"""The commands that train: `mnemos train`, `compare`, `reproduce` and `bench-memory`."""

import re
from pathlib import Path

from mnemos.errors import InputError, say

from .parsers import CommandParser, RecipeParser, chosen_recipe, only


def train(arguments: list[str]) -> int:
    """Train a recipe, or continue a run."""
    takes = "RECIPE [--field value ...] [--out DIR] [--from RUN] | --resume RUN [--train.steps N] "
    takes += "[--accept-changed-data]"
    parser = RecipeParser("train", "Train a recipe. The run is a folder with model, scores and checkpoints.", takes)
    parser.add_argument("--out", metavar="DIR", help="the run's folder; by default a new one in runs")
    about = (
        "continue this run where it stopped; takes no other arguments, except --train.steps N to train it for longer"
    )
    parser.add_argument("--resume", metavar="RUN", help=about)
    about = "start with the weights of this run, where names and shapes agree"
    parser.add_argument("--from", dest="start", metavar="RUN", help=about)
    about = "with --resume: continue although the data have changed since the run's last checkpoint"
    parser.add_argument("--accept-changed-data", action="store_true", help=about)
    options, names, fields = parser.split(arguments)

    from mnemos.lab.run.session import run, run_name

    if options.resume is not None:
        steps = _longer(fields)
        if names or options.out or options.start or (fields and steps is None):
            raise InputError(
                "expected --resume RUN alone or with --train.steps N, because a resumed run keeps its recipe and "
                "folder, found others; leave them out, or start a new run with its weights: "
                f"mnemos train {Path(options.resume) / 'recipe.json'} --from {options.resume}"
            )
        accept = options.accept_changed_data
        run(None, Path(options.resume), True, steps=steps, accept_changed_data=accept)
        return 0
    if options.accept_changed_data:
        raise InputError("--accept-changed-data: expected --resume RUN beside it, found none; leave it out")
    if "" in (options.out, options.start):
        raise InputError("mnemos train: expected a folder after --out and --from, found an empty name; give its path")
    fields += ["--train.init-from", options.start] if options.start else []
    recipe = chosen_recipe("train", only("train", names), fields)
    run(recipe, Path(options.out) if options.out else Path("runs") / run_name(recipe))
    return 0


def _longer(fields: list[str]) -> int | None:
    """The number of steps, if the fields are --train.steps N alone."""
    match = re.fullmatch(r"--train.steps[ =](\d+)", " ".join(fields))
    return int(match[1]) if match else None


def compare(arguments: list[str]) -> int:
    """Train several recipes and compare them."""
    from mnemos.lab.compare.arguments import ABOUT, TAKES, add_options, settings, variants

    parser = RecipeParser("compare", ABOUT, TAKES)
    add_options(parser)
    options, names, fields = parser.split(arguments)
    if not names and "--help" in fields:
        parser.print_help()
        return 0
    several = any("," in values for _, values in options.vary)
    count = len(names) + several + (options.unwritten or options.baselines)
    alone = count < 2 and options.seeds == 1 and "," not in (options.rates or "")
    if not names or (alone and "--help" not in fields):
        raise InputError(f"compare: expected several recipes, seeds or rates, found {len(names)}; see mnemos list")

    from mnemos.lab.compare.compare import compare
    from mnemos.lab.run.session import run_name

    recipes = variants(names, fields, options.vary)
    folder = Path(options.out) if options.out else Path("runs") / run_name(recipes[0], "compare")
    switches = settings(options)
    compare(recipes, folder, **switches)
    return 0


def reproduce(arguments: list[str]) -> int:
    """Reproduce a table or figure of a paper."""
    from mnemos.lab.papers.reproduce import Options, chosen, listing, reproduce

    parser = CommandParser("reproduce", "Reproduce a table or figure of a paper, beside the paper's numbers.")
    parser.add_argument("target", nargs="?", metavar="PAPER[/CLAIM]", help="without it, all claims are listed")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a folder of CIFAR-10, MNIST or recordings; a text")
    parser.add_argument("--steps", type=int, metavar="N", help="steps (updates) per run")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per recipe (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the results' folder; by default runs/reproduce/PAPER")
    parser.add_argument("--run", type=Path, help="a finished run to draw, instead of training a new one")
    parser.add_argument("--recipes-only", action="store_true", help="train nothing: print the recipes that would run")
    options = parser.parse_args(arguments)
    if options.target is None:
        say(listing())
        return 0
    paper, _ = chosen(options.target)
    wanted = Options(
        out=options.out or Path("runs") / "reproduce" / paper.name,
        data=options.data,
        steps=options.steps,
        seeds=options.seeds,
        run=options.run,
        recipes_only=options.recipes_only,
    )
    reproduce(options.target, wanted)
    return 0


def bench_memory(arguments: list[str]) -> int:
    """Train every memory on the benchmarks of memory."""
    from mnemos.lab.bench.run import ABOUT, bench_memory, read_options

    options = read_options(CommandParser("bench-memory", ABOUT), arguments)
    bench_memory(options)
    return 0
