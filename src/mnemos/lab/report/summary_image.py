"""A PNG of a comparison, for use in other pages such as the README."""

import math
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from mnemos.atomic import write_bytes

from .curves import Along, draw, draw_along, read_along, recorded, title
from .gates import draw_mix
from .markup import memory, short
from .read import Results, read
from .style import MUTED, layer, marker, nothing, raster, variant_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TYPE = {
    "font.size": 13.0,
    "lines.linewidth": 2.0,
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.7,
}
_TITLE = 0.15  # of the figure's height: the title and the spaces above and below it


def picture(folder: Path, out_png: Path) -> Path:
    """A PNG of 1600 × 700: validation curves of all variants, and σ(λ) by head of the first cached one.

    Of a task that measures its metric along an axis (`along`): that curve, and the metric at its end by bytes of state.
    folder: a comparison folder or a run folder. The file is replaced atomically. Raises InputError as `report` does.
    """
    results = read([Path(folder)])
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(out_png, raster((10.0, 4.375), 160, lambda figure: _lay_out(figure, results), _TYPE))
    return out_png


def _lay_out(figure: "Figure", results: Results) -> None:
    left = figure.add_axes((0.055, 0.13, 0.42, 0.65))
    right = figure.add_axes((0.565, 0.13, 0.42, 0.65))
    if (reach := read_along(results)) is not None:
        _lay_out_along(left, right, results, reach)
        return
    name = results.metric if recorded(results, "valid", results.metric) else "loss"
    draw(left, results, "valid", name)
    heading(left, title("valid", name), _keys(results, [n for n in results.names if results.runs_of(n)]))
    for label in results.names:
        gated = [run.gates for run in results.runs_of(label) if run.gates]
        if gated:
            layers = gated[0].layers
            draw_mix(right, [gates for gates in gated if gates.layers == layers])
            shown = sorted({0, len(layers) // 2, len(layers) - 1})
            keys = [(layer(i, len(layers)), f"layer {i}", None) for i in shown]
            heading(right, f"Cache gate σ(λ) by head, {short(label, 20)}", keys)
            return
    nothing(right, "no variant recorded gates")


def _keys(results: Results, shown: Collection[str]) -> list[tuple[str, str, str]]:
    """The entries of a legend of the variants that are shown: colour, name and marker."""
    numbered = enumerate(results.names)
    return [(variant_colour(i), short(n, 40), marker(i)) for i, n in numbered if n in shown]


def _lay_out_along(left: "Axes", right: "Axes", results: Results, reach: Along) -> None:
    """The curve along the axis, and its last value by the bytes of state of a stream."""
    draw_along(left, results, reach)
    heading(left, f"Test {reach.metric}", _keys(results, reach.values), reach.x)
    last = reach.places[-1]
    for i, row in enumerate(results.rows):
        for value in reach.values.get(row.name, {}).get(last, []):
            right.plot(row.state_bytes, value, marker(i), color=variant_colour(i), markersize=7)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda value, _: memory(value))
    right.set_ylim(left.get_ylim())
    if math.isfinite(reach.chance):
        right.axhline(reach.chance, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))
    heading(right, f"Test {reach.metric} at {last:g}", [], "state per stream")


def heading(axes: "Axes", text: str, entries: Sequence[tuple[str, str, str | None]], x: str = "updates") -> None:
    """Put the title and the legend, if any, above the axes, where they do not cover the curves, and name the x axis."""
    from matplotlib.lines import Line2D

    axes.set_xlabel(x)
    handles = [Line2D([], [], color=colour, marker=shape, markersize=5, label=name) for colour, name, shape in entries]
    box, height = axes.get_position(), 0.0
    most = 0.6 * (1 - box.y0)  # of the figure's height: the legend takes no more, if small letters can prevent it
    for size, columns in product((12, 9, 6), range(len(handles), 0, -1)):  # as many names beside each other as fit
        keys = axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            ncol=columns,
            borderpad=0,
            borderaxespad=0,
            frameon=False,
            fontsize=size,
            handlelength=1.5,
            columnspacing=1.6,
        )
        space = keys.get_window_extent().transformed(axes.transAxes.inverted())
        height = space.height * box.height
        if space.width <= 1 and height + _TITLE <= most:
            break
    axes.set_position((box.x0, box.y0, box.width, min(box.height, 1 - box.y0 - height - _TITLE)))
    shown = axes.get_position().height
    axes.text(0, 1 + (0.1 * box.height + height) / shown, text, transform=axes.transAxes, fontsize=15, va="bottom")
