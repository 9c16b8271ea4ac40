"""Charts: Vega-Lite draws each as SVG, for readers without scripts, and page.js draws the same again in the browser."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mnemos import libraries
from mnemos.types import JSONObject

from .markup import decimal, escape, own_ids, prose
from .shell import VARIANTS, embedded

MOST = 12_000  # points of a chart
_WIDE, _NARROW = 640, 440  # pixels of a chart that readers without scripts see
_ROW = 26  # pixels of a variant in a strip
_SWITCHES = 24  # of runs, at most
_DIGITS = 5  # of a value in the page
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")  # of the variants
_SOLID = [1, 0]
_DASHES = (_SOLID, [7, 3], [2, 3], [9, 3, 2, 3])  # of the first variants, and of those whose colours repeat
_TEXT = {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "labelFontSize": 12, "titleFontSize": 12.5}
_LINES = {"gridColor": "var(--rule)", "domainColor": "var(--muted)", "tickColor": "var(--muted)", "tickSize": 4}
_CONFIG = {
    "aria": False,  # the element around it says what it shows
    "background": None,
    "font": "Georgia, serif",
    "view": {"stroke": None},
    "axis": {**_TEXT, **_LINES, "titleFontWeight": "normal"},
    "axisX": {"grid": False, "labelFlush": True, "labelOverlap": True},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5},
}


WHOLE = ",.0f"  # the form of an axis of whole numbers


class Axis(NamedTuple):
    """An axis of x. name: with its unit. form: a format of d3 for its ticks."""

    name: str
    form: str = ""


class Series(NamedTuple):
    """What has a line and a switch: a variant, a layer. colour: a variable of the style sheet. order: of its marks."""

    name: str
    colour: str
    order: int = 0

    @property
    def dash(self) -> list[int]:
        return _DASHES[self.order // len(VARIANTS) % len(_DASHES)]


def variant(name: str, index: int) -> Series:
    """The variant at `index` of the comparison, which looks the same in every figure."""
    return Series(name, f"variant-{index % len(VARIANTS)}", index)


@dataclass
class Chart:
    """What one panel shows."""

    slug: str  # unique in the page
    title: str
    y: str
    series: Sequence[Series]
    runs: Sequence[str]  # the names of the seeds
    axes: Sequence[Axis]  # what x can be; the first is shown at first
    # "lines" (thin: a run, thick: the mean), "points" (also a mark a run), "marks" (no lines) or "strip" (a row a
    # variant, of marks and their mean).
    mode: str = "lines"
    logarithmic: bool = False
    ticks: Sequence[float] = ()  # values of x that have one, instead of round ones
    references: Sequence[tuple[str, float]] = ()  # of dotted lines across, which the legend names
    limits: tuple[float, float] | None = None  # of y
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, series: int, run: int, y: Any, *x: Any, interval: tuple[float, float] | None = None) -> None:
        """Add a point, or a sequence of them: of the variant and the run with these indices; an x for each axis."""

        def rounded(value: float) -> float | None:  # to few digits, for a small page; None cannot be drawn
            if not math.isfinite(value):
                return None
            exact = value == int(value) and abs(value) < 1e6
            short = value if exact else float(f"{value:.{_DIGITS}g}")
            return int(short) if short == int(short) else short

        if interval is not None and "low" not in self.columns and self.columns:  # points before had none
            self.columns |= {end: list(self.columns["y"]) for end in ("low", "high")}
        for of_y, *of_x in zip(*(np.atleast_1d(one).tolist() for one in (y, *x)), strict=True):
            point: JSONObject = {"s": series, "r": run, "y": rounded(of_y)}
            point |= {f"x{i}": rounded(value) for i, value in enumerate(of_x)}
            if interval is not None or "low" in self.columns:
                point |= dict(zip(("low", "high"), map(rounded, interval or (of_y, of_y)), strict=True))
            for name, value in point.items():
                self.columns.setdefault(name, []).append(value)

    @property
    def empty(self) -> bool:
        """Whether no line has two points: a curve of one point says nothing."""
        x_of: dict[tuple[int, int], set[float]] = {}
        for s, r, x, y in zip(*(self.columns.get(name, []) for name in ("s", "r", "x0", "y")), strict=True):
            if y is not None:
                x_of.setdefault((s, r), set()).add(x)
        return max(map(len, x_of.values()), default=0) < (2 if self.mode in ("lines", "points") else 1)


def chart_figure(charts: Sequence[Chart], caption: str, style: str = "") -> str:
    """A figure of charts that share their variants, with a legend, switches where scripts run, and a caption."""
    charts = [chart for chart in charts if not chart.empty]
    if not charts:
        return ""
    panels = []
    for chart in charts:
        title = f'<p class="title">{escape(chart.title)}</p>' if chart.title else ""
        aloud = chart.title if chart.mode == "strip" else f"{chart.title or chart.y} by {chart.axes[0].name}"
        data = {
            **{name: getattr(chart, name) for name in ("slug", "title", "y", "mode", "columns")},
            "series": [{"name": one.name, "colour": f"var(--{one.colour})"} for one in chart.series],
            "runs": list(chart.runs),
            "axes": [{"name": axis.name, "form": axis.form} for axis in chart.axes],
            "spec": specification(chart),
        }
        panels.append(
            f'<div class="panel">{title}<div class="chart" role="group" aria-label="{escape(aloud)}">'
            f"{drawing(chart, _WIDE if style == 'wide' else _NARROW)}{embedded(data, 'chart-data')}</div></div>"
        )
    return (
        f'<figure class="charts {escape(style)}" data-figure="{escape(charts[0].slug)}">{_switches(charts)}\n'
        f'<div class="panels">{chr(10).join(panels)}</div>\n<figcaption>{prose(caption)}</figcaption></figure>'
    )


def _switches(charts: Sequence[Chart]) -> str:
    series = list(dict.fromkeys(one for chart in charts for one in chart.series))
    parts = []

    # --- the legend: a strip names its own rows ---
    entries = [
        f'<li><label><input type="checkbox" class="variant" value="{escape(one.name)}" checked hidden>'
        f"{_key(one.colour, one.dash)}{escape(one.name)}</label></li>"
        for one in series
    ]
    dotted = dict.fromkeys(one for chart in charts for one in chart.references if math.isfinite(one[1]))
    entries += [f"<li>{_key('muted', [2, 3])}{escape(name)} ({decimal(value)})</li>" for name, value in dotted]
    if len(series) > 1 or dotted or charts[0].mode != "strip":
        parts.append(f'<ul class="legend{" many" if len(series) > 12 else ""}">{"".join(entries)}</ul>')

    # --- what scripts switch ---
    runs = list(dict.fromkeys(run for chart in charts for run in chart.runs))
    if 1 < len(runs) <= _SWITCHES:
        boxes = (f'<input type="checkbox" class="seed" value="{escape(run)}" checked>{escape(run)}' for run in runs)
        labels = "".join(f"<label>{box}</label>" for box in boxes)
        parts.append(f'<fieldset class="switch" hidden><legend>seeds</legend>{labels}</fieldset>')
    axes = list(dict.fromkeys(axis.name for chart in charts for axis in chart.axes))
    controls = []
    if len(axes) > 1 and all(len(chart.axes) > 1 for chart in charts):
        options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in axes)
        controls.append(f'<label>x <select class="axis">{options}</select></label>')
    for letter in "x" if any(chart.mode == "strip" for chart in charts) else "xy":
        checked = " checked" if letter == "x" and charts[0].logarithmic else ""
        controls.append(f'<label><input type="checkbox" class="log-{letter}"{checked}>log {letter}</label>')
    if len(series) > 3:
        controls += [f'<button type="button" class="{which}">{which}</button>' for which in ("all", "none")]
    controls.append('<button type="button" class="csv">data (CSV)</button>')
    parts.append(f'<div class="switch" hidden>{"".join(controls)}</div>')
    return "\n".join(parts)


def _key(colour: str, dash: list[int]) -> str:
    style = "" if dash == _SOLID else f' stroke-dasharray="{" ".join(map(str, dash))}"'
    return (
        f'<svg class="key" viewBox="0 0 24 10" aria-hidden="true" style="color:var(--{colour})">'
        f'<path d="M0 5H24" stroke="currentColor" stroke-width="2.5"{style}/></svg>'
    )


def specification(chart: Chart) -> JSONObject:
    """The chart in Vega-Lite without its data, by its first axis: page.js puts another, or another scale, in place."""

    def by_series(values: list[Any]) -> JSONObject:
        scale = {"domain": list(range(len(values))), "range": values}
        return {"field": "s", "type": "nominal", "legend": None, "scale": scale}

    colours, dashes = [f"var(--{one.colour})" for one in chart.series], [one.dash for one in chart.series]
    colour, shape = by_series(colours), by_series([_SHAPES[one.order % len(_SHAPES)] for one in chart.series])
    scale = {"type": "log"} if chart.logarithmic else {"type": "linear", "zero": False}
    most = 6
    if chart.axes[0].form == WHOLE and (xs := [x for x in chart.columns.get("x0", ()) if x is not None]):
        # A step of at least 1: a tick at 2.4 would be written as 2, again. Vega's tickMinStep does not prevent it.
        most = min(most, max(1, int(max(xs) - min(xs))))
    ticks = {"values": list(chart.ticks)} if chart.ticks else {"tickCount": most}
    x: JSONObject = {
        **{"field": "x0", "type": "quantitative", "title": chart.axes[0].name},
        "scale": {**scale, "nice": False, "padding": 6},
        "axis": {"format": chart.axes[0].form, **ticks},
    }
    limits = {"domain": list(chart.limits), "nice": False} if chart.limits else {}
    y: JSONObject = {
        **{"field": "y", "type": "quantitative", "title": chart.y, "axis": {"format": ""}},
        "scale": {"type": "linear", "zero": False, **limits},
    }
    layers: list[JSONObject] = []

    def layer(mark: JSONObject, encoding: JSONObject, **more: Any) -> None:
        layers.append({"mark": mark, "encoding": encoding, **more})

    # The mean over runs at the x that all of a variant have; a gap where a value of one is not finite.
    means = [{"op": "mean", "field": name, "as": name} for name in ("y", *(f"x{i}" for i in range(1, len(chart.axes))))]
    counts = [{"op": "count", "as": "n"}, {"op": "valid", "field": "y", "as": "valid"}]
    mean: list[JSONObject] = [
        {"aggregate": [*means, *counts], "groupby": ["s", "x0"]},
        {"joinaggregate": [{"op": "max", "field": "n", "as": "most"}], "groupby": ["s"]},
        {"filter": "datum.n == datum.most"},
        {"calculate": "datum.valid == datum.n ? datum.y : null", "as": "y"},
    ]

    # --- across the panel: lines that the legend names ---
    for _, value in chart.references:
        if math.isfinite(value):
            at = {"x": {"datum": value}} if chart.mode == "strip" else {"y": {"datum": value, "title": chart.y}}
            layer({"type": "rule", "strokeDash": [2, 3], "color": "var(--muted)"}, at, data={"values": [{}]})

    # --- the points ---
    if chart.mode == "strip":
        labels = {"labelLimit": 220, "labelColor": "var(--ink)", "labelFontSize": 12, "grid": True}
        names = [one.name for one in chart.series]
        encoding = {"x": x, "color": colour}
        encoding["y"] = {"field": "name", "type": "nominal", "title": None, "sort": names, "axis": labels}
        of_runs = [{"aggregate": [{"op": "mean", "field": "x0", "as": "x0"}], "groupby": ["s", "name"]}]
        layer({"type": "tick", "thickness": 2, "size": 16}, encoding, transform=of_runs)
        layer({"type": "point", "filled": True, "size": 60, "opacity": 0.75}, encoding)
    else:
        if "low" in chart.columns:
            ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
            layer({"type": "rule", "strokeWidth": 1.2}, {"x": x, "color": colour, **ends})
        if chart.mode != "marks":
            line: JSONObject = {"x": x, "y": y, "color": colour}
            if len(set(chart.columns["r"])) > 1:
                thin = {"type": "line", "strokeWidth": 1, "opacity": 0.6}
                layer(thin, {**line, "detail": [{"field": "r"}, {"field": "s"}]})
            line["detail"] = [{"field": "s"}]
            if any(dash != _SOLID for dash in dashes):
                line["strokeDash"] = by_series(dashes)
            layer({"type": "line", "strokeWidth": 2, "strokeCap": "round"}, line, transform=mean)
        if chart.mode != "lines" or len(set(chart.columns["x0"])) <= 25:
            mark = {"type": "point", "filled": True, "size": 70 if chart.mode == "marks" else 28, "opacity": 1}
            encoding = {"x": x, "y": y, "color": colour, "shape": shape}
            layer(mark, encoding, **({"transform": mean} if chart.mode == "lines" else {}))
    height = _ROW * len(chart.series) if chart.mode == "strip" else 230
    return {"config": _CONFIG, "height": height, "layer": layers}


def drawing(chart: Chart, width: int) -> str:
    """The chart as inline SVG, whose colours and letters are those of the page. The same chart gives the same bytes."""
    points = [dict(zip(chart.columns, values, strict=True)) for values in zip(*chart.columns.values(), strict=True)]
    points = [one for one in points if not chart.logarithmic or (one["x0"] or 0) > 0]
    if chart.mode == "strip":
        points = [one | {"name": chart.series[one["s"]].name} for one in points]
    size = {"width": width, "autosize": {"type": "fit-x", "contains": "padding"}}
    svg = libraries.vl_convert().vegalite_to_svg({**specification(chart), "data": {"values": points}, **size})
    svg = re.sub(r' font-family="[^"]*"| class="[^"]*"| aria-hidden="true"| pointer-events="none"', "", svg)
    svg = re.sub(r'<path d="M0,0h0v0h0Z"/>|<path d="" display="none"/>', "", svg)
    # Two decimals are a hundredth of a pixel; in tags alone, for what a chart says keeps its digits.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag.group()), svg)
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]+")[^>]*>', r'<svg \1 role="presentation">', svg, count=1)
    return own_ids(svg, chart.slug)
