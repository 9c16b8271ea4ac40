"""Table 4: BLEU of six IWSLT tracks beside the tracks that were trained here, and a small comparison on Multi30k."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnemos import registry
from mnemos.lab.compare.compare import compare
from mnemos.types import JSONObject

from ..claims import Claim
from ..findings import Cell, Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs

SMALL = "multi30k-en-de"  # the folder of its data, and its recipe
_NOT_RUN = "not run"


def table4(claim: Claim, options: Options) -> Finding:
    """Table 4. --data FOLDER holds a folder for each track to train, named as its recipe: iwslt14-de-en, …

    A folder multi30k-en-de beside them, or as --data itself, adds the small comparison with its baselines. Tracks
    without a folder are "not run"; each needs hours on a GPU.
    """
    table = Table("Test BLEU of IWSLT", ["", "recipe", "paper plain", "paper cached", "plain", "cached"])
    found = Finding([table])
    plain, cached = claim.values.values()
    for column, without, with_cache in zip(claim.columns, plain, cached, strict=True):
        name = _recipe_of(column)
        comparison = _trained(options, name, name, baselines=False)
        ours: Sequence[Cell] = (_NOT_RUN, _NOT_RUN) if comparison is None else [_bleu(r) for r in comparison["rows"]]
        found.runs += [] if comparison is None else runs(comparison)
        table.add(column, name, without, with_cache, *ours)
    small = _trained(options, SMALL, SMALL, baselines=True)
    if small is not None:
        found.tables.append(_small(small))
        found.runs += runs(small)
    if found.runs:
        found.notes.append(caution(options, data=False))
        if options.steps is not None:
            found.notes.append(f"Trained for {options.steps:,} updates (--steps) instead of the recipes' own number.")
    found.notes.append(
        "At the real size: mnemos train RECIPE --data.path FOLDER, and RECIPE-cached. The paper does not say how its "
        "BLEU is tokenised; ours is sacreBLEU of detokenised text, and each run's result has tokenised BLEU beside it."
    )
    return found


def _recipe_of(column: str) -> str:
    """The recipe of a track, such as iwslt14-de-en for "14 De-En"."""
    year, languages = column.split()
    return f"iwslt{year}-{languages.lower()}"


def _trained(options: Options, name: str, folder: str, baselines: bool) -> JSONObject | None:
    """The comparison of a recipe with its cached variant; None if --data has no folder for it."""
    data = _folder(options, folder)
    if data is None or options.recipes_only:
        return None
    recipes = []
    for ending in ("", "-cached"):
        made: Any = registry.load("recipe", name + ending)()
        train = made.train if options.steps is None else replace(made.train, steps=options.steps)
        recipes.append(replace(made, data=replace(made.data, path=str(data)), train=train))
    out = options.out / "runs" / f"{name}-{recipes[0].train.steps}"
    return {**compare(recipes, out, options.seeds, quiet=True, baselines=baselines), "folder": out}


def _folder(options: Options, name: str) -> Path | None:
    if options.data is None:
        return None
    return next((one for one in (options.data / name, options.data) if one.name == name and one.is_dir()), None)


def _small(comparison: JSONObject) -> Table:
    seeds = comparison["rows"][0]["seeds"]
    table = Table(f"Test BLEU of Multi30k, {seeds} seed{'s' * (seeds > 1)}", ["", "parameters", "BLEU"])
    for row in comparison["rows"]:
        table.add(row["name"], row["parameters"], _bleu(row))
    return table


def _bleu(row: JSONObject) -> str:
    return spread(row["mean"], row["std"], 1.0)
