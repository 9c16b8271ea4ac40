"""The results of the benchmarks: a table for the terminal, and one HTML page with tables and figures."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mnemos.atomic import write_text
from mnemos.lab.report.markup import (
    count,
    decimal,
    duration,
    escape,
    figure,
    legend,
    listed,
    memory,
    missing,
    operations,
    paragraph,
    table,
)
from mnemos.lab.report.shell import html_page
from mnemos.lab.report.style import MARKERS, MUTED, VARIANTS, panel, variant_colour, variant_name
from mnemos.types import JSONObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GLYPHS = dict(zip(MARKERS, "●■▲◆▼✚", strict=True))  # the markers in the legend
HEAD = ("memory", "score", "rate", "state", "at segments", "parameters", "FLOPs", "training", "emptied", "longest")
ERROR = 0.02  # of a score from the rows of a test split, whatever the seed


def show(entry: JSONObject) -> None:
    """Print the tables of one benchmark: what was measured, and what is published."""
    from rich.console import Console
    from rich.table import Table

    def printed(*columns: str) -> Table:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            made.add_column(column, justify="right" if i else "left", no_wrap=not i)
        return made

    head = _head(entry)
    console = Console(width=max(130 + 18 * (len(head) - len(HEAD)), Console().width))
    found = printed(*head)
    for row in entry["rows"]:
        found.add_row(*_cells(row))
    for name in entry["failed"]:
        found.add_row(name, "failed")
    for name, value in _references(entry):
        found.add_row(name, decimal(value))
    console.print(found)
    if entry["published"]:
        theirs = printed("published", "score")  # names as long as these would break the columns above
        for name, value in entry["published"]:
            theirs.add_row(name, decimal(value))
        console.print(theirs)
    for line in (_origin(entry), failed_seeds(entry), unlearned(entry)):
        if line:
            print(line)


def unlearned(entry: JSONObject) -> str:
    """A sentence that names the memories whose score needs no memory of what is asked; empty if there is none."""
    what, least = max(_references(entry), key=lambda one: one[1])
    names = [row["name"] for row in entry["rows"] if row["mean"] <= least + (row["std"] or 0.0) + ERROR]
    if not names:
        return ""
    who = "every memory" if len(names) == len(entry["rows"]) > 1 else listed(names)
    return (
        f"Not learned: {who}. A task counts as learned if the score is above that of {what} "
        f"({decimal(least)}) by more than the standard deviation over seeds and {ERROR}, the error of a test "
        "split. Without that, this training does not show what a memory can hold."
    )


def _references(entry: JSONObject) -> list[tuple[str, float]]:
    """What the scores are compared with: guessing and, where it is known, an answer that ignores what is asked."""
    keyless = entry.get("keyless", 0.0)
    return [("guessing", entry["chance"]), *([("ignoring what is asked", keyless)] if keyless else [])]


def failed_seeds(entry: JSONObject) -> str:
    """A sentence that names the memories of which seeds failed at the chosen rate; empty if there is none."""
    found = [(row["name"], failed, row["seeds"]) for row in entry["rows"] if (failed := row.get("failed_seeds", 0))]
    if not found:
        return ""
    names = listed([f"{name} ({failed} of {failed + seeds})" for name, failed, seeds in found])
    return f"Failed runs at the chosen rate, which are not in the mean: {names}. Such a mean is too good."


def _origin(entry: JSONObject) -> str:
    """Where the published scores differ; empty without any."""
    if not entry["published"]:
        return ""
    data = "data of the same size" if entry["published_at_this_size"] else "other data, or of other sizes"
    return (
        f"Published scores are of {data}. Their models are wider or were trained for longer, unless their name says so."
    )


def _cells(row: JSONObject) -> list[str]:
    emptied, beyond = row["controls"].get("emptied"), row["beyond"]
    return [
        row["name"],
        _spread(row["mean"], row["std"]),
        f"{row['rate']:.1e}",
        memory(row["state_bytes"]),
        memory(row["segment_state_bytes"]),
        count(row["parameters"]),
        operations(row["flops"]),
        duration(row["seconds"]),
        "–" if emptied is None else decimal(emptied),
        f"{decimal(beyond[-1]['mean'])} at {beyond[-1]['at']:g}" if beyond[1:] else "–",
        *(_spread(one["mean"], one["std"]) for one in row.get("beside", {}).values()),
    ]


def _head(entry: JSONObject) -> list[str]:
    """The columns of a table of one benchmark: all have `HEAD`, and some further scores."""
    return [*HEAD, *entry["rows"][0].get("beside", {})]


def _spread(mean: float, std: float | None) -> str:
    return decimal(mean) if std is None else f"{decimal(mean)} ± {decimal(std)}"


def write_page(result: JSONObject, path: Path) -> None:
    """Write the page of a benchmarks.json. The file is replaced atomically; the same input gives the same bytes."""
    names = list(dict.fromkeys(row["name"] for entry in result["benchmarks"] for row in entry["rows"]))
    body = "\n".join(_section(entry, names) for entry in result["benchmarks"])
    title = f"Benchmarks of memory: {listed([entry['name'] for entry in result['benchmarks']])}"
    seeds = f"{result['seeds']} seeds" if result["seeds"] > 1 else "one seed, so no spread is known"
    lead = (
        "Each memory is trained at several learning rates with one seed. The rate with the best score on the "
        "validation split is chosen, and the test scores are those of its runs "
        f"({seeds}). All memories read the same data."
    )
    write_text(path, html_page(title, f"{paragraph(lead, 'lead')}\n{body}"))


def _section(entry: JSONObject, names: Sequence[str]) -> str:
    parts = [
        paragraph(f"{entry['about'][0].upper()}{entry['about'][1:]}."),
        _table(entry, names),
        *(paragraph(line) for line in (failed_seeds(entry), unlearned(entry)) if line),
        _figures(entry, names),
    ]
    parts += [missing(f"{listed(entry['failed'])}: every run failed.")] if entry["failed"] else []
    return f'<section id="{escape(entry["name"])}"><h2>{escape(entry["name"])}</h2>\n' + "\n".join(parts) + "</section>"


def _table(entry: JSONObject, names: Sequence[str]) -> str:
    rows = []
    for row in entry["rows"]:
        _, *cells = map(escape, _cells(row))
        rows.append([variant_name(names.index(row["name"]), row["name"]), *cells])
    rates = listed([f"{rate:.1e}" for rate, _ in entry["rows"][0]["rates"]])
    caption = (
        f"{entry['metric'].capitalize()} on the test split after {entry['steps']:,} updates of {entry['batch']} rows; "
        f"guessing: {decimal(entry['chance'])}. Mean and standard deviation over seeds. Rate: chosen among {rates}. "
        "State: the most bytes that one row keeps between two tokens; at segments: between two segments, or after the "
        "row if it is read in one call. The memories are in the order of their state. FLOPs: of a training forward of "
        "one row. Training: seconds of the updates of one run with one thread, beside other runs. Emptied: the score "
        "of later segments of some rows with the state replaced by that of a new row before each. Longest: the score "
        f"on rows of the greatest {entry['axis']}, and that {entry['axis']}. "
        f"{_origin(entry)}"
    )
    head = _head(entry)
    if beside := head[len(HEAD) :]:
        caption += f" {listed(beside).capitalize()}: the same score with other targets counted in the test rows."
    for name, value in [*_references(entry), *((f"published: {name}", value) for name, value in entry["published"])]:
        rows.append([escape(name), decimal(value), *["–"] * (len(head) - 2)])
    return table(caption, head, rows)


def _figures(entry: JSONObject, names: Sequence[str]) -> str:
    metric = entry["metric"]
    drawn: list[tuple[str, str, str, Callable[[Axes], None]]] = [
        ("state", f"{metric} against state", "bytes of state per row", partial(_scatter, entry, names, "state_bytes")),
        ("time", f"{metric} against time", "seconds of training", partial(_scatter, entry, names, "seconds")),
    ]
    if entry["rows"][0]["beyond"][1:]:
        drawn.insert(1, ("beyond", f"{metric} beyond training", entry["axis"], partial(_beyond, entry, names)))
    panels = [
        panel(f"{entry['name']}-{slug}", title.capitalize(), draw, label=f"{entry['name']}: {title}", x=x)
        for slug, title, x, draw in drawn
    ]
    keys = []
    for row in entry["rows"]:
        sign = _GLYPHS[_look(names, row)["marker"]]
        keys.append((f"variant-{names.index(row['name']) % len(VARIANTS)}", f"{sign} {row['name']}"))
    caption = (
        f"Dotted: {listed([name for name, _ in _references(entry)])}. Beyond training: rows of {entry['axis']} "
        f"{entry['trained_at']:g} are those of training, and longer ones were never trained on. Bars and bands are "
        "standard deviations over seeds."
    )
    return figure(panels, caption, legend=legend(keys))


def _scatter(entry: JSONObject, names: Sequence[str], key: str, axes: "Axes") -> None:
    """Score against bytes of state or seconds, one mark per memory; the legend names it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for row in entry["rows"]:
        axes.errorbar([row[key]], [row["mean"]], yerr=row["std"], markersize=5, **_look(names, row))
    values = [row[key] for row in entry["rows"]]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(values) / 2, 2 * max(values))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: memory(x) if key == "state_bytes" else f"{x:,.4g}"))
    axes.xaxis.set_major_locator(LogLocator(2, numticks=7))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=7)
    _chance(entry, axes)


