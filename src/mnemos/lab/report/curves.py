"""Curves of all variants: over training, and along an axis of the task, such as a distance.

A task writes the latter to result.json: "along": {"metric", "x": the name of the axis, "values": [[x, value]], "rows":
of which each value is a share, if it is one, "chance": the value of a guess, if it has one}.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mnemos import registry
from mnemos.config import from_dict
from mnemos.errors import plural
from mnemos.lab.compare.significance import wilson
from mnemos.lab.evaluate.records import number
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError

from .charts import MOST, WHOLE, Axis, Chart, chart_figure, variant
from .markup import capital, decimal, listed, missing, table
from .read import Results, finite_spread
from .run_records import OWN, RunRecord
from .shell import variant_name

_MOST, _FEWEST = 400, 20  # points of a curve
_OCTAVES = 8.0  # greatest / least value of an axis of a task from which it is drawn in octaves
_WORDS = {"valid": "validation", "train": "training"}


# --- over training: thin lines are seeds, thick lines their mean ---


def section(results: Results) -> str:
    """The figure with learning curves of all variants; "" where no run recorded two points of one."""
    runs = results.all_runs()
    panels = [(split, name) for split in _WORDS for name in dict.fromkeys([quality(results), "loss"])]
    recorded = [(split, name) for split, name in panels if any(_has(run, split, name) for run in runs)]
    charts = [curve_chart(results, *panel) for panel in recorded]
    names = [
        f"{_WORDS[split]} {name}" for (split, name), chart in zip(recorded, charts, strict=True) if not chart.empty
    ]

    # --- what the figure cannot show: values that are not finite, and quantities that no run recorded ---
    broken = []
    for run, split in ((run, split) for run in runs for split in ("train", "valid")):
        columns = getattr(run, split)
        if (bad := ~np.isfinite(columns["loss"])).any():
            first = int(columns["step"][np.argmax(bad)])
            gaps = (
                f"{run.label}: the {_WORDS[split]} loss is missing, NaN or infinite in {int(bad.sum())} of {len(bad)}"
            )
            broken.append(missing(f"{gaps} records, first at step {first:,}; the curve has gaps there."))
    if not names:
        return "".join(broken)
    # Metrics of a whole split, such as BLEU, have no value in training.
    absent = [panel for panel in panels if panel not in recorded and (panel[0] == "valid" or panel[1] == "loss")]
    if absent:
        what = listed([f"{_WORDS[split]} {name}" for split, name in absent]).replace(" and ", " or a ")
        broken.append(missing(f"No run recorded a {what}."))

    several = any(len(of_one) > 1 for of_one in results.records.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    records = sum(
        len(getattr(run, split)["step"]) for split, name in recorded for run in runs if _has(run, split, name)
    )
    thinned = " Each point of a long curve is the mean of several records."
    caption = f"{capital(listed(names))} by update. {lines}."
    caption += thinned * (records > sum(len(chart.columns["y"]) for chart in charts))
    return chart_figure(charts, f"{caption} From metrics.jsonl of {plural(len(runs), 'run')}.") + "".join(broken)


def quality(results: Results) -> str:
    """The metric that the runs are judged by; if that is the loss, the first other metric that they recorded."""
    if results.metric != "loss":
        return results.metric
    records = [getattr(run, split) for run in results.all_runs() for split in _WORDS]
    others = (name for columns in records for name in columns if name not in (*OWN, "step"))
    return next(others, "loss")


def _has(run: RunRecord, split: str, name: str) -> bool:
    columns = getattr(run, split)
    return name in columns and bool(np.isfinite(columns[name]).any())


def curve_chart(results: Results, split: str, name: str) -> Chart:
    """A quantity ("loss" or a metric) of the records of a split by update, tokens, seconds and FLOPs."""
    by_variant = {v: [run for run in results.runs_of(v) if _has(run, split, name)] for v in results.names}
    by_variant = {v: runs for v, runs in by_variant.items() if runs}
    every = [run for runs in by_variant.values() for run in runs]

    # --- tokens, seconds and FLOPs up to each record; those that a run did not record are no axis ---
    progress = {}
    for run in every:
        step, train = getattr(run, split)["step"], run.train
        progress[run.folder] = {"FLOPs": step * run.cost("update_flops")}
        for unit in ("tokens", "seconds"):
            recorded = np.isfinite(train[unit])
            progress[run.folder][unit] = np.full(len(step), np.nan)
            if recorded.any():
                updates, amounts = train["step"][recorded], train[unit][recorded]
                progress[run.folder][unit] = np.interp(step, [0, *updates], [0, *amounts])
    axes = {"updates": Axis("updates", WHOLE)}
    for unit, form in (("tokens", "~s"), ("seconds", ",~f"), ("FLOPs", "~s")):
        if all(np.isfinite(one[unit]).all() for one in progress.values()):
            axes[unit] = Axis(f"{results.unit} read" if unit == "tokens" else unit, form)

    seeds = seed_names(every)
    majority = [("majority class", results.majority)] if results.majority is not None and name == results.metric else []
    chart = Chart(
        *(f"curve-{split}-{name}", f"{capital(_WORDS[split])} {name}", f"{_WORDS[split]} {name}"),
        [variant(v, results.names.index(v)) for v in by_variant],
        list(dict.fromkeys(seeds.values())),
        list(axes.values()),
        references=majority,
    )
    most = max(_FEWEST, min(_MOST, MOST // max(len(every), 1)))
    for index, runs in enumerate(by_variant.values()):
        points = intervals([getattr(run, split)["step"] for run in runs], most)
        for run, records in zip(runs, points, strict=True):
            columns = getattr(run, split)
            values = (columns[name], columns["step"], *(progress[run.folder][unit] for unit in list(axes)[1:]))
            chart.add(index, chart.runs.index(seeds[run.folder]), *(means(one, records) for one in values))
    return chart


def intervals(steps: Sequence[np.ndarray], most: int) -> list[list[np.ndarray]]:
    """For each run of a variant, given by the steps of its records: the indices of the records that make each point.

    A point is one record where no run has more than `most`, else the mean of an interval, which the runs share over the
    steps that all have, so that their points have equal steps.
    """
    size = -(-max(map(len, steps)) // most)
    common = functools.reduce(np.intersect1d, steps) if size > 1 else np.array([])
    points = []
    for own in steps:
        shared = np.flatnonzero(np.isin(own, common))
        alone = np.flatnonzero(own > common[-1]) if len(common) else np.arange(len(own))
        split = [part for records in (shared, alone) for part in np.split(records, range(size, len(records), size))]
        points.append([part for part in split if len(part)])
    return points


def means(value: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the finite values at the indices of each part; NaN for a part without one."""
    finite = (value[part][np.isfinite(value[part])] for part in parts)
    return np.array([float(one.mean()) if len(one) else np.nan for one in finite])


