"""One style for every figure: the palette, and panels drawn by matplotlib as SVG that the page can colour.

A panel is drawn in the light palette; its colours and fonts are then handed to the page's style sheet, so
that one drawing serves light and dark, and is read in the page's own type.
"""

import io
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (light, dark). The variants' six keep a distance of ΔE 14 and more under simulated deuteranopia and protanopia.
VARIANTS = (
    ("#4b515a", "#c4c9d0"),
    ("#c8461a", "#f2794a"),
    ("#2f7fc1", "#63aef0"),
    ("#0f8f6c", "#2fb58c"),
    ("#cf9e17", "#f2cf63"),
    ("#8b3f8f", "#b877c9"),
)
# An ordered ramp for layers, first to last: lightness rises, so it survives grey print and colour blindness.
RAMP = (
    ("#3b1f5e", "#9a88cf"),
    ("#3c4a86", "#6f8cc4"),
    ("#2f7192", "#5fa9c9"),
    ("#27968c", "#55c2b4"),
    ("#5bb26f", "#86d493"),
    ("#a9bf3f", "#cfdf6d"),
)
# Heads have no order: as many hues as keep apart, then the same as rings.
HEADS = (*VARIANTS[1:], VARIANTS[0], ("#d0699a", "#f09cc2"), ("#7d5630", "#bd9063"))
INK, MUTED, RULE = ("#211f1b", "#dedad2"), ("#6d675d", "#9c978d"), ("#d9d4c8", "#3a3a3c")
NEGATIVE, POSITIVE = ("#2a6fb5", "#5ba3ea"), ("#c8521f", "#f0824c")
_NAME = 0.16  # inches for the name of an axis
ROUND = (1, 2, 5, 10)  # ticks fall on these times a power of ten
MARKERS = ("o", "s", "^", "D", "v", "P")
VARIABLES = {
    "ink": INK,
    "muted": MUTED,
    "rule": RULE,
    "negative": NEGATIVE,
    "positive": POSITIVE,
    **{f"variant-{i}": pair for i, pair in enumerate(VARIANTS)},
    **{f"layer-{i}": pair for i, pair in enumerate(RAMP)},
    **{f"head-{i}": pair for i, pair in enumerate(HEADS)},
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mnemos",
    "font.family": ["STIXGeneral", "DejaVu Serif"],
    "font.size": 9.0,
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
    "savefig.facecolor": "none",
}


def variant_colour(index: int) -> str:
    """The colour of the variant at `index` of the comparison, the same in every figure."""
    return VARIANTS[index % len(VARIANTS)][0]


def marker(index: int) -> str:
    """The marker of the variant at `index` of the comparison, the same in every figure."""
    return MARKERS[index % len(MARKERS)]


def variant_name(index: int, name: str) -> str:
    """The name of the variant at `index` in a table: HTML, with a dot of its colour."""
    from .markup import escape

    return f'<i class="dot" style="color:var(--variant-{index % len(VARIANTS)})"></i>{escape(name)}'


def layer(index: int, count: int) -> str:
    """The colour of layer `index` of `count`; with more than six layers, neighbours share a colour."""
    return RAMP[_ramp(index, count)][0]


def layer_variable(index: int, count: int) -> str:
    """The style sheet variable of `layer(index, count)`."""
    return f"layer-{_ramp(index, count)}"


def head(index: int) -> tuple[str, bool]:
    """The colour of head `index`, and whether its marker is solid (otherwise a ring)."""
    return HEADS[index % len(HEADS)][0], index < len(HEADS)


def _ramp(index: int, count: int) -> int:
    return round(index * (len(RAMP) - 2) / (count - 1)) if 1 < count < len(RAMP) else index * len(RAMP) // max(count, 1)


