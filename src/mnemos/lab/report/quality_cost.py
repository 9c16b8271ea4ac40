"""Quality against cost: each variant's score against the time and the FLOPs of its training, and on the way there."""

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mnemos.lab.compare.comparison import UNNAMED_UNIT
from mnemos.types import JSONObject

from .curves import mean_curve, quality
from .differences import mean_interval
from .markup import capital, count, duration, escape, figure, legend, operations, table
from .read_metrics import number
from .results import Columns, Comparison, Row, RunRecord, spread
from .style import MARKERS, ROUND, VARIANTS, curve, panel, variant_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SECONDS, _FLOPS = "seconds", "FLOPs"


def section(comparison: Comparison) -> str:
    """What each variant spent on its updates, and its score against that; "" for one variant, or without finished runs.

    Training FLOPs are missing in results of older versions.
    """
    rows = [row for row in comparison.rows if math.isfinite(row.mean) and math.isfinite(_steps(comparison, row))]
    if len(rows) < 2:
        return ""
    axes = [_SECONDS] + [_FLOPS] * any(math.isfinite(_cost(comparison, row, _FLOPS)) for row in rows)
    metric = comparison.metric
    panels = [
        panel(
            f"cost-{unit}",
            f"{capital(comparison.scored)} {metric} against {'time' if unit == _SECONDS else 'training FLOPs'}",
            partial(_draw_scores, comparison=comparison, rows=rows, unit=unit),
            x="seconds of updates" if unit == _SECONDS else "training FLOPs",
        )
        for unit in axes
    ]
    name = quality(comparison)
    if any(len(_course(comparison, row, name)[0]) > 1 for row in rows):
        panels.append(
            panel(
                "cost-course",
                f"Validation {name} in the course of training",
                partial(_draw_course, comparison=comparison, rows=rows, name=name),
                x="seconds of updates",
            )
        )
    keys = [(f"variant-{comparison.variants.index(row.name) % len(VARIANTS)}", row.name) for row in rows]
    bars = ", with the 95% interval" if any(math.isfinite(mean_interval(row)[0]) for row in rows) else ""
    caption = (
        f"Quality against cost: the mean {comparison.scored} {metric}{bars}, against the seconds of updates and the "
        "training FLOPs of a run (forward, backward, and the forwards that memory replay computes again; a multiply-"
        "add is 2). Seconds are those that passed, so they grow on a busy machine. From result.json and metrics.jsonl."
    )
    return _spent(comparison, rows) + "\n" + figure(panels, caption, legend=legend(keys))


def _spent(comparison: Comparison, rows: list[Row]) -> str:
    unit = next((str(u) for run in comparison.all_runs() if (u := (run.result or {}).get("unit"))), UNNAMED_UNIT)
    head = ["variant", "updates", f"{unit} read", "training FLOPs", "time", "time per update", "learning rate"]
    cells = []
    for row in rows:
        steps = _steps(comparison, row)
        index = comparison.variants.index(row.name)
        cells.append(
            [
                f'<i class="dot" style="color:var(--variant-{index % len(VARIANTS)})"></i>{escape(row.name)}',
                count(steps),
                count(_mean(comparison, row, "tokens")),
                operations(_cost(comparison, row, _FLOPS)),
                duration(row.seconds),
                duration(row.seconds / steps),
                _rate(comparison, row),
            ]
        )
    equal = f"{comparison.equal[0].upper()}{comparison.equal[1:]}. " if comparison.equal else ""
    caption = (
        f"What a run spent. {equal}What updates read is counted without padding, and twice if two updates read it. "
        "Time: the seconds of all updates that passed. Means over seeds. From result.json."
    )
    return table(caption, head, cells)


def _rate(comparison: Comparison, row: Row) -> str:
    """The learning rate of a variant's runs."""
    optim = [run.recipe.get("optim") for run in comparison.runs.get(row.name, ())]
    rates = {one.get("lr") for one in optim if isinstance(one, dict)}
    rate = rates.pop() if len(rates) == 1 else None
    return f"{rate:.2g}" if isinstance(rate, float) else "–"


def _mean(comparison: Comparison, row: Row, key: str) -> float:
    """The mean of a number of result.json over the finished runs of a variant; NaN if no run has it."""
    runs = comparison.runs.get(row.name, ())
    return spread([number((run.result or {}).get(key), run.label, key) for run in runs])[0]


def _steps(comparison: Comparison, row: Row) -> float:
    return _mean(comparison, row, "steps")


def _cost(comparison: Comparison, row: Row, unit: str) -> float:
    """Seconds or FLOPs of all updates of a run."""
    return row.seconds if unit == _SECONDS else _mean(comparison, row, "update_flops") * _steps(comparison, row)


def _draw_scores(axes: "Axes", comparison: Comparison, rows: list[Row], unit: str) -> None:
    """A point with its interval for each variant, on a logarithmic axis of cost."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_xscale("log")
    for row in rows:
        cost = _cost(comparison, row, unit)
        if not (math.isfinite(cost) and cost > 0):
            continue
        index = comparison.variants.index(row.name)
        low, high = mean_interval(row)
        ends = [[row.mean - low], [high - row.mean]] if math.isfinite(low) else None
        look: JSONObject = {"color": variant_colour(index), "marker": MARKERS[index % len(MARKERS)], "linewidth": 1.0}
        axes.errorbar([cost], [row.mean], yerr=ends, markersize=5, capsize=2, linestyle="none", **look)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, high / 4), high * 1.1)  # so that ticks fall within equal costs
    axes.xaxis.set_major_locator(LogLocator(subs=ROUND[:-1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.3g}" if unit == _SECONDS else operations(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.grid(axis="y")


def _draw_course(axes: "Axes", comparison: Comparison, rows: list[Row], name: str) -> None:
    """The mean over seeds of a metric on the validation split against the seconds of updates."""
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        index = comparison.variants.index(row.name)
        seconds, value = _course(comparison, row, name)
        curve(axes, seconds, value, color=variant_colour(index), marker=MARKERS[index % len(MARKERS)], markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.grid(axis="y")


def _course(comparison: Comparison, row: Row, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of updates, mean of the metric) at the evaluations that every seed has."""
    runs = [run for run in comparison.runs.get(row.name, ()) if name in run.valid and len(run.valid["step"])]
    step, value = mean_curve([run.valid for run in runs], name)
    if not len(step):
        return step, value
    return np.mean([_seconds_at(run, step) for run in runs], axis=0), value


def _seconds_at(run: RunRecord, step: np.ndarray) -> np.ndarray:
    """Seconds of updates at some steps, between the lines of training."""
    train: Columns = run.train
    known = np.isfinite(train["seconds"]) if "seconds" in train else np.zeros(len(train["step"]), bool)
    if not known.any():
        return np.full(len(step), np.nan)
    return np.interp(step, [0, *train["step"][known]], [0, *train["seconds"][known]])