def seed_names(runs: Iterable[RunRecord]) -> dict[Path, str]:
    """What the runs of variants are called, by folder: by their seeds, or by label where a seed is there twice."""
    names: dict[Path, str] = {}
    used: set[tuple[str, str]] = set()
    for run in runs:
        key = (str(run.recipe.get("name")), f"seed {run.seed}")
        names[run.folder] = run.label if key in used else key[1]
        used.add(key)
    return names


# --- along an axis of the task ---


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
        return sorted({point.x for runs in self.points.values() for _, points in runs for point in points})

    def values(self, name: str, x: float) -> list[float]:
        return [point.value for _, points in self.points.get(name, []) for point in points if point.x == x]

    def at_the_end(self) -> dict[str, float]:
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
    xs, every = by_x.xs, [run for runs in by_x.points.values() for run, _ in runs]
    seeds = seed_names(every)
    label = f"{capital(results.split)} {by_x.metric} by {by_x.x}"
    chart = Chart(
        *("along", "", f"{results.split} {by_x.metric}"),
        [variant(name, results.names.index(name)) for name in by_x.points],
        list(dict.fromkeys(seeds.values())),
        [Axis(by_x.x, "~g")],
        "points",
        logarithmic=xs[0] > 0 and xs[-1] / xs[0] >= _OCTAVES,
        ticks=xs if len(xs) <= 12 else (),
        references=[("a guess", by_x.chance)] if math.isfinite(by_x.chance) else [],
        label=label,
    )
    for index, runs in enumerate(by_x.points.values()):
        for run, points in runs:
            for x, value, rows in points:
                ends = wilson(round(value * rows), rows) if rows and len(runs) == 1 else None
                chart.add(index, chart.runs.index(seeds[run.folder]), value, x, interval=ends)

    # --- what training read along the axis, by the settings of the task, where all runs say the same ---
    trained = set()
    for run in every:
        data = run.recipe.get("data")
        here = isinstance(data, dict) and data.get("is") in registry.names("data") and "plugin" not in data
        try:
            about = here and run.result and from_dict(DataConfig, data, "data").trained_on(int(run.result.steps or 0))
        except InputError:  # settings of another version
            about = None
        trained.add(about or "")
    read = f" {trained.pop()}" if len(trained) == 1 and any(trained) else ""

    several = any(len(runs) > 1 for runs in by_x.points.values())
    marks = "marks are seeds, lines their mean" if several else "one run per variant"
    bars = " Bars are 95% intervals of the rows (Wilson)." if "low" in chart.columns else ""
    return chart_figure([chart], f"{label}; {marks}.{bars}{read} From result.json.", "wide")


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
