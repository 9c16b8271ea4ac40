"""Charts: Vega-Lite draws each as SVG, for readers without scripts and for print, and in the browser with switches.

`page.js` draws the same specification again: with the values under the pointer or the arrow keys, and with arms, seeds
and axes that can be switched.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mnemos import libraries
from mnemos.types import JSONObject

from .markup import decimal, escape, own_ids, prose
from .shell import embedded
from .style import VARIANTS

MOST = 12_000  # points of a chart
_WIDE, _NARROW = 640, 440  # pixels of a chart that readers without scripts see
_ROW = 26  # pixels of an arm in a strip
_SWITCHES = 24  # of runs, at most
_DIGITS = 5  # of a value in the page
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")  # of the variants
_DASHES = ([1, 0], [7, 3], [2, 3], [9, 3, 2, 3])  # of the first variants, and of those whose colours repeat
_TEXT = {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "labelFontSize": 12, "titleFontSize": 12.5}
_CONFIG = {
    "aria": False,  # the element around it says what it shows
    "background": None,
    "font": "Georgia, serif",
    "view": {"stroke": None},
    "axis": {
        **_TEXT,
        "titleFontWeight": "normal",
        "gridColor": "var(--rule)",
        "domainColor": "var(--muted)",
        "tickColor": "var(--muted)",
        "tickSize": 4,
    },
    "axisX": {"grid": False, "labelFlush": True, "labelOverlap": True},
    "axisY": {"domain": False, "ticks": False, "tickCount": 5},
}


@dataclass(frozen=True)
class Axis:
    """An axis of x. name: with its unit. form: a format of d3 for its ticks."""

    name: str
    form: str = ""


class Series(NamedTuple):
    """What has a line, and a switch: an arm, or a layer. colour: a variable of the style sheet. place: of its marks."""

    name: str
    colour: str
    place: int = 0


def arm(name: str, index: int) -> Series:
    """The variant at `index` of the comparison, which looks the same in every figure."""
    return Series(name, f"variant-{index % len(VARIANTS)}", index)


@dataclass
class Chart:
    """What one panel shows.

    slug: unique in the page. runs: the names of the seeds. axes: what x can be; the first is shown at first. kind:
    "lines" (a thin line a run and a thick one for the mean), "points" (also a mark a run), "marks" (marks, no lines) or
    "bars" (a bar a point) or "strip" (a row an arm, of marks and their mean). ticks: the values of x that have one,
    instead of round ones. references: (name, value) of dotted lines across, which the legend names. bands: (place in
    `series`, low, high) of y, shaded. form: a format of d3 for the ticks of y. limits: of y. falls: whether y is drawn
    in decades from 1 down to 0.0001.
    """

    slug: str
    title: str
    y: str
    series: Sequence[Series]
    runs: Sequence[str]
    axes: Sequence[Axis]
    kind: str = "lines"
    logarithmic: bool = False
    ticks: Sequence[float] = ()
    references: Sequence[tuple[str, float]] = ()
    bands: Sequence[tuple[int, float, float]] = ()
    form: str = ""
    limits: tuple[float, float] | None = None
    falls: bool = False
    label: str = ""
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(
        self,
        series: int,
        run: int,
        y: float,
        *x: float,
        interval: tuple[float, float] | None = None,
    ) -> None:
        """Add a point: of the arm and the run at these places of `series` and `runs`; one x for each axis."""
        point: JSONObject = {"s": series, "r": run, "y": _number(y)}
        point |= {f"x{i}": _number(value) for i, value in enumerate(x)}
        if interval is not None or "low" in self.columns:
            point |= dict(zip(("low", "high"), map(_number, interval or (y, y)), strict=True))
        for name, value in point.items():
            self.columns.setdefault(name, []).append(value)

    @property
    def empty(self) -> bool:
        """Whether no line has two points: a curve of one point says nothing."""
        seen: dict[tuple[int, int], set[float]] = {}
        for s, r, x, y in zip(*(self.columns.get(name, []) for name in ("s", "r", "x0", "y")), strict=True):
            if y is not None:
                seen.setdefault((s, r), set()).add(x)
        return max(map(len, seen.values()), default=0) < (2 if self.kind in ("lines", "points") else 1)


def _number(value: float) -> float | None:
    """A value with few digits, for a small page; None for one that cannot be drawn."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e6:
        return int(value)
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) else short


