"""The results of the benchmarks: a table for the terminal, and one HTML page with tables and figures."""

import math
from collections.abc import Sequence
from pathlib import Path

from mnemos.atomic import write_text
from mnemos.errors import say
from mnemos.lab.compare.significance import Spread, interval
from mnemos.lab.report.charts import Axis, Chart, chart_figure, variant
from mnemos.lab.report.markup import (
    contents,
    count,
    decimal,
    duration,
    escape,
    folded,
    listed,
    memory,
    missing,
    operations,
    paragraph,
    prose,
    table,
)
from mnemos.lab.report.shell import chart_library, html_page, script
from mnemos.lab.report.style import variant_name
from mnemos.lab.tasks.metrics import bounds_of
from mnemos.types import JSONObject

_SECONDS = Axis("seconds of training", ",~f")
_NAMED = 3  # memories at most that a sentence names
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
    console = Console(width=max(130 + 18 * (len(head) - len(HEAD)), Console().width), markup=False)
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
            say(line)


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
    keyless = entry["keyless"]
    return [("guessing", entry["chance"]), *([("ignoring what is asked", keyless)] if keyless else [])]


def failed_seeds(entry: JSONObject) -> str:
    """A sentence that names the memories of which seeds failed at the chosen rate; empty if there is none."""
    found = [(row["name"], failed, row["seeds"]) for row in entry["rows"] if (failed := row["failed_seeds"])]
    if not found:
        return ""
    names = listed([f"{name} ({failed} of {failed + seeds})" for name, failed, seeds in found])
    return f"Failed runs at the chosen rate, which are not in the mean: {names}."


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
        *(_spread(one["mean"], one["std"]) for one in row["beside"].values()),
    ]


def _head(entry: JSONObject) -> list[str]:
    """The columns of a table of one benchmark: all have `HEAD`, and some further scores."""
    return [*HEAD, *entry["rows"][0]["beside"]]


def _spread(mean: float, std: float | None) -> str:
    return decimal(mean) if std is None else f"{decimal(mean)} ± {decimal(std)}"


def write_page(result: JSONObject, path: Path) -> None:
    """Write the page of a benchmarks.json. The file is replaced atomically; the same input gives the same bytes."""
    names = list(dict.fromkeys(row["name"] for entry in result["benchmarks"] for row in entry["rows"]))
    title = f"Benchmarks of memory: {listed([entry['name'] for entry in result['benchmarks']])}"
    seeds = f"{result['seeds']} seeds" if result["seeds"] > 1 else "one seed, so no spread is known"
    entries = result["benchmarks"]
    how = (
        "Each memory is trained at each learning rate with one seed. The rate with the best score on the "
        "validation split is chosen, and the test scores are those of its runs "
        f"({seeds}). All memories read the same data."
    )
    opening = [
        *(paragraph(_best(entry), "lead") for entry in entries),
        _figures(entries[0], names) if entries else "",
        f'<ul class="caveats">{"".join(f"<li>{prose(line)}</li>" for line in [how, *_warned(entries)])}</ul>',
        contents((entry["name"], entry["name"]) for entry in entries),
    ]
    sections = (
        folded(entry["name"], entry["name"], _section(entry, names, drawn=i > 0), opened=len(entries) == 1)
        for i, entry in enumerate(entries)
    )
    body = '<section id="verdict" class="opening">\n' + "\n".join(filter(None, opening)) + "</section>\n"
    write_text(path, html_page(title, body + "\n".join(sections), scripts=[chart_library(), script("page.js")]))


def _warned(entries: Sequence[JSONObject]) -> list[str]:
    """What weakens the scores of each benchmark."""
    found = [(entry["name"], line) for entry in entries for line in (unlearned(entry), failed_seeds(entry)) if line]
    return [line if len(entries) == 1 else f"{name}: {line}" for name, line in found]


def _best(entry: JSONObject) -> str:
    """One sentence: the scores from the best, and a guess."""
    ranked = sorted(entry["rows"], key=lambda row: row["mean"], reverse=True)
    scores = [f"{row['name']} {_spread(row['mean'], row['std'])}" for row in ranked[:_NAMED]]
    more = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    return f"{entry['name']}, test {entry['metric']}: {', '.join(scores)}{more}; guessing {decimal(entry['chance'])}."


def _section(entry: JSONObject, names: Sequence[str], drawn: bool) -> str:
    parts = [
        paragraph(f"{entry['about'][0].upper()}{entry['about'][1:]}."),
        _table(entry, names),
        _figures(entry, names) if drawn else "",
    ]
    parts += [missing(f"{listed(entry['failed'])}: every run failed.")] if entry["failed"] else []
    return "\n".join(filter(None, parts))


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
        "one row. Training: seconds of the updates of one run. Emptied: the score "
        "of later segments of some rows with the state replaced by that of a new row before each. Longest: the score "
        f"on rows of the greatest {entry['axis']}, and that {entry['axis']}. "
        f"{_origin(entry)}"
    )
    head = _head(entry)
    if beside := head[len(HEAD) :]:
        caption += f" {listed(beside).capitalize()}: the same score with other targets counted in the test rows."
    for name, value in [*_references(entry), *((f"published: {name}", value) for name, value in entry["published"])]:
        rows.append([escape(name), decimal(value), *[""] * (len(head) - 2)])
    return table(caption, head, rows, "dense")


def _figures(entry: JSONObject, names: Sequence[str]) -> str:
    metric, rows = entry["metric"], entry["rows"]
    bounds = bounds_of(entry["bounds"])
    variants = [variant(row["name"], names.index(row["name"])) for row in rows]
    references = [(name, value) for name, value in _references(entry) if math.isfinite(value)]
    charts = []
    if rows[0]["beyond"][1:]:
        places = [one["at"] for one in rows[0]["beyond"]]
        look: JSONObject = {"mode": "points", "logarithmic": places[0] > 0, "ticks": places, "references": references}
        title = f"{metric} beyond training".capitalize()
        chart = Chart(f"{entry['name']}-beyond", title, metric, variants, ["mean"], [Axis(entry["axis"], "~g")], **look)
        for place, row in enumerate(rows):
            for one in row["beyond"]:
                chart.add(place, 0, one["mean"], one["at"], interval=_bar(one, row["seeds"], bounds))
        charts.append(chart)
    against = (("state_bytes", "state", Axis("bytes of state per row", "~s")), ("seconds", "time", _SECONDS))
    for key, name, axis in against:
        look = {"mode": "marks", "logarithmic": True, "references": references}
        title = f"{metric} against {name}".capitalize()
        chart = Chart(f"{entry['name']}-{name}", title, metric, variants, ["mean"], [axis], **look)
        for place, row in enumerate(rows):
            chart.add(place, 0, row["mean"], row[key], interval=_bar(row, row["seeds"], bounds))
        charts.append(chart)
    caption = f"{entry['name']}."
    if rows[0]["beyond"][1:]:
        caption += (
            f" Beyond training: rows of {entry['axis']} {entry['trained_at']:g} are those of training, and longer ones "
            "were never trained on."
        )
    if any(row["seeds"] > 1 for row in rows):
        caption += " Bars are 95% intervals over seeds (Student's t), within the bounds of the score."
    return chart_figure(charts, caption)


def _bar(one: JSONObject, seeds: int, bounds: tuple[float, float]) -> tuple[float, float]:
    std = math.nan if one["std"] is None else one["std"]
    return interval(Spread(one["mean"], std, seeds), bounds) or (one["mean"], one["mean"])
