"""What the runs cost: what they spent, and their scores against it."""

import math
from collections.abc import Callable

import numpy as np

from mnemos.lab.compare.budgets import budget_text
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import interval

from .charts import Axis, Chart, chart_figure, variant
from .markup import OPERATIONS, capital, count, duration, memory, operations, table_of
from .read import Results, finite_spread
from .run_records import RunRecord
from .shell import variant_name


def section(results: Results) -> str:
    """What each variant spent, and its score against that."""
    return "\n".join(filter(None, [_spent(results), _score_against_cost(results)]))


def _mean(results: Results, row: Row, of: Callable[[RunRecord], float]) -> float:
    return finite_spread(of(run) for run in results.runs_of(row.name)).mean


def _spent(results: Results) -> str:
    rows = [row for row in results.rows if results.runs_of(row.name)]
    reference = next((row for row in rows if row.name == results.against), rows[0]) if rows else None

    def per_update(run: RunRecord) -> float:
        return run.cost("seconds") / (run.cost("steps") or math.nan)

    def rows_per_second(run: RunRecord) -> float:  # of the validation split, that an evaluation scored
        seconds = run.valid["seconds"][np.isfinite(run.valid["seconds"])]
        rows = run.result.scored_rows.get("valid", math.nan) if run.result else math.nan
        return rows / float(np.median(seconds)) if seconds.size else math.nan

    def with_ratio(row: Row) -> str:
        own = _mean(results, row, per_update)
        ratio = own / (_mean(results, reference, per_update) or math.nan) if reference else math.nan
        more = f"<small>{ratio:.2f}×</small>" if len(rows) > 1 and math.isfinite(ratio) else ""
        return f"{duration(own)}{more}"

    epochs = any(math.isfinite(run.cost("epoch_seconds")) for row in rows for run in results.runs_of(row.name))
    epoch = " An epoch is the number of updates that reads the training split once." if epochs else ""
    equal = f"{capital(budget_text(results.equal))}. " if results.equal else ""
    ratios = f", below it the ratio to {reference.name}" if reference and len(rows) > 1 else ""
    caption = (
        f"What a run spent. {equal}What updates read is counted without padding, and twice if two updates read it. "
        f"{OPERATIONS} Time: the seconds of all updates that passed; per update: of one{ratios}.{epoch} "
        "Rows/s: what an evaluation scored (of translation: sentences; of text: segments). Times from a busy machine "
        "mean little. Means over seeds. From result.json and metrics.jsonl."
    )
    columns: dict[str, Callable[[Row], str]] = {
        "variant": lambda row: variant_name(results.names.index(row.name), row.name),
        "updates": lambda row: count(_mean(results, row, lambda run: run.cost("steps"))),
        f"{results.unit} read": lambda row: count(_mean(results, row, lambda run: run.cost("tokens"))),
        "FLOPs of all updates": lambda row: operations(_mean(results, row, lambda run: run.cost("train_flops"))),
        "time": lambda row: duration(row.seconds),
        "per update": with_ratio,
        "per epoch": lambda row: duration(_mean(results, row, lambda run: run.cost("epoch_seconds"))),
        "rows/s": lambda row: count(_mean(results, row, rows_per_second)),
        "peak memory": lambda row: memory(row.peak_bytes),
    }
    return table_of(caption, rows, columns)


def _score_against_cost(results: Results) -> str:
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if len(rows) < 2:
        return ""
    score, charts = results.score, []
    for name, axis in (("time", Axis("seconds of updates", ",~f")), ("FLOPs", Axis("FLOPs of all updates", "~s"))):
        series = [variant(row.name, results.names.index(row.name)) for row in rows]
        title = f"{capital(score)} against {name}"
        chart = Chart(f"cost-{name}", title, score, series, ["mean"], [axis], "marks", logarithmic=True)
        for index, row in enumerate(rows):
            cost = row.seconds if name == "time" else _mean(results, row, lambda run: run.cost("train_flops"))
            if cost > 0 and math.isfinite(cost):
                ends = interval(row, results.bounds) or (row.mean, row.mean)
                chart.add(index, 0, row.mean, cost, interval=ends)
        charts.append(chart)
    bars = ", with the 95% interval" if any(interval(row, results.bounds) for row in rows) else ""
    caption = (
        f"Quality against cost: the mean {score}{bars}, against the seconds of updates and the floating-point "
        "operations (FLOPs) of its updates: forward, backward, and the forwards that memory replay computes again; a "
        "multiply-add is 2. Seconds are those that passed, so they grow on a busy machine. From result.json and "
        "metrics.jsonl."
    )
    return chart_figure(charts, caption)