def chart_figure(charts: Sequence[Chart], caption: str, kind: str = "") -> str:
    """A figure of charts that share their arms, with a legend, switches for readers with scripts, and a caption."""
    charts = [chart for chart in charts if not chart.empty]
    if not charts:
        return ""
    series = list(dict.fromkeys(one for chart in charts for one in chart.series))
    width = _WIDE if kind == "wide" else _NARROW
    body = "\n".join(_panel(chart, width) for chart in charts)
    return (
        f'<figure class="charts {escape(kind)}" data-figure="{escape(charts[0].slug)}">{_switches(charts, series)}\n'
        f'<div class="panels">{body}</div>\n<figcaption>{prose(caption)}</figcaption></figure>'
    )


def still(chart: Chart, width: int = _NARROW) -> str:
    """A panel of a figure that has other panels beside charts: the drawing without switches."""
    label = chart.label or f"{chart.title} by {chart.axes[0].name}"
    svg = drawing(chart, width)
    return f'<p class="title">{escape(chart.title)}</p><div role="img" aria-label="{escape(label)}">{svg}</div>'


def _switches(charts: Sequence[Chart], series: Sequence[Series]) -> str:
    """The legend, whose entries are switches where scripts run, and further switches that are hidden without them."""
    entries = "".join(
        f'<li><label><input type="checkbox" class="arm" value="{escape(one.name)}" checked hidden>{_key(one)}'
        f"{escape(one.name)}</label></li>"
        for one in series
    )
    many = " many" if len(series) > 12 else ""
    known = dict.fromkeys(one for chart in charts for one in chart.references if math.isfinite(one[1]))
    entries += "".join(f"<li>{_DOTTED}{escape(name)} ({decimal(value)})</li>" for name, value in known)
    parts = (
        [f'<ul class="legend{many}">{entries}</ul>'] if len(series) > 1 or known or charts[0].kind != "strip" else []
    )
    runs = list(dict.fromkeys(run for chart in charts for run in chart.runs))
    if 1 < len(runs) <= _SWITCHES:
        seeds = "".join(
            f'<label><input type="checkbox" class="seed" value="{escape(run)}" checked>{escape(run)}</label>'
            for run in runs
        )
        parts.append(f'<fieldset class="switch" hidden><legend>seeds</legend>{seeds}</fieldset>')
    axes = list(dict.fromkeys(axis.name for chart in charts for axis in chart.axes))
    controls = []
    if len(axes) > 1 and all(len(chart.axes) > 1 for chart in charts):
        options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in axes)
        controls.append(f'<label>x <select class="axis">{options}</select></label>')
    kinds = {chart.kind for chart in charts}
    for letter in "" if "bars" in kinds else "x" if "strip" in kinds else "xy":
        checked = " checked" if letter == "x" and charts[0].logarithmic else ""
        controls.append(f'<label><input type="checkbox" class="log-{letter}"{checked}>log {letter}</label>')
    if len(series) > 3:
        controls += [f'<button type="button" class="{which}">{which}</button>' for which in ("all", "none")]
    controls.append('<button type="button" class="csv">data (CSV)</button>')
    parts.append(f'<div class="switch" hidden>{"".join(controls)}</div>')
    return "\n".join(parts)


def _key(one: Series) -> str:
    """A piece of a line, for the legend."""
    dash = _dash(one)
    style = "" if dash == [1, 0] else f' stroke-dasharray="{" ".join(map(str, dash))}"'
    return (
        f'<svg class="key" viewBox="0 0 24 10" aria-hidden="true" style="color:var(--{one.colour})">'
        f'<path d="M0 5H24" stroke="currentColor" stroke-width="2.5"{style}/></svg>'
    )


_DOTTED = (
    '<svg class="key" viewBox="0 0 24 10" aria-hidden="true" style="color:var(--muted)">'
    '<path d="M0 5H24" stroke="currentColor" stroke-width="2" stroke-dasharray="2 3"/></svg>'
)


