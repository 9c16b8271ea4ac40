"""The options of `mnemos compare`, and the recipes of its option --vary. Importing this module loads no torch."""

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mnemos.errors import InputError

if TYPE_CHECKING:
    from mnemos.lab.run.recipe import Recipe

MOST = 64  # recipes: a table of more rows is not read, and a mistyped list of values would train for days

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
    about = "add, for each recipe with a memory, the same one with a memory that stores nothing (never written): what "
    about += "a memory is worth is the difference. Where a cache is frozen at inference, a learned constant"
    add("--unwritten", action="store_true", help=about)
    add("--baselines", action="store_true", help="add this one, and one with as many parameters and no memory")
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


def variants(names: Sequence[str], words: Sequence[str], vary: Sequence[tuple[str, str]]) -> "list[Recipe]":
    """Each recipe with each combination of values, named for them: short-listops-cached-length-8-dim-64.

    names: of recipes, or JSON files (`find_recipe`). words: settings of all recipes (`with_fields`). vary: pairs of a
    field and its values, such as ("model.cache.length", "8,32"); the values of the last field change fastest. Raises
    InputError for a field that is given twice, for more than `MOST` recipes, and as `with_fields` does.
    """
    fields = [field for field, _ in vary]
    if twice := next((field for field in fields if fields.count(field) > 1), None):
        raise InputError(f"--vary: expected each field once, found {twice} twice; give its values in one list")
    axes = [[(field, value) for value in values.split(",")] for field, values in vary]
    count = len(names) * math.prod(map(len, axes))
    if count > MOST:
        found = " × ".join(str(n) for n in (len(names), *map(len, axes)))
        raise InputError(f"--vary: expected at most {MOST} recipes, found {found} = {count}; give fewer values")
    return [_varied(name, words, chosen) for name in names for chosen in itertools.product(*axes)]


def _varied(name: str, words: Sequence[str], chosen: Sequence[tuple[str, str]]) -> "Recipe":
    more = [word for field, value in chosen for word in (f"--{field}", value)]
    from mnemos.lab.run.recipe_fields import with_fields
    from mnemos.lab.run.recipe_files import find_recipe

    found = with_fields(find_recipe(name), [*words, *more], f"mnemos compare {name}")
    parts = [part for field, value in chosen for part in (field.split(".")[-1], re.sub(r"[^\w.+-]", "_", value))]
    return replace(found, name="-".join([found.name, *parts]))
