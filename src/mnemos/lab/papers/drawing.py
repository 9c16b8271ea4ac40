"""The papers' pictures, drawn by matplotlib in the palette of the reports, light on white."""

import io
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mnemos.atomic import write_bytes
from mnemos.lab.report.curves import means
from mnemos.lab.report.run_records import Columns
from mnemos.lab.report.style import INK, MUTED, RULE, VARIANTS
from mnemos.types import JSONObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
MARKERS = ("o", "s", "^", "D", "v", "P")  # of the variants, as in the reports
_TITLE = 0.15  # of the figure's height: the title and the spaces above and below it
_STYLE: dict[Any, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Serif"],
    "font.size": 11.0,
    "axes.edgecolor": MUTED[0],
    "axes.labelcolor": MUTED[0],
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.unicode_minus": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": RULE[0],
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "text.color": INK[0],
    "xtick.color": MUTED[0],
    "ytick.color": MUTED[0],
    "xtick.major.size": 2.5,
    "ytick.major.size": 0.0,
    "xtick.major.width": 0.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "white",
}


def variant_colour(index: int) -> str:
    """The colour of the variant at `index`, as in the reports."""
    return VARIANTS[index % len(VARIANTS)][0]


def png(path: Path, size: tuple[float, float], draw: Callable[["Figure"], None]) -> Path:
    """Write a PNG of `size` inches, laid out and drawn by `draw(figure)`, and return its path. Written atomically."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        draw(figure)
        written = io.BytesIO()
        canvas.print_png(written, metadata={"Software": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, written.getvalue())
    return path


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


def draw_curves(axes: "Axes", series: Sequence[Columns], x: str, y: str, index: int) -> np.ndarray:
    """Draw the seeds of a variant as thin lines and their mean as a thick one; return the mean of y."""
    colour = variant_colour(index)
    if len(series) > 1:
        for one in series:
            axes.plot(*thin(one[x], one[y]), color=colour, linewidth=0.6, alpha=0.45)
    at, mean = mean_curve(series, x)[1], mean_curve(series, y)[1]
    few: JSONObject = {"marker": MARKERS[index % len(MARKERS)], "markersize": 4} if len(at) <= 25 else {}
    axes.plot(*thin(at, mean), color=colour, **few)
    return mean


def mean_curve(series: Sequence[Columns], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds at the steps that every seed recorded; NaN where one value is not finite."""
    if not series:
        return np.array([]), np.array([])
    common = series[0]["step"]
    for one in series[1:]:
        common = np.intersect1d(common, one["step"])
    values = np.stack([one[name][np.isin(one["step"], common)] for one in series])
    return common, np.where(np.isfinite(values).all(0), values.sum(0) / len(series), np.nan)


def thin(step: np.ndarray, value: np.ndarray, most: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """A long curve as `most` points, each the mean of one interval; NaN and infinity are left out of the means."""
    value = np.where(np.isfinite(value), value, np.nan)
    if len(step) <= most:
        return step, value
    parts = np.array_split(np.arange(len(step)), most)
    return means(step, parts), means(value, parts)


def raster_image(axes: "Axes", image: np.ndarray, corner: tuple[float, float], side: float = 1.0) -> None:
    """Draw uint8 [h, w, 1 or 3] in a square with its upper left at `corner` (x, y), y pointing down, pixel for pixel.

    What is not square is fitted inside.
    """
    height, width = image.shape[:2]
    across, down = side * width / max(height, width), side * height / max(height, width)
    left, top = corner[0] + (side - across) / 2, corner[1] + (side - down) / 2
    colours = np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
    axes.imshow(colours, extent=(left, left + across, top + down, top), aspect="auto", interpolation="none")
