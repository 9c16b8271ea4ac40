"""A metric along an axis of the task, for example a distance: its figure, its table, and the end of the axis.

A task writes it to result.json by `Task.artifacts`: "along": {"metric", "x": the name of the axis, "values": [[x,
value]], "rows": the number of rows that each value is a share of, if it is one, "chance": the value of a guess, if it
has one}.
"""

import math
from typing import NamedTuple

from mnemos import registry
from mnemos.config import from_dict
from mnemos.lab.compare.significance import wilson
from mnemos.lab.evaluate.records import number
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError

from .charts import Axis, Chart, chart_figure, variant
from .curves import seed_names
from .markup import capital, decimal, table
from .read import Results, finite_spread
from .run_records import RunRecord
from .style import variant_name

_LOGARITHMIC = 8.0  # greatest / least value of an axis from which it is drawn in octaves


class Point(NamedTuple):
    """rows: those that the value is a share of; 0: it is none."""

    x: float
    value: float
    rows: int


class MetricByX(NamedTuple):
    """What the runs of a comparison measured along an axis: by variant, each run with its points."""

    metric: str
    x: str
    chance: float
    points: dict[str, list[tuple[RunRecord, list[Point]]]]

    @property
    def xs(self) -> list[float]:
        """Every x, sorted."""
        return sorted({point.x for runs in self.points.values() for _, points in runs for point in points})

    def values(self, name: str, x: float) -> list[float]:
        """The values of a variant's runs at x."""
        return [point.value for _, points in self.points.get(name, []) for point in points if point.x == x]

    def at_the_end(self) -> dict[str, float]:
        """The mean at the greatest x of each variant that has one."""
        values = {name: self.values(name, self.xs[-1]) for name in self.points}
        return {name: finite_spread(one).mean for name, one in values.items() if one}


def read_by_x(results: Results) -> MetricByX | None:
    """What the runs measured along the axis of the first run that has one; runs with another axis are left out."""
    by_x: MetricByX | None = None
    for name in results.names:
        for run in results.runs_of(name):
            along, points = run.artifacts.get("along") or {}, _points(run)
            if not points:
                continue
            if by_x is None:
                chance = number(along.get("chance"), run.label, "along.chance")
                by_x = MetricByX(str(along.get("metric")), str(along.get("x")), chance, {})
            if (along.get("metric"), along.get("x")) == (by_x.metric, by_x.x):
                by_x.points.setdefault(name, []).append((run, points))
    return by_x


def _points(run: RunRecord) -> list[Point]:
    along = run.artifacts.get("along")
    if not isinstance(along, dict):
        return []
    values, rows = along["values"], along.get("rows") or []
    counts = rows if len(rows) == len(values) else [0] * len(values)
    return [Point(float(x), float(value), int(n)) for (x, value), n in zip(values, counts, strict=True)]


def rows_by_x(run: RunRecord, metric: str) -> int:
    """The rows that a run's axis counts in shares of them; 0 without an axis of the metric, or without counts."""
    along = run.artifacts.get("along")
    same = isinstance(along, dict) and along.get("metric") == metric
    return sum(point.rows for point in _points(run)) if same else 0


def by_x_figure(results: Results) -> str:
    """The metric along the axis: a line for each variant, a mark for each seed; "" if no run measured one."""
    if (by_x := read_by_x(results)) is None:
        return ""
    xs = by_x.xs
    seeds = seed_names(run for runs in by_x.points.values() for run, _ in runs)
    label = f"{capital(results.split)} {by_x.metric} by {by_x.x}"
    chart = Chart(
        *("along", "", f"{results.split} {by_x.metric}"),
        [variant(name, results.names.index(name)) for name in by_x.points],
        list(dict.fromkeys(seeds.values())),
        [Axis(by_x.x, "~g")],
        "points",
        logarithmic=xs[0] > 0 and xs[-1] / xs[0] >= _LOGARITHMIC,
        ticks=xs if len(xs) <= 12 else (),
        references=[("a guess", by_x.chance)] if math.isfinite(by_x.chance) else [],
        label=label,
    )
    several = any(len(runs) > 1 for runs in by_x.points.values())
    for index, runs in enumerate(by_x.points.values()):
        for run, points in runs:
            for x, value, rows in points:
                ends = wilson(round(value * rows), rows) if rows and len(runs) == 1 else None
                chart.add(index, chart.runs.index(seeds[run.label]), value, x, interval=ends)
    marks = "marks are seeds, lines their mean" if several else "one run per variant"
    bars = " Bars are 95% intervals of the rows (Wilson)." if "low" in chart.columns else ""
    return chart_figure([chart], f"{label}; {marks}.{bars}{_trained_on(by_x)} From result.json.", "wide")


def _trained_on(by_x: MetricByX) -> str:
    """What training read along the axis, by the settings of the task; "" where it does not say so, or runs differ."""
    said = set()
    for run in (run for runs in by_x.points.values() for run, _ in runs):
        data = run.recipe.get("data")
        known = isinstance(data, dict) and data.get("is") in registry.names("data") and "plugin" not in data
        if not known or run.result is None:
            return ""
        try:
            said.add(from_dict(DataConfig, data, "data").trained_on(int(run.result.steps or 0)))
        except InputError:  # settings of another version
            return ""
    return f" {said.pop()}" if len(said) == 1 and any(said) else ""


def by_x_table(results: Results) -> str:
    """The metric along an axis in numbers; "" if no run measured one."""
    if (by_x := read_by_x(results)) is None:
        return ""

    def cell(name: str, x: float) -> str:
        mean, std, _ = finite_spread(by_x.values(name, x))
        return decimal(mean) + (f" ± {decimal(std)}" if math.isfinite(std) else "")

    rows = [[variant_name(results.names.index(name), name), *(cell(name, x) for x in by_x.xs)] for name in by_x.points]
    score = f"{capital(results.split)} {by_x.metric} by {by_x.x}"
    caption = f"{score}, in numbers: mean ± sample standard deviation over seeds."
    return table(caption, ["variant", *(f"{x:g}" for x in by_x.xs)], rows)
