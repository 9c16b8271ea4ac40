"""Curves of all variants: loss and metric by step, and a metric along an axis of the task.

In learning curves thin lines are seeds, thick lines their mean. An axis of the task is, for example, a distance: a task
writes it to result.json by `Task.artifacts`: "along": {"metric", "x": the name of the axis, "values": [[x, value]],
"rows": the number of rows that each value is a share of, if it is one, "chance": the value of a guess, if it has one}.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mnemos import registry
from mnemos.config import from_dict
from mnemos.lab.compare.significance import wilson
from mnemos.lab.evaluate.records import number
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, JSONObject

from .charts import MOST, Axis, Chart, arm, chart_figure
from .markup import capital, decimal, listed, missing, plural, table
from .read import Results, finite_spread
from .run_records import OWN, Columns, RunRecord
from .style import variant_name

_LOGARITHMIC = 8.0  # greatest / least value of an axis from which it is drawn in octaves
_MOST, _FEWEST = 400, 20  # points of a curve
_WORDS = {"valid": "validation", "train": "training"}


def section(results: Results) -> str:
    """The figure with learning curves of all variants; "" where no run recorded two points of one."""
    known = [one for one in _panels(results) if recorded(results, *one)]
    drawn = [curve_chart(results, *one) for one in known]
    wanted = [one for one, chart in zip(known, drawn, strict=True) if not chart.empty]
    notes = _notes(results, known)
    if not wanted:
        return "".join(missing(line) for line in notes if line.startswith(tuple(_labels(results))))
    records = sum(len(getattr(run, kind)["step"]) for kind, name in known for run in _runs(results, kind, name))
    long = records > sum(len(chart.columns["y"]) for chart in drawn)
    return chart_figure(drawn, _caption(results, wanted, long)) + "".join(map(missing, notes))


def _labels(results: Results) -> list[str]:
    return [f"{run.label}:" for run in results.all_runs()]


def curve_chart(results: Results, kind: str, name: str) -> Chart:
    """A quantity ("loss" or a metric) of one `kind` ("train", "valid") of records by update, tokens, seconds, FLOPs."""
    found = [
        (index, run, columns)
        for index, label in enumerate(results.names)
        for run in results.runs_of(label)
        if _has(columns := getattr(run, kind), name)
    ]
    axes = {"updates": Axis("updates", ",.0f")}
    progress = [(place, at_steps(run, columns["step"])) for place, (_, run, columns) in enumerate(found)]
    for unit, form in (("tokens", "~s"), ("seconds", ",~f"), ("FLOPs", "~s")):
        if progress and all(np.isfinite(known[unit]).all() for _, known in progress):
            axes[unit] = Axis({"tokens": f"{results.unit} read"}.get(unit, unit), form)
    arms = sorted({index for index, _, _ in found})
    seeds = seed_names(run for _, run, _ in found)
    majority = [("majority class", results.majority)] if results.majority is not None and name == results.metric else []
    chart = Chart(
        f"curve-{kind}-{name}",
        title(kind, name),
        f"{_WORDS[kind]} {name}",
        [arm(results.names[index], index) for index in arms],
        list(dict.fromkeys(seeds.values())),
        list(axes.values()),
        references=majority,
    )
    most = max(_FEWEST, min(_MOST, MOST // max(len(found), 1)))
    for place, arm_index in enumerate(arms):
        members = [one for one in zip(found, progress, strict=True) if one[0][0] == arm_index]
        parts = intervals([columns["step"] for (_, _, columns), _ in members], most)
        for ((_, run, columns), (_, known)), own in zip(members, parts, strict=True):
            values = (columns[name], columns["step"], *(known[unit] for unit in list(axes)[1:]))
            for point in zip(*(means(one, own) for one in values), strict=True):
                chart.add(place, chart.runs.index(seeds[run.label]), *map(float, point))
    return chart


def intervals(steps: Sequence[np.ndarray], most: int) -> list[list[np.ndarray]]:
    """For each run of an arm, given by the steps of its records: the places of the records that make each point.

    A point is one record where no run has more than `most`. Else it is the mean of an interval of records. The runs
    share the intervals over the steps that all of them have, so that their points have equal steps.
    """
    longest = max(map(len, steps))
    size = -(-longest // most)
    common = functools.reduce(np.intersect1d, steps) if size > 1 else np.array([])
    found = []
    for own in steps:
        shared = np.flatnonzero(np.isin(own, common))
        alone = np.flatnonzero(own > common[-1]) if len(common) else np.arange(len(own))
        cuts = [np.arange(size, len(places), size) for places in (shared, alone)]
        split = [part for places, cut in zip((shared, alone), cuts, strict=True) for part in np.split(places, cut)]
        found.append([part for part in split if len(part)])
    return found


def means(value: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the finite values at the places of each part; NaN for a part without one."""
    found = (value[part][np.isfinite(value[part])] for part in parts)
    return np.array([float(one.mean()) if len(one) else np.nan for one in found])


