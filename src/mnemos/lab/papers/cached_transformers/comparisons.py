"""The paper's comparisons at a small size: hosts that differ in their cache, on digits, MNIST or CIFAR-10."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mnemos import registry
from mnemos.lab.compare.significance import Difference, Spread, correct, welch
from mnemos.lab.run.recipe import Recipe, unwritten
from mnemos.types import JSONObject

from ..findings import Cell, Table, spread
from ..reproduce import Options
from ..small_runs import task, train_and_compare

STEPS = 500  # updates per run, unless the options give a number
# The endings of recipe names, by kind of cache. PAPER has the settings of the paper but for the positional term, and a
# slot per token of the host's own keys. ROWS: the same, but each row reads its own cache, at inference as in training.
PLAIN, ATTENTION, PAPER, ROWS, CACHED = "", "-attention-cache", "-paper", "-paper-rows", "-cached"
# The never-written baselines of the gated caches. PAPER is read as it is stored, so a learned constant takes its place;
# the others start every update from zeros.
CONTROLS = {PAPER: "-paper-constant", ROWS: "-paper-rows-unwritten", CACHED: "-cached-unwritten"}
NAMES = {
    PLAIN: "none",
    ATTENTION: "attention-based",
    PAPER: "GRC, paper",
    CONTROLS[PAPER]: "GRC, paper, constant cache",
    ROWS: "GRC, paper, per row",
    CONTROLS[ROWS]: "GRC, paper, per row, never written",
    CACHED: "GRC, mnemos",
    CONTROLS[CACHED]: "GRC, mnemos, never written",
}
TABLE1 = tuple(kind for kind in NAMES if kind != ATTENTION)
TABLE2 = (PLAIN, ATTENTION, PAPER, CONTROLS[PAPER])


def recipe(options: Options, host: str, kind: str = PLAIN) -> Recipe:
    """The small recipe of a host ("vit", "pvt", "swin") and a kind of cache, with the data and steps of the options."""
    for written, control in CONTROLS.items():
        if kind == control and (made := unwritten(recipe(options, host, written))) is not None:
            return made
    name, fields = task(options)
    found: Recipe = registry.load("recipe", f"{name}-{host}{PAPER if kind == ROWS else kind}")()
    if kind == ROWS:
        model: Any = found.model
        rows = replace(model.cache, read="sample", inference="transient")
        about = f"{found.name}, but each row reads its own cache, at inference as in training"
        found = replace(found, name=f"{name}-{host}{ROWS}", about=about, model=replace(model, cache=rows))
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


def variants(options: Options, host: str, kinds: Sequence[str]) -> JSONObject:
    """The comparison of a host with each kind of cache, a row each."""
    return trained(options, host, [recipe(options, host, kind) for kind in kinds])


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


def gains(found: Sequence[JSONObject], kinds: Sequence[str]) -> Table:
    """What each cache of some comparisons adds, in points of accuracy: to the host without it, and to its control.

    Each difference has its 95 % interval (Welch), and its p is corrected over the rows of the table (Holm).
    """
    rows = [{row["name"]: row for row in one["rows"]} for one in found]
    caches = [(of, next(iter(of)), kind) for of in rows for kind in kinds if kind == ATTENTION or kind in CONTROLS]
    none, control = (
        correct([_difference(of, host + kind, host + end) for (of, host, kind), end in zip(caches, ends, strict=True)])
        for ends in ([PLAIN for _ in caches], [CONTROLS.get(kind, kind) for _, _, kind in caches])
    )
    table = Table("What a cache adds, in points", ["", "to none", "p, none", "control", "to its control", "p, control"])
    for (_, host, kind), gain, own in zip(caches, none, control, strict=True):
        table.add(
            host + kind, *_points(gain), *((NAMES[CONTROLS[kind]], *_points(own)) if kind in CONTROLS else (None,) * 3)
        )
    return table


def _difference(rows: Mapping[str, JSONObject], name: str, reference: str) -> Difference:
    """The difference of two rows; without p for a row and itself."""
    if name == reference:
        return Difference(0.0)
    score, other = (
        Spread(row["mean"], math.nan if row["std"] is None else row["std"], row["seeds"])
        for row in (rows[name], rows[reference])
    )
    return welch(score, other)


def _points(found: Difference) -> tuple[Cell, Cell]:
    """A difference of accuracies in points with its interval, and its corrected p; None where one seed has none."""
    ends = (found.difference, *(found.interval or ()))
    first, *others = (f"{round(100 * end, 1) + 0.0:+.1f}".replace("-", "−") for end in ends)  # no −0.0
    text = f"{first} ({' to '.join(others)})" if others else first
    return text, None if math.isnan(found.p_holm) else found.p_holm


def about(options: Options, comparison: JSONObject) -> str:
    """A line for titles: data, number of updates and seeds, and the accuracy of the majority class."""
    name, _ = task(options)
    steps = recipe(options, "vit").train.steps
    seeds = comparison["rows"][0]["seeds"]
    majority = comparison["majority"]
    chance = "" if majority is None else f"; majority class: {100 * majority:.1f} %"
    return f"small models on {name} (PVT: version 2), {steps:,} updates, {seeds} seed{'s' * (seeds > 1)}{chance}"