def _dash(one: Series) -> list[int]:
    return _DASHES[one.place // len(VARIANTS) % len(_DASHES)]


def _panel(chart: Chart, width: int) -> str:
    aloud = chart.label or f"{chart.title or chart.y} by {chart.axes[0].name}"
    data = {
        "slug": chart.slug,
        "title": chart.title,
        "y": chart.y,
        "kind": chart.kind,
        "series": [{"name": one.name, "colour": f"var(--{one.colour})"} for one in chart.series],
        "runs": list(chart.runs),
        "axes": [{"name": axis.name, "form": axis.form} for axis in chart.axes],
        "columns": chart.columns,
        "spec": specification(chart),
    }
    title = f'<p class="title">{escape(chart.title)}</p>' if chart.title else ""
    return (
        f'<div class="panel">{title}<div class="chart" '
        f'role="group" aria-label="{escape(aloud)}">{drawing(chart, width)}'
        f"{embedded(data, 'chart-data')}</div></div>"
    )


def specification(chart: Chart) -> JSONObject:
    """The chart in Vega-Lite without its data. Words that begin with @ stand for the axes, which readers may switch."""
    domain = list(range(len(chart.series)))
    colours = [f"var(--{one.colour})" for one in chart.series]
    colour = {"field": "s", "type": "nominal", "legend": None, "scale": {"domain": domain, "range": colours}}
    shapes = [_SHAPES[one.place % len(_SHAPES)] for one in chart.series]
    shape = {"field": "s", "type": "nominal", "legend": None, "scale": {"domain": domain, "range": shapes}}
    dashes = [_dash(one) for one in chart.series]
    dash = {"field": "s", "type": "nominal", "legend": None, "scale": {"domain": domain, "range": dashes}}
    x: JSONObject = {
        "field": "@x",
        "type": "quantitative",
        "title": "@title",
        "scale": {"type": "@scale", "zero": "@zero", "nice": False, "padding": 6},
        "axis": {"format": "@form", **({"values": list(chart.ticks)} if chart.ticks else {"tickCount": 6})},
    }
    y: JSONObject = {
        "field": "y",
        "type": "quantitative",
        "title": chart.y,
        "scale": {"type": "@yscale", "zero": "@yzero"},
        "axis": {"format": chart.form, **({"values": [10**-i for i in range(5)]} if chart.falls else {})},
    }
    if chart.limits:
        y["scale"] |= {"domain": list(chart.limits), "nice": False}
    layers: list[JSONObject] = []
    across = "x" if chart.kind == "strip" else "y"
    for _, value in chart.references:  # the legend names them
        if math.isfinite(value):
            at = {across: {"datum": value, **({"title": chart.y} if across == "y" else {})}}
            mark = {"type": "rule", "strokeDash": [2, 3], "color": "var(--muted)"}
            layers.append({"mark": mark, "encoding": at, "data": {"values": [{}]}})
    for place, low, high in chart.bands:
        shaded = {"type": "rect", "color": colours[place], "opacity": 0.16}
        at = {"y": {"datum": low}, "y2": {"datum": high}}
        layers.append({"mark": shaded, "encoding": at, "data": {"values": [{}]}})
    detail = [{"field": "r"}, {"field": "s"}]
    if chart.kind == "strip":
        return _finished(chart, _strip(chart, x, colour), layers)
    if chart.kind == "bars":
        bar = {"type": "rule", "strokeWidth": max(1, min(5, 300 // len(chart.columns["x0"])))}
        upright = {"x": x, "y": {**y, "scale": {**y["scale"], "zero": True}}, "y2": {"datum": 0}, "color": colour}
        return _finished(chart, layers, [{"mark": bar, "encoding": upright}])
    mean = _mean(chart)
    if "low" in chart.columns:
        layers.append({"mark": {"type": "rule", "strokeWidth": 1.2}, "encoding": {"x": x, "color": colour} | _ends(y)})
    if chart.kind != "marks":
        several = len(set(chart.columns["r"])) > 1
        if several:
            thin = {"type": "line", "strokeWidth": 1, "opacity": 0.6}
            layers.append({"mark": thin, "encoding": {"x": x, "y": y, "color": colour, "detail": detail}})
        thick = {"type": "line", "strokeWidth": 2, "strokeCap": "round"}
        drawn: JSONObject = {"mark": thick, "encoding": {"x": x, "y": y, "color": colour, "detail": detail[1:]}}
        drawn["encoding"] |= {"strokeDash": dash} if any(one != [1, 0] for one in dashes) else {}
        layers.append(drawn | {"transform": mean})
    if chart.kind != "lines" or len(set(chart.columns["x0"])) <= 25:
        filled = {"type": "point", "filled": True, "size": 70 if chart.kind == "marks" else 28, "opacity": 1}
        marks: JSONObject = {"mark": filled, "encoding": {"x": x, "y": y, "color": colour, "shape": shape}}
        layers.append(marks if chart.kind != "lines" else marks | {"transform": mean})
    return _finished(chart, layers, [])


def _ends(y: JSONObject) -> JSONObject:
    return {"y": {**y, "field": "low"}, "y2": {"field": "high"}}


def _mean(chart: Chart) -> list[JSONObject]:
    """The mean over runs at the x that all of an arm have; a gap where a value of one is not finite."""
    means = [{"op": "mean", "field": name, "as": name} for name in ("y", *(f"x{i}" for i in range(1, len(chart.axes))))]
    counted = [{"op": "count", "as": "n"}, {"op": "valid", "field": "y", "as": "valid"}]
    return [
        {"aggregate": [*means, *counted], "groupby": ["s", "x0"]},
        {"joinaggregate": [{"op": "max", "field": "n", "as": "most"}], "groupby": ["s"]},
        {"filter": "datum.n == datum.most"},
        {"calculate": "datum.valid == datum.n ? datum.y : null", "as": "y"},
    ]


def _strip(chart: Chart, x: JSONObject, colour: JSONObject) -> list[JSONObject]:
    names = [one.name for one in chart.series]
    row = {
        "field": "name",
        "type": "nominal",
        "title": None,
        "sort": names,
        "axis": {"labelLimit": 220, "labelColor": "var(--ink)", "labelFontSize": 12, "grid": True},
    }
    bar = {"type": "tick", "thickness": 2, "size": 16}
    average = [{"aggregate": [{"op": "mean", "field": "x0", "as": "x0"}], "groupby": ["s", "name"]}]
    dots = {"type": "point", "filled": True, "size": 60, "opacity": 0.75}
    return [
        {"mark": bar, "encoding": {"x": x, "y": row, "color": colour}, "transform": average},
        {"mark": dots, "encoding": {"x": x, "y": row, "color": colour}},
    ]


def _finished(chart: Chart, layers: list[JSONObject], more: list[JSONObject]) -> JSONObject:
    height = _ROW * len(chart.series) if chart.kind == "strip" else 230
    return {"config": _CONFIG, "height": height, "layer": [*more, *layers]}


def rows(chart: Chart) -> list[JSONObject]:
    """The points of a chart as records."""
    names = list(chart.columns)
    found = [dict(zip(names, point, strict=True)) for point in zip(*chart.columns.values(), strict=True)]
    return [one | {"name": chart.series[one["s"]].name} for one in found] if chart.kind == "strip" else found


def drawing(chart: Chart, width: int) -> str:
    """The chart as inline SVG, whose colours and letters are those of the page. The same chart gives the same bytes."""
    axis = chart.axes[0]
    scale = "log" if chart.logarithmic else "linear"
    words: JSONObject = {
        "@x": "x0",
        "@title": axis.name,
        "@form": axis.form,
        "@scale": scale,
        "@yscale": "log" if chart.falls else "linear",
    }
    words |= {"@zero": None if chart.logarithmic else False, "@yzero": None if chart.falls else False}
    points = [one for one in rows(chart) if not chart.logarithmic or (one["x0"] or 0) > 0]
    spec = filled(specification(chart), words) | {"data": {"values": points}, "width": width}
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return _svg(spec, chart.slug)


def filled(spec: Any, words: JSONObject) -> Any:
    """A specification with its placeholders replaced; those that stand for None are left out."""
    if isinstance(spec, dict):
        found = {key: filled(value, words) for key, value in spec.items()}
        return {key: value for key, value in found.items() if value is not None or spec[key] is None}
    if isinstance(spec, list):
        return [filled(value, words) for value in spec]
    return words.get(spec, spec) if isinstance(spec, str) else spec


def _svg(spec: JSONObject, slug: str) -> str:
    svg = libraries.vl_convert().vegalite_to_svg(spec)
    svg = re.sub(r' font-family="[^"]*"| class="[^"]*"| aria-hidden="true"| pointer-events="none"', "", svg)
    svg = re.sub(r'<path d="M0,0h0v0h0Z"/>|<path d="" display="none"/>', "", svg)
    # Two decimals are a hundredth of a pixel; in tags alone, for what a chart says keeps its digits.
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag.group()), svg)
    svg = re.sub(r'<svg[^>]*?(viewBox="[^"]+")[^>]*>', r'<svg \1 role="presentation">', svg, count=1)
    return own_ids(svg, slug)
