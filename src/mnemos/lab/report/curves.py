"""Curves of all variants: loss and metric by step, and a metric along an axis of the task.

In learning curves thin lines are seeds, thick lines their mean. An axis of the task is, for example, a distance: a task
writes it to result.json by `Task.artifacts`: "along": {"metric", "x": the name of the axis, "values": [[x, value]],
"chance": the value of a guess, if it has one}.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mnemos.lab.evaluate.records import number
from mnemos.types import JSONObject

from .markup import capital, decimal, escape, figure, listed, missing, plural, table
from .read import Results, finite_spread
from .run_records import OWN, Columns, RunRecord
from .style import MUTED, curve, marker, nothing, panel, steps_axis, thin, variant_colour, variant_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOGARITHMIC = 8.0  # greatest / least value of an axis from which it is drawn in octaves
_WORDS = {"valid": "validation", "train": "training"}


def section(results: Results) -> str:
    """The figure with learning curves of all variants, or a line that says there are none."""
    wanted = [panel for panel in _panels(results) if recorded(results, *panel)]
    if not wanted:
        return missing("No run recorded a loss or a metric, so there is no curve to draw.")
    panels = [
        panel(
            f"curve-{kind}-{name}",
            title(kind, name),
            partial(draw, results=results, kind=kind, name=name),
            x="updates",
        )
        for kind, name in wanted
    ]
    keys = variant_legend(results.names, [name for name in results.names if results.runs_of(name)])
    return figure(panels, _caption(results, wanted), legend=keys) + "".join(
        missing(line) for line in _notes(results, wanted)
    )


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


def draw(axes: "Axes", results: Results, kind: str, name: str) -> None:
    """One panel: `name` ("loss" or a metric) of the `kind` ("train", "valid") records of every variant."""
    steps_axis(axes)
    for index, label in enumerate(results.names):
        series = [getattr(run, kind) for run in results.runs_of(label)]
        series = [s for s in series if _has(s, name)]
        colour = variant_colour(index)
        if len(series) > 1:
            for one in series:
                curve(axes, *thin(one["step"], one[name]), color=colour, linewidth=0.6, alpha=0.45)
        step, value = mean_curve(series, name)
        few: JSONObject = {"marker": marker(index), "markersize": 3.4} if len(step) <= 25 else {}
        curve(axes, *thin(step, value), color=colour, **few)
    if not axes.lines:
        nothing(axes, f"no {name} recorded")
    elif name == results.metric and results.majority is not None:
        axes.axhline(results.majority, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            "majority class",
            (1, results.majority),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED[0],
            fontsize=8,
        )


def mean_curve(series: list[Columns], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds at the steps that every seed recorded; NaN where one value is not finite."""
    if not series:
        return np.array([]), np.array([])
    common = series[0]["step"]
    for one in series[1:]:
        common = np.intersect1d(common, one["step"])
    values = np.stack([one[name][np.isin(one["step"], common)] for one in series])
    return common, np.where(np.isfinite(values).all(0), values.sum(0) / len(series), np.nan)


def recorded(results: Results, kind: str, name: str) -> bool:
    """Whether any run recorded the quantity in its records of this kind."""
    return any(_has(getattr(run, kind), name) for run in results.all_runs())


def _has(columns: Columns, name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _caption(results: Results, wanted: list[tuple[str, str]]) -> str:
    several = any(len(runs) > 1 for runs in results.records.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    majority = ""
    if results.majority is not None and any(name == results.metric for _, name in wanted):
        majority = " The dotted line is the share of the most frequent class."
    what = capital(listed([f"{_WORDS[kind]} {name}" for kind, name in wanted]))
    long = any(len(run.train["step"]) > 400 for run in results.all_runs())
    means = " Long curves are drawn as means over 400 intervals." if long else ""
    source = f"From metrics.jsonl of {plural(len(results.all_runs()), 'run')}."
    shown = results.about and any(name == results.metric for _, name in wanted)
    about = f" {capital(results.metric)}: {results.about}" if shown else ""
    return f"{what} by update. {lines}.{majority}{about}{means} {source}"


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


def along_section(results: Results) -> str:
    """The curve and the table; "" if no run measured a metric along an axis."""
    found = read_along(results)
    if found is None:
        return ""
    drawn = panel(
        "along", f"Test {found.metric}", lambda axes: draw_along(axes, results, found), size=(5.2, 2.6), x=found.x
    )
    keys = variant_legend(results.names, found.values)
    chance = " The dotted line is a guess." if math.isfinite(found.chance) else ""
    caption = f"Test {found.metric} by {found.x}; dots are seeds, lines their mean.{chance} From result.json."
    return figure([drawn], caption, kind="wide", legend=keys) + _table(results, found)


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
                for at, value in _points(one["values"], run):
                    found.values.setdefault(name, {}).setdefault(at, []).append(value)
    return found if found and found.values else None


def _points(values: list, run: RunRecord) -> list[tuple[float, float]]:
    pairs = [pair for pair in values if isinstance(pair, list) and len(pair) == 2]
    return [(number(at, run.label, "along.values"), number(one, run.label, "along.values")) for at, one in pairs]


def draw_along(axes: "Axes", results: Results, found: Along) -> None:
    """A line per variant through the means, and a dot per seed."""
    places = found.places
    if places[0] > 0 and places[-1] / places[0] >= _LOGARITHMIC:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{at:g}" for at in places])
    axes.minorticks_off()
    for name, points in found.values.items():
        index = results.names.index(name)
        colour, at = variant_colour(index), sorted(points)
        curve(axes, np.array(at), np.array([finite_spread(points[x]).mean for x in at]), color=colour)
        for x in at:
            axes.plot([x] * len(points[x]), points[x], marker(index), color=colour, markersize=3.4)
    if math.isfinite(found.chance):
        axes.axhline(found.chance, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))


def _table(results: Results, found: Along) -> str:
    rows = [
        [escape(name), *(_mean(points.get(at, [])) for at in found.places)]
        for name in results.names
        if (points := found.values.get(name))
    ]
    caption = f"The same in numbers: test {found.metric}, mean ± sample standard deviation over seeds."
    return table(caption, [found.x, *(f"{at:g}" for at in found.places)], rows)


def _mean(values: list[float]) -> str:
    mean, std, _ = finite_spread(values)
    return decimal(mean) + (f" ± {decimal(std)}" if math.isfinite(std) else "")
