"""A metric along an axis of the task, such as the accuracy by distance: a curve and a table of the variants.

A task writes it to result.json by `Task.artifacts`: "along": {"metric", "x": the name of the axis, "values": [[x,
value]], "chance": the value of a guess, if it has one}.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .markup import decimal, escape, figure, legend, table
from .read_metrics import number
from .results import Comparison, RunRecord, spread
from .style import MARKERS, MUTED, VARIANTS, curve, panel, variant_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOGARITHMIC = 8.0  # greatest / least value of an axis from which it is drawn in octaves


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


def section(comparison: Comparison) -> str:
    """The curve and the table; "" if no run measured a metric along an axis."""
    found = read_along(comparison)
    if found is None:
        return ""
    drawn = panel(
        "along", f"Test {found.metric}", lambda axes: draw(axes, comparison, found), size=(5.2, 2.6), x=found.x
    )
    keys = legend([(f"variant-{comparison.variants.index(name) % len(VARIANTS)}", name) for name in found.values])
    chance = " The dotted line is a guess." if math.isfinite(found.chance) else ""
    caption = f"Test {found.metric} by {found.x}; dots are seeds, lines their mean.{chance} From result.json."
    return figure([drawn], caption, kind="wide", legend=keys) + _table(comparison, found)


def read_along(comparison: Comparison) -> Along | None:
    """What the runs measured along the axis of the first run that has one; runs with another axis are left out."""
    found: Along | None = None
    for name in comparison.variants:
        for run in comparison.runs.get(name, ()):
            one = (run.result or {}).get("along")
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


def draw(axes: "Axes", comparison: Comparison, found: Along) -> None:
    """A line per variant through the means, and a dot per seed."""
    places = found.places
    if places[0] > 0 and places[-1] / places[0] >= _LOGARITHMIC:
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{at:g}" for at in places])
    axes.minorticks_off()
    for name, points in found.values.items():
        index = comparison.variants.index(name)
        colour, at = variant_colour(index), sorted(points)
        curve(axes, np.array(at), np.array([spread(points[x])[0] for x in at]), color=colour)
        for x in at:
            axes.plot([x] * len(points[x]), points[x], MARKERS[index % len(MARKERS)], color=colour, markersize=3.4)
    if math.isfinite(found.chance):
        axes.axhline(found.chance, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))


def _table(comparison: Comparison, found: Along) -> str:
    rows = [
        [escape(name), *(_mean(points.get(at, [])) for at in found.places)]
        for name in comparison.variants
        if (points := found.values.get(name))
    ]
    caption = f"The same in numbers: test {found.metric}, mean ± sample standard deviation over seeds."
    return table(caption, [found.x, *(f"{at:g}" for at in found.places)], rows)


def _mean(values: list[float]) -> str:
    mean, std, _ = spread(values)
    return decimal(mean) + (f" ± {decimal(std)}" if math.isfinite(std) else "")