def _beyond(entry: JSONObject, names: Sequence[str], axes: "Axes") -> None:
    """Score against the length of test rows."""
    for row in entry["rows"]:
        at, mean = [one["at"] for one in row["beyond"]], [one["mean"] for one in row["beyond"]]
        look = _look(names, row)
        axes.plot(at, mean, markersize=3.4, **look)
        spread = [one["std"] or 0.0 for one in row["beyond"]]
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks([one["at"] for one in entry["rows"][0]["beyond"]])
    axes.set_xticklabels([f"{one['at']:g}" for one in entry["rows"][0]["beyond"]])
    axes.minorticks_off()
    _chance(entry, axes)


def _look(names: Sequence[str], row: JSONObject) -> JSONObject:
    index = names.index(row["name"])
    return {"color": variant_colour(index), "marker": MARKERS[(index + index // len(VARIANTS)) % len(MARKERS)]}


def _chance(entry: JSONObject, axes: "Axes") -> None:
    for _, value in _references(entry):
        axes.axhline(value, color=MUTED[0], linewidth=0.8, linestyle=(0, (1, 2)))
    values = [one["mean"] for row in entry["rows"] for one in row["beyond"] if math.isfinite(one["mean"])]
    axes.set_ylim(-0.03, max(1.03, *values) if values else 1.03)
    axes.grid(axis="y")