def style_sheet() -> str:
    """The style of a page: page.css, and the palette, with dark colours if the reader prefers them."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    css = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{css}"


def panel(
    slug: str,
    title: str,
    draw: Callable[["Axes"], None],
    size: tuple[float, float] = (3.5, 2.3),
    left: float = 0.42,
    label: str = "",
    x: str = "",
    y: str = "",
) -> str:
    """One panel as inline SVG. `draw(axes)` draws it; `slug` makes its ids unique; `label` is for screen readers.

    `size` in inches of 72 units, without the names `x` and `y` of the axes; the page scales it. `left` is the margin
    for tick labels, in inches. The title names the y axis where `y` is empty; it may be empty. The same input gives the
    same bytes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        below, left = _NAME * bool(x), left + _NAME * bool(y)
        width, height = size[0], size[1] + below
        figure = Figure(figsize=(width, height))
        top, bottom = (0.3 if title else 0.08), 0.26 + below
        box = (left / width, bottom / height, (width - left - 0.1) / width, (height - bottom - top) / height)
        axes = figure.add_axes(box)
        draw(axes)
        axes.set_xlabel(x, labelpad=1.5, fontsize=8.5)
        axes.set_ylabel(y, labelpad=2.5, fontsize=8.5)
        figure.text(0, 1 - 0.12 / height, title, va="center", fontsize=9.5, color=INK[0])
        written = io.StringIO()
        FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    return _for_the_page(written.getvalue(), slug, label or title)


def raster(size: tuple[float, float], dpi: int, draw: Callable[["Figure"], None], style: dict[Any, Any]) -> bytes:
    """A PNG of `size` inches: `draw(figure)` lays out and draws it, on white, in the light palette."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "savefig.facecolor": "white"} | style):
        figure = Figure(figsize=size, dpi=dpi, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        draw(figure)
        written = io.BytesIO()
        canvas.print_png(written, metadata={"Software": None})
    return written.getvalue()


def _for_the_page(svg: str, slug: str, label: str) -> str:
    """matplotlib's SVG as an HTML element: no prolog, unique ids, the page's colours and font, fewer digits."""
    from .markup import escape, own_ids

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.S)
    svg = svg.replace("xlink:href=", "href=")
    svg = own_ids(svg, slug)
    # Three decimals are a thousandth of a point; in tags alone, for what a panel says keeps its digits.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d\d)\d+", r"\1", tag.group()), svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]+;? ?", "", svg)
    for name, (light, _) in VARIABLES.items():
        svg = svg.replace(light, f"var(--{name})")
    opening = re.match(r"<svg[^>]*>", svg)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert opening is not None
    assert box is not None
    body = re.sub(r"\s*\n\s*", "\n", svg[opening.end() :])
    return f'<svg {box.group()} role="img" aria-label="{escape(label)}">{body.strip()}'


def thin(step: np.ndarray, value: np.ndarray, most: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """A long curve as `most` points, each the mean of one interval; NaN and infinity are left out of the means."""
    value = np.where(np.isfinite(value), value, np.nan)
    if len(step) <= most:
        return step, value
    parts = np.array_split(np.arange(len(step)), most)
    return means(step, parts), means(value, parts)


def means(value: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the finite values at the places of each part; NaN for a part without one."""
    found = (value[part][np.isfinite(value[part])] for part in parts)
    return np.array([float(one.mean()) if len(one) else np.nan for one in found])


def curve(axes: "Axes", step: np.ndarray, value: np.ndarray, **look: Any) -> None:
    """A line with gaps where the value is not finite; a point without a neighbour is drawn as a dot."""
    value = np.where(np.isfinite(value), value, np.nan)
    if not np.isfinite(value).any():
        return
    axes.plot(step, value, **look)
    padded = np.concatenate([[np.nan], value, [np.nan]])
    alone = np.isfinite(value) & ~np.isfinite(padded[:-2]) & ~np.isfinite(padded[2:])
    if alone.any():
        axes.plot(step[alone], value[alone], linestyle="none", marker="o", markersize=4, color=look.get("color"))


def steps_axis(axes: "Axes") -> None:
    """Prepare axes with updates along x, few round ticks and light horizontal rules."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=ROUND, min_n_ticks=1))  # one for a single record
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x == int(x) else ""))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.grid(axis="y")


def nothing(axes: "Axes", sentence: str) -> None:
    """Write in the panel that there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", va="center", color=MUTED[0])


def raster_image(axes: "Axes", image: np.ndarray, corner: tuple[float, float], side: float = 1.0) -> None:
    """Draw uint8 [h, w, 1 or 3] in a square with its upper left at `corner` (x, y), y pointing down, pixel for pixel.

    What is not square is fitted inside.
    """
    height, width = image.shape[:2]
    across, down = side * width / max(height, width), side * height / max(height, width)
    left, top = corner[0] + (side - across) / 2, corner[1] + (side - down) / 2
    colours = np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
    axes.imshow(colours, extent=(left, left + across, top + down, top), aspect="auto", interpolation="none")
