"""Print a comparison as tables: scores with what the seeds show, costs, and the metric along an axis of the task."""

from typing import Any

from mnemos.lab.evaluate.controls import legend
from mnemos.lab.tasks.no_learning import no_better
from mnemos.types import JSONObject

from .budgets import budget_text
from .comparison import UNNAMED_UNIT
from .significance import LEVEL, NO_SPREAD, ONE_SEED, finding

_STATE = "state KiB: what a stream keeps from call to call, after a row of the greatest length; –: nothing"
_WIDTH = 150  # of a file, which has no width of its own; enough for all columns


def show(comparison: JSONObject) -> None:
    """Print a comparison as tables."""
    from rich.console import Console

    console = Console(width=max(_WIDTH, Console().width))
    console.print(_scores(comparison))
    for line in _notes(comparison):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_costs(comparison))
    console.print(_STATE, highlight=False, soft_wrap=True)
    rows = [row for row in comparison["rows"] if row.get("along")]
    if rows:
        console.print(_along(rows))


def _table(columns: list[str], **more: Any) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", **more)
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    return table


def _score(row: JSONObject) -> str:
    spread = "" if row["std"] is None else f" ± {row['std']:.4f}"
    return f"{row['mean']:.4f}{spread}"


def _scores(comparison: JSONObject) -> Any:
    """The rows with their controls; with several seeds also intervals and the tests against the reference."""
    tested = any(row["interval"] for row in comparison["rows"])
    swept = any("rate" in row for row in comparison["rows"])
    columns = ["", comparison["metric"], "seeds"]
    columns += ["95 % interval", f"difference to {comparison['against']}", "p (Holm)", "shown"] if tested else []
    table = _table([*columns, *(["learning rate"] if swept else [])])
    for row in comparison["rows"]:
        cells = [row["name"], _score(row), str(row["seeds"])]
        cells += _shown(row, comparison) if tested else []
        table.add_row(*cells, *([f"{row['rate']:.1e}"] if "rate" in row else []))
        for control in comparison["controls"]:
            if control["name"] == row["name"]:
                table.add_row(f"  cache {control['control']}", _score(control), str(control["seeds"]))
    for name, value in comparison["reference"].items():  # without learning
        table.add_row(name, f"{value:.4f}")
    return table


def _shown(row: JSONObject, comparison: JSONObject) -> list[str]:
    """The interval of a row's mean, and its difference to the reference with interval, corrected p and meaning."""
    own = "–" if row["interval"] is None else "{:.4f} to {:.4f}".format(*row["interval"])
    test = row["against"]
    if test is None:
        return [own, "", "", "reference" if row["name"] == comparison["against"] else "–"]
    low, high = test["interval"]
    difference = f"{test['difference']:+.4f} ({low:+.4f} to {high:+.4f})"
    return [own, difference, f"{test['p_holm']:.3g}", finding(test, comparison["higher_is_better"])]


def _notes(comparison: JSONObject) -> list[str]:
    """What was made equal, and how the differences are to be read."""
    lines = [budget_text(comparison["equal"])] if "equal" in comparison else []
    if comparison["controls"]:
        lines.append(f"caches {legend(one['control'] for one in comparison['controls'])}")
    scores = {row["name"]: row["mean"] for row in comparison["rows"]}
    lines += no_better(scores, comparison["reference"], comparison["metric"], comparison["higher_is_better"])
    several = len(comparison["rows"]) > 1
    if several and any(row["against"] for row in comparison["rows"]):
        lines.append(
            f"differences: Welch's t-test against {comparison['against']}, p corrected over the rows by Holm; no "
            f"difference is shown where p ≥ {LEVEL:g}. The intervals of differences are not corrected."
        )
    elif several and any(row["seeds"] == 1 for row in comparison["rows"]):
        lines.append(ONE_SEED)
    if any(row["seeds"] > 1 and row["std"] == 0 for row in comparison["rows"]):
        lines.append(NO_SPREAD)
    return lines


def _costs(comparison: JSONObject) -> Any:
    unit = comparison.get("unit") or UNNAMED_UNIT
    columns = [
        "",
        "parameters",
        "steps",
        f"{unit} read",
        "training TFLOP",
        "forward MFLOP/row",
        "state KiB",
        "seconds passed",
        "peak MiB",
    ]
    table = _table(columns)
    for row in comparison["rows"]:
        table.add_row(
            row["name"],
            f"{row['parameters']:,}",
            _number(row["steps"], 1, 0),
            _number(row["tokens"], 1, 0),
            "–" if row["train_flops"] is None else f"{row['train_flops'] / 1e12:.3g}",
            _number(row["flops"], 1e6, 2),
            _number(row["state_bytes"], 2**10, 1) if row["state_bytes"] else "–",
            _number(row["seconds"], 1, 1),
            _number(row["peak_bytes"], 2**20, 0),
        )
    return table


def _number(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:,.{digits}f}"


def _along(rows: list[JSONObject]) -> Any:
    first = rows[0]["along"]
    table = _table(["", *(f"{one['x']:g}" for one in first["values"])], title=f"{first['metric']} by {first['x']}")
    for row in rows:
        table.add_row(row["name"], *(_score(one) for one in row["along"]["values"]))
    return table
