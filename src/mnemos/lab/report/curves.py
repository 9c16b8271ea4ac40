"""Learning curves: the loss and a metric by step; thin lines are seeds, thick lines their mean."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mnemos.types import JSONObject

from .markup import capital, figure, legend, listed, missing, plural
from .read_metrics import OWN
from .results import Columns, Comparison, RunRecord
from .style import MARKERS, MUTED, VARIANTS, curve, nothing, panel, steps_axis, thin, variant_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WORDS = {"valid": "validation", "train": "training"}


def section(comparison: Comparison) -> str:
    """The figure with learning curves of all variants, or a line that says there are none."""
    wanted = [panel for panel in _panels(comparison) if recorded(comparison, *panel)]
    if not wanted:
        return missing("No run recorded a loss or a metric, so there is no curve to draw.")
    panels = [
        panel(
            f"curve-{kind}-{name}",
            title(kind, name),
            partial(draw, comparison=comparison, kind=kind, name=name),
            x="updates",
        )
        for kind, name in wanted
    ]
    drawn = [name for name in comparison.variants if comparison.runs.get(name)]
    keys = legend([(f"variant-{comparison.variants.index(name) % len(VARIANTS)}", name) for name in drawn])
    return figure(panels, _caption(comparison, wanted), legend=keys) + "".join(
        missing(line) for line in _notes(comparison, wanted)
    )


def _panels(comparison: Comparison) -> list[tuple[str, str]]:
    """(kind of record, quantity) of every possible panel: the metric that the runs are judged by, and the loss."""
    names = dict.fromkeys([quality(comparison), "loss"])
    return [(kind, name) for kind in _WORDS for name in names]


def quality(comparison: Comparison) -> str:
    """The metric that the runs are judged by; if that is the loss, the first other metric that they recorded."""
    if comparison.metric != "loss":
        return comparison.metric
    records = [getattr(run, kind) for run in comparison.all_runs() for kind in _WORDS]
    others = (name for columns in records for name in columns if name not in (*OWN, "step"))
    return next(others, "loss")


def title(kind: str, name: str) -> str:
    """Validation accuracy, training loss, …"""
    return f"{capital(_WORDS[kind])} {name}"


def draw(axes: "Axes", comparison: Comparison, kind: str, name: str) -> None:
    """One panel: `name` ("loss" or a metric) of the `kind` ("train", "valid") records of every variant."""
    steps_axis(axes)
    for index, label in enumerate(comparison.variants):
        series = [getattr(run, kind) for run in comparison.runs.get(label, ())]
        series = [s for s in series if _has(s, name)]
        colour, marker = variant_colour(index), MARKERS[index % len(MARKERS)]
        if len(series) > 1:
            for one in series:
                curve(axes, *thin(one["step"], one[name]), color=colour, linewidth=0.6, alpha=0.45)
        step, value = mean_curve(series, name)
        few: JSONObject = {"marker": marker, "markersize": 3.4} if len(step) <= 25 else {}
        curve(axes, *thin(step, value), color=colour, **few)
    if not axes.lines:
        nothing(axes, f"no {name} recorded")
    elif name == comparison.metric and comparison.majority is not None:
        axes.axhline(comparison.majority, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(
            "majority class",
            (1, comparison.majority),
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


def recorded(comparison: Comparison, kind: str, name: str) -> bool:
    """Whether any run recorded the quantity in its records of this kind."""
    return any(_has(getattr(run, kind), name) for run in comparison.all_runs())


def _has(columns: Columns, name: str) -> bool:
    return name in columns and bool(np.isfinite(columns[name]).any())


def _caption(comparison: Comparison, wanted: list[tuple[str, str]]) -> str:
    several = any(len(runs) > 1 for runs in comparison.runs.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    majority = ""
    if comparison.majority is not None and any(name == comparison.metric for _, name in wanted):
        majority = " The dotted line is the share of the most frequent class."
    what = capital(listed([f"{_WORDS[kind]} {name}" for kind, name in wanted]))
    long = any(len(run.train["step"]) > 400 for run in comparison.all_runs())
    means = " Long curves are drawn as means over 400 intervals." if long else ""
    source = f"From metrics.jsonl of {plural(len(comparison.all_runs()), 'run')}."
    shown = comparison.about and any(name == comparison.metric for _, name in wanted)
    about = f" {capital(comparison.metric)}: {comparison.about}" if shown else ""
    return f"{what} by update. {lines}.{majority}{about}{means} {source}"


def _notes(comparison: Comparison, wanted: list[tuple[str, str]]) -> list[str]:
    """What the figure cannot show: values that are not finite, and quantities that no run recorded."""
    notes = []
    for run in comparison.all_runs():
        notes += [line for kind in ("train", "valid") if (line := _broken(run, kind))]
    # Metrics of a whole split, such as BLEU, have no value in training.
    absent = [
        f"{_WORDS[kind]} {name}"
        for kind, name in _panels(comparison)
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
