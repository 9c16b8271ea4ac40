"""The paper's comparisons at a small size: hosts that differ in their cache, on digits, MNIST or CIFAR-10."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mnemos import registry
from mnemos.lab.run.recipe import Recipe, unwritten
from mnemos.memory.grc import GRC
from mnemos.types import JSONObject

from ..findings import Cell, spread
from ..reproduce import Options
from ..small_runs import task, train_and_compare

STEPS = 500  # updates per run, unless the options give a number
# The endings of recipe names, by kind of cache. PAPER has preset="paper", which the claims are about.
# UNWRITTEN: the never-written baselines, which show what the cached branch gives without a memory. That of PAPER reads
# a learned constant as PAPER reads its cache.
PLAIN, ATTENTION, PAPER, CACHED = "", "-attention-cache", "-paper", "-cached"
UNWRITTEN = {PAPER: "-paper-constant", CACHED: "-cached-unwritten"}
NAMES = {
    PLAIN: "none",
    ATTENTION: "attention-based",
    PAPER: "GRC, paper",
    CACHED: "GRC, mnemos",
    UNWRITTEN[PAPER]: "GRC, paper, constant cache",
    UNWRITTEN[CACHED]: "GRC, mnemos, never written",
}


def recipe(options: Options, host: str, kind: str = PLAIN) -> Recipe:
    """The small recipe of a host ("vit", "pvt", "swin") and a kind of cache, with the data and steps of the options."""
    for written, baseline in UNWRITTEN.items():
        if kind == baseline and (made := unwritten(recipe(options, host, written))) is not None:
            return made
    name, fields = task(options)
    found: Recipe = registry.load("recipe", f"{name}-{host}{CACHED if kind == PAPER else kind}")()
    if kind == PAPER:
        model: Any = found.model
        model = replace(model, cache=GRC(preset="paper"))
        found = replace(found, name=f"{name}-{host}{PAPER}", model=model)
    data = replace(found.data, **fields)
    return replace(found, data=data, train=replace(found.train, steps=options.steps or STEPS))


def ratios(options: Options, host: str, wanted: Sequence[float]) -> list[Recipe]:
    """Recipes of a host without a cache (ratio 0) and with a cache of each ratio in `wanted`."""
    cached = recipe(options, host, PAPER)
    found = [recipe(options, host)]
    for ratio in wanted:
        name = f"{found[0].name}-ratio-{ratio:g}"
        model: Any = cached.model
        found.append(replace(cached, name=name, model=replace(model, cache=replace(model.cache, ratio=ratio))))
    return found


def trained(options: Options, name: str, recipes: Sequence[Recipe]) -> JSONObject:
    """The comparison of the recipes on the data of the options; see `train_and_compare`."""
    return train_and_compare(options, f"{name}-{task(options)[0]}", recipes)


def variants(options: Options, host: str) -> JSONObject:
    """The comparison of a host with each kind of cache that it can have, in the order of `kinds`."""
    return trained(options, host, [recipe(options, host, kind) for kind in kinds(host)])


def kinds(host: str) -> tuple[str, ...]:
    """The kinds of cache that a host can have. Swin's windows leave no room for keys of other images."""
    return tuple(kind for kind in NAMES if host != "swin" or kind != ATTENTION)


def accuracy(comparison: JSONObject, index: int) -> Cell:
    """The test accuracy of row `index` in percent: mean and standard deviation over seeds."""
    row = comparison["rows"][index]
    return spread(row["mean"], row["std"])


def emptied(comparison: JSONObject, index: int) -> Cell:
    """The test accuracy of row `index` with its caches emptied; None for a row without caches."""
    name = comparison["rows"][index]["name"]
    for control in comparison["controls"]:
        if (control["name"], control["control"]) == (name, "emptied"):
            return spread(control["mean"], control["std"])
    return None


def about(options: Options, comparison: JSONObject) -> str:
    """A line for titles: data, number of updates and seeds, and the accuracy of the majority class."""
    name, _ = task(options)
    steps = recipe(options, "vit").train.steps
    seeds = comparison["rows"][0]["seeds"]
    majority = comparison["majority"]
    chance = "" if majority is None else f"; majority class: {100 * majority:.1f} %"
    return f"small models on {name}, {steps:,} updates, {seeds} seed{'s' * (seeds > 1)}{chance}"