def seed_names(runs: Iterable[RunRecord]) -> dict[str, str]:
    """What the runs of an arm are called, by label: by their seeds, or by label where a seed is there twice."""
    named: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    for run in runs:
        key = (str(run.recipe.get("name")), f"seed {run.seed}")
        named[run.label] = run.label if key in seen else key[1]
        seen.add(key)
    return named


def at_steps(run: RunRecord, step: np.ndarray) -> Columns:
    """Tokens, seconds and FLOPs of the updates of a run up to some steps; NaN where it did not record them."""
    train, found = run.train, {}
    for name in ("tokens", "seconds"):
        known = np.isfinite(train[name])
        found[name] = np.full(len(step), np.nan)
        if known.any():
            found[name] = np.interp(step, [0, *train["step"][known]], [0, *train[name][known]])
    return {**found, "FLOPs": step * run.cost("update_flops")}


def _panels(results: Results) -> list[tuple[str, str]]:
    """(kind of record, quantity) of every possible panel: the metric that the runs are judged by, and the loss."""
    names = dict.fromkeys([quality(results), "loss"])
    return [(kind, name) for kind in _WORDS for name in names]


def quality(results: Results) -> str:
    """The metric that the runs are judged by; if that is the loss, the first other metric that they recorded."""
    if results.metric != "loss":
        return results.metric
    records = [getattr(run, kind) for run in results.all_runs() for kind in _WORDS]
    others = (name for columns in records for name in columns if name not in (*OWN, "step"))
    return next(others, "loss")


def title(kind: str, name: str) -> str:
    """Validation accuracy, training loss, …"""
    return f"{capital(_WORDS[kind])} {name}"


def recorded(results: Results, kind: str, name: str) -> bool:
    """Whether any run recorded the quantity in its records of this kind."""
    return bool(_runs(results, kind, name))


def _runs(results: Results, kind: str, name: str) -> list[RunRecord]:
    return [run for run in results.all_runs() if _has(getattr(run, kind), name)]


