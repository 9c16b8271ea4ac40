"""The comparison in numbers: every variant's metric and cost, the controls, and one dot per seed."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnemos.types import JSONObject

from .differences import effect, state_controls
from .markup import capital, count, decimal, duration, escape, figure, memory, missing, operations, plural, short, table
from .origins import flat
from .read_metrics import number
from .results import Comparison, Row, spread
from .shown import shown_table
from .style import INK, MUTED, RULE, VARIANTS, panel, variant_colour
from .verdict import mean_and_spread

_ACROSS = 8  # metrics in columns; more are rows
_NAME = 36  # letters of a variant's name beside the marks of its seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTROLS = {
    "emptied": "cache emptied",
    "exchanged": "cache exchanged for noise",
    "closed": "gate closed",
}


def section(comparison: Comparison) -> str:
    """Tables of variants, of their other metrics and of what their seeds show; the controls.

    Lines say what is missing.
    """
    return "\n".join(
        filter(
            None,
            [
                _variants(comparison),
                _other_metrics(comparison),
                shown_table(comparison),
                _untested(comparison),
                _controls(comparison),
            ],
        )
    )


def _other_metrics(comparison: Comparison) -> str:
    """The other metrics of the test split, and how they are computed; "" for a task of one metric."""
    results = [run.result for run in comparison.all_runs() if run.result]
    described: JSONObject = next((found for one in results if isinstance(found := one.get("metrics"), dict)), {})
    names = [name for name in described if name not in (comparison.metric, "loss")]
    rows, variants = [], []
    for i, row in enumerate(comparison.rows):
        values = [spread([run.tested(name) for run in comparison.runs.get(row.name, ())]) for name in names]
        if any(n for _, _, n in values):
            variants.append(row.name)
            cells = [mean_and_spread(Row(row.name, *value)) for value in values]
            rows.append(
                [f'<i class="dot" style="color:var(--variant-{i % len(VARIANTS)})"></i>{escape(row.name)}', *cells]
            )
    if not names or not rows:
        return ""
    if len(names) > _ACROSS:
        return _many_metrics(names, described, variants, [row[1:] for row in rows])
    abouts = [f"{capital(name)}: {about.get('about')}" for name in names if isinstance(about := described[name], dict)]
    more = " mnemos score gives intervals over test sentences." if any("signatures" in one for one in results) else ""
    caption = f"Other metrics of the test split, mean ± sample standard deviation over seeds. {' '.join(abouts)}{more}"
    return table(caption, ["variant", *names], rows)


def _many_metrics(
    names: Sequence[str], described: JSONObject, variants: Sequence[str], values: Sequence[Sequence[str]]
) -> str:
    """The table of `_other_metrics` with a row for each metric. values: for each variant those of all metrics."""
    abouts = [str(about.get("about", "")) if isinstance(about := described[name], dict) else "" for name in names]
    cells = [
        [escape(name), *(one[i] for one in values), escape(about)]
        for i, (name, about) in enumerate(zip(names, abouts, strict=True))
    ]
    caption = "Other metrics of the test split, mean ± sample standard deviation over seeds."
    return table(caption, ["metric", *variants, "what it is"], cells, "metrics")


def _variants(comparison: Comparison) -> str:
    head = [
        "variant",
        f"{comparison.scored} {comparison.metric}",
        "seeds",
        "parameters",
        "FLOPs",
        "state",
        "time",
        "per epoch",
        "peak memory",
    ]
    rows = [
        [
            f'<i class="dot" style="color:var(--variant-{i % len(VARIANTS)})"></i>{escape(row.name)}',
            mean_and_spread(row),
            str(row.seeds),
            count(row.parameters),
            operations(row.flops),
            memory(row.state_bytes),
            duration(row.seconds),
            duration(_epoch(comparison, row.name)),
            memory(row.peak_bytes),
        ]
        for i, row in enumerate(comparison.rows)
    ]
    majority = {} if comparison.majority is None else {"most frequent class": comparison.majority}
    rows += [[escape(name), decimal(one), *[""] * 7] for name, one in (majority | comparison.reference).items()]
    better = "higher" if comparison.higher_is_better else "lower"
    caption = (
        f"{capital(comparison.scored)} {comparison.metric} ({better} is better), mean ± sample standard "
        "deviation over seeds, and the mean cost of a run; state: bytes per stream after a row of the greatest length "
        "that the settings of the data allow, of an encoder-decoder its source and its output; an epoch is the number "
        f"of updates that reads the training split once. From {comparison.source}."
    )
    return table(caption, head, rows)


def side_by_side(comparisons: Sequence[Comparison]) -> str:
    """One table of the variants of several tasks, each with the metric of its task."""
    rows = []
    for one in comparisons:
        task = next((str(flat(run.recipe).get("data.is", "–")) for run in one.all_runs()), "–")
        for row in one.rows:
            found = [row.name, task, one.metric, mean_and_spread(row), str(row.seeds), count(row.parameters)]
            rows.append([escape(cell) for cell in found])
    caption = (
        "All variants, mean ± sample standard deviation over seeds of their task's metric on its test split. Rows of "
        "different tasks cannot be compared. From the runs' result.json."
    )
    return table(caption, ["variant", "task", "test metric", "value", "seeds", "parameters"], rows, "runs")


def _epoch(comparison: Comparison, name: str) -> float:
    """Seconds per epoch, mean over the runs of a variant; NaN if no run has it."""
    found = [
        number((run.result or {}).get("epoch_seconds"), run.label, "epoch_seconds")
        for run in comparison.runs.get(name, ())
    ]
    return spread(found)[0]


def _tested(comparison: Comparison) -> list[str]:
    """The variants with a run that has a test result."""
    runs = {name: comparison.runs.get(name, ()) for name in comparison.variants}
    return [name for name, every in runs.items() if any(math.isfinite(r.tested(comparison.metric)) for r in every)]


def _untested(comparison: Comparison) -> str:
    if _tested(comparison):
        return ""
    return missing(f"No result.json gives a {comparison.scored} {comparison.metric}, so single seeds cannot be drawn.")


def seeds(comparison: Comparison) -> str:
    """The figure of seeds; "" for fewer than two runs."""
    variants = _tested(comparison)
    if not variants or len(comparison.all_runs()) < 2:
        return ""
    emptied = any(math.isfinite(r.tested(comparison.metric, "emptied")) for r in comparison.all_runs())
    names = 0.1 + 0.075 * max(len(short(name, _NAME)) for name in variants)  # inches
    drawn = panel(
        "seeds",
        "",
        lambda axes: draw_seeds(axes, comparison, variants),
        size=(2.1 + max(2.0, names), 0.4 + 0.3 * len(variants)),
        left=names,
        label=f"{capital(comparison.scored)} {comparison.metric} by variant and seed",
        x=f"{comparison.scored} {comparison.metric}",
    )
    caption = (
        f"{capital(comparison.scored)} {comparison.metric}: filled marks are seeds, the bar is their mean"
        + (", a ring is the same trained model with its cache emptied" if emptied else "")
        + (", the dotted line is the most frequent class" if comparison.majority is not None else "")
        + f". From result.json of {plural(len(comparison.all_runs()), 'run')}."
    )
    return figure([drawn], caption, kind="wide")


def draw_seeds(axes: "Axes", comparison: Comparison, variants: list[str]) -> None:
    """One row per variant: a dot per seed, a bar for the mean, a ring for the emptied cache."""
    axes.set_ylim(len(variants) - 0.5, -0.5)
    axes.set_yticks(range(len(variants)), [short(name, _NAME) for name in variants])
    axes.tick_params(axis="y", labelcolor=INK[0], pad=6)
    axes.margins(x=0.08)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=RULE[0])
    if comparison.majority is not None:
        axes.axvline(comparison.majority, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))
    for y, name in enumerate(variants):
        index = comparison.variants.index(name)
        runs = comparison.runs[name]
        values = np.array([run.tested(comparison.metric) for run in runs])
        emptied = np.array([run.tested(comparison.metric, "emptied") for run in runs])
        finite = values[np.isfinite(values)]
        axes.plot([finite.mean()] * 2, [y - 0.36, y + 0.2], color=variant_colour(index), linewidth=1.4, zorder=1)
        marks: JSONObject = {"linestyle": "none", "color": variant_colour(index), "marker": "o", "clip_on": False}
        axes.plot(values, [y - 0.08] * len(values), markersize=5.2, alpha=0.8, markeredgewidth=0, **marks)
        axes.plot(emptied, [y + 0.26] * len(values), markersize=4, markerfacecolor="none", markeredgewidth=0.9, **marks)


def _controls(comparison: Comparison) -> str:
    if not comparison.controls:
        if any(state_controls(comparison, name) for name in comparison.variants):
            return ""  # a section of its own has the controls of the state
        return missing("No control was run, so these results do not show whether the models use their memory.")
    rows = []
    for control in comparison.controls:
        difference = effect(comparison, control.name, control.control)
        sign = 1 if comparison.higher_is_better else -1
        change = math.nan if difference is None else sign * difference.value
        interval = ""
        if difference is not None and math.isfinite(difference.low):
            low, high = sorted((sign * difference.low, sign * difference.high))
            interval = f"{decimal(low, signed=True)} to {decimal(high, signed=True)}"
        index = comparison.variants.index(control.name) if control.name in comparison.variants else 0
        rows.append(
            [
                f'<i class="dot" style="color:var(--variant-{index % len(VARIANTS)})"></i>{escape(control.name)}',
                escape(CONTROLS.get(control.control, control.control)),
                mean_and_spread(control),
                str(control.seeds),
                decimal(change, signed=True),
                interval or "–",
            ]
        )
    caption = (
        f"Controls: the same trained models, evaluated with a changed memory. The change is in "
        f"{comparison.scored} {comparison.metric} relative to the intact model; its 95% interval comes from the "
        "spread between seeds. "
        "Emptied: every slot is zero. Exchanged: noise with the cache's mean and standard deviation per channel. "
        "Closed: "
        "the branch is switched off, which also removes its parameters and so proves nothing by itself. A change "
        "shows that the model "
        "depends on the content of its cache. What the memory adds is the difference to the never-written baseline. "
        f"From {comparison.source}."
    )
    return table(
        caption,
        ["variant", "control", f"{comparison.scored} {comparison.metric}", "seeds", "change", "95% interval"],
        rows,
        "controls",
    )
