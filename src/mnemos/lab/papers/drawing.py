"""The papers' pictures, drawn by matplotlib in the palette of the reports, light on white."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mnemos.atomic import write_bytes
from mnemos.lab.report.run_records import Columns
from mnemos.lab.report.shell import INK, MUTED, RULE, VARIANTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 160
_STYLE: dict[Any, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Serif"],
    "font.size": 11.0,
    "axes.edgecolor": MUTED[0],
    "axes.labelcolor": MUTED[0],
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 14.0,
    "grid.color": RULE[0],
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.markersize": 5.0,
    "mathtext.fontset": "stix",
    "text.color": INK[0],
    "xtick.color": MUTED[0],
    "ytick.color": MUTED[0],
    "xtick.major.size": 2.5,
    "ytick.major.size": 0.0,
}


@contextmanager
def picture(path: Path, size: tuple[float, float] = (10.0, 4.2), layout: Any = "constrained") -> Iterator["Figure"]:
    """A figure of `size` inches to draw in; it is written to `path` at the end, with a legend of its labels above.

    layout None: the axes stay where they are put, and there is no legend.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # --- not by pyplot, which looks for a display and keeps every figure ---
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout=layout)
        canvas = FigureCanvasAgg(figure)
        yield figure
        labels: dict[str, Any] = {}
        for axes in figure.axes:
            handles, names = axes.get_legend_handles_labels()
            labels |= dict(zip(names, handles, strict=True))
        if labels and layout:
            columns = int(13 * size[0] / (6 + max(map(len, labels))))  # as many names beside each other as fit
            figure.legend(labels.values(), labels.keys(), loc="outside upper left", ncols=max(1, columns))
        # --- without matplotlib's version, so that equal pictures are equal files ---
        png = io.BytesIO()
        canvas.print_png(png, metadata={"Software": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, png.getvalue())


def panel(axes: "Axes", title: str, x: str, log: str = "") -> "Axes":
    """Axes with a title, the name of x and a grid; log: its axes with a logarithmic scale, "x" by powers of two."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.grid(axis="y")
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    return axes


@contextmanager
def panels(
    path: Path, *titles: tuple[str, str], log: str = "", size: tuple[float, float] = (10.0, 4.2)
) -> Iterator[list["Axes"]]:
    """A `picture` of panels beside each other, each with its title and the name of x."""
    with picture(path, size) as figure:
        row = figure.subplots(1, len(titles), squeeze=False)[0]
        yield [panel(axes, *names, log) for axes, names in zip(row, titles, strict=True)]


def variant(index: int) -> dict[str, Any]:
    """The colour and the marker of the variant at `index`, as in the reports: arguments of `Axes.plot`."""
    return {"color": VARIANTS[index % len(VARIANTS)][0], "marker": "os^DvP"[index % 6]}


def draw_seeds(axes: "Axes", series: Sequence[Columns], x: str, y: str, index: int, label: str) -> np.ndarray:
    """Draw the seeds of a variant as thin lines and their mean as a thick one; return the mean of y."""
    style = variant(index)
    if len(series) > 1:
        for one in series:
            axes.plot(one[x], one[y], color=style["color"], linewidth=0.6, alpha=0.45)
    at, mean = mean_curve(series, x)[1], mean_curve(series, y)[1]
    axes.plot(at, mean, **style, markevery=max(1, len(at) // 20), label=label)
    return mean


def mean_curve(series: Sequence[Columns], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds at the steps that every seed recorded; NaN where one value is not finite."""
    common = series[0]["step"]
    for one in series[1:]:
        common = np.intersect1d(common, one["step"])
    values = np.stack([one[name][np.isin(one["step"], common)] for one in series])
    return common, np.where(np.isfinite(values).all(0), values.sum(0) / len(series), np.nan)