def _has(columns: Columns, name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _caption(results: Results, wanted: list[tuple[str, str]], long: bool) -> str:
    several = any(len(runs) > 1 for runs in results.records.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    what = capital(listed([f"{_WORDS[kind]} {name}" for kind, name in wanted]))
    thinned = " Each point of a long curve is the mean of several records." if long else ""
    source = f"From metrics.jsonl of {plural(len(results.all_runs()), 'run')}."
    return f"{what} by update. {lines}.{thinned} {source}"


def _notes(results: Results, wanted: list[tuple[str, str]]) -> list[str]:
    """What the figure cannot show: values that are not finite, and quantities that no run recorded."""
    notes = []
    for run in results.all_runs():
        notes += [line for kind in ("train", "valid") if (line := _broken(run, kind))]
    # Metrics of a whole split, such as BLEU, have no value in training.
    absent = [
        f"{_WORDS[kind]} {name}"
        for kind, name in _panels(results)
        if (kind, name) not in wanted and (kind == "valid" or name == "loss")
    ]
    if absent:
        notes.append(f"No run recorded a {listed(absent).replace(' and ', ' or a ')}.")
    return notes


def _broken(run: RunRecord, kind: str) -> str:
    columns = getattr(run, kind)
    loss = columns["loss"]
    bad = ~np.isfinite(loss)
    if not bad.any():
        return ""
    first = int(columns["step"][np.argmax(bad)])
    return (
        f"{run.label}: the {_WORDS[kind]} loss is missing, NaN or infinite in {int(bad.sum())} of {len(loss)} records, "
        f"first at step {first:,}; the curve has gaps there."
    )


def extent(values: np.ndarray, least: float) -> tuple[float, float]:
    """Axis limits that include all finite values and span at least `least`, so that noise is not magnified."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    pad = max(0.06 * (high - low), (least - (high - low)) / 2)
    return low - pad, high + pad


class Along(NamedTuple):
    """What the runs of a comparison measured along an axis: {variant: {x: its values, one per run}}."""

    metric: str
    x: str
    chance: float
    values: dict[str, dict[float, list[float]]]

    @property
    def places(self) -> list[float]:
        """Every x, sorted."""
        return sorted({at for points in self.values.values() for at in points})


def along_figure(results: Results) -> str:
    """The metric along an axis of the task; "" if no run measured one."""
    found = read_along(results)
    if found is None:
        return ""
    chart = along_chart(results, found)
    bars = " Bars are 95% intervals of the rows (Wilson)." if "low" in chart.columns else ""
    several = any(len(results.runs_of(name)) > 1 for name in found.values)
    marks = "marks are seeds, lines their mean" if several else "one run per variant"
    caption = f"{chart.label}; {marks}.{bars}{_trained_on(results, found)} From result.json."
    return chart_figure([chart], caption, "wide")


def _trained_on(results: Results, found: "Along") -> str:
    """What training read along the axis, by the settings of the task; "" where it does not say so, or runs differ."""
    said = set()
    for run in (run for name in found.values for run in results.runs_of(name)):
        data = run.recipe.get("data")
        known = isinstance(data, dict) and data.get("is") in registry.names("data") and "plugin" not in data
        if not known or run.result is None:
            return ""
        try:
            said.add(from_dict(DataConfig, data, "data").trained_on(int(run.result.steps or 0)))
        except InputError:  # settings of another version
            return ""
    return f" {said.pop()}" if len(said) == 1 and any(said) else ""


def along_table(results: Results) -> str:
    """The metric along an axis in numbers; "" if no run measured one."""
    return "" if (found := read_along(results)) is None else _table(results, found)


def along_chart(results: Results, found: "Along") -> Chart:
    """The metric along the axis: a line for each variant, a mark for each seed."""
    places = found.places
    runs = [run for name in found.values for run in results.runs_of(name)]
    seeds = seed_names(runs)
    chart = Chart(
        "along",
        "",
        f"{results.split} {found.metric}",
        [arm(name, results.names.index(name)) for name in found.values],
        list(dict.fromkeys(seeds.values())),
        [Axis(found.x, "~g")],
        "points",
        logarithmic=places[0] > 0 and places[-1] / places[0] >= _LOGARITHMIC,
        ticks=places if len(places) <= 12 else (),
        references=[("a guess", found.chance)] if math.isfinite(found.chance) else [],
        label=f"{capital(results.split)} {found.metric} by {found.x}",
    )
    for place, name in enumerate(found.values):
        for run in results.runs_of(name):
            one = run.artifacts.get("along")
            if not isinstance(one, dict) or not isinstance(one.get("values"), list):
                continue
            if (one.get("metric"), one.get("x")) == (found.metric, found.x):
                for at, value, rows in _points(one, run):
                    ends = wilson(round(value * rows), rows) if rows and len(results.runs_of(name)) == 1 else None
                    chart.add(place, chart.runs.index(seeds[run.label]), value, at, interval=ends)
    return chart


def read_along(results: Results) -> Along | None:
    """What the runs measured along the axis of the first run that has one; runs with another axis are left out."""
    found: Along | None = None
    for name in results.names:
        for run in results.runs_of(name):
            one = run.artifacts.get("along")
            if not isinstance(one, dict) or not isinstance(one.get("values"), list):
                continue
            if found is None:
                chance = number(one.get("chance"), run.label, "along.chance")
                found = Along(str(one.get("metric")), str(one.get("x")), chance, {})
            if (one.get("metric"), one.get("x")) == (found.metric, found.x):
                for at, value, _ in _points(one, run):
                    found.values.setdefault(name, {}).setdefault(at, []).append(value)
    return found if found and found.values else None


def along_rows(run: RunRecord, metric: str) -> int:
    """The rows that a run's axis counts in shares of them; 0 without an axis of the metric, or without counts."""
    one = run.artifacts.get("along")
    if not isinstance(one, dict) or one.get("metric") != metric or not isinstance(one.get("values"), list):
        return 0
    return sum(count for _, _, count in _points(one, run))


def _points(along: JSONObject, run: RunRecord) -> list[tuple[float, float, int]]:
    """(x, value, the rows that it is a share of or 0)."""
    values = [pair for pair in along["values"] if isinstance(pair, list) and len(pair) == 2]
    rows = along.get("rows")
    counts = rows if isinstance(rows, list) and len(rows) == len(values) else [0] * len(values)
    return [
        (number(at, run.label, "along.values"), number(one, run.label, "along.values"), int(count))
        for (at, one), count in zip(values, counts, strict=True)
    ]


def _table(results: Results, found: Along) -> str:
    rows = [
        [variant_name(results.names.index(name), name), *(_mean(points.get(at, [])) for at in found.places)]
        for name in results.names
        if (points := found.values.get(name))
    ]
    score = f"{capital(results.split)} {found.metric} by {found.x}"
    caption = f"{score}, in numbers: mean ± sample standard deviation over seeds."
    return table(caption, ["variant", *(f"{at:g}" for at in found.places)], rows)


def _mean(values: list[float]) -> str:
    mean, std, _ = finite_spread(values)
    return decimal(mean) + (f" ± {decimal(std)}" if math.isfinite(std) else "")
