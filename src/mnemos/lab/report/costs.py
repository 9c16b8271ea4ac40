"""What the runs cost: what they spent, and their scores against it."""

import math
from collections.abc import Callable

from mnemos.lab.compare.budgets import budget_text
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import interval

from .charts import Axis, Chart, chart_figure, variant
from .markup import OPERATIONS, capital, count, duration, memory, operations, table_of
from .read import Results
from .shell import variant_name


def section(results: Results) -> str:
    """What each variant spent, and its score against that."""
    return "\n".join(filter(None, [_spent(results), _score_against_cost(results)]))


def _spent(results: Results) -> str:
    rows = results.rows
    reference = next((row for row in rows if row.name == results.against), rows[0])

    def per_update(row: Row) -> str:
        own, other = (one.seconds / (one.steps or math.nan) for one in (row, reference))
        ratio = (
            f"<small>{own / other:.2f}×</small>" if len(rows) > 1 and math.isfinite(own / (other or math.nan)) else ""
        )
        return f"{duration(own)}{ratio}"

    equal = f"{capital(budget_text(results.equal))}. " if results.equal else ""
    ratios = f", below it the ratio to {reference.name}" if len(rows) > 1 else ""
    caption = (
        f"What a run spent. {equal}What updates read is counted without padding, and twice if two updates read it. "
        f"{OPERATIONS} Time: the seconds of all updates that passed; per update: of one{ratios}. State: bytes per "
        "stream after a row of the greatest length that the settings of the data allow, of an encoder-decoder its "
        f"source and its output. Times from a busy machine mean little. Means over seeds. From {results.source}."
    )
    columns: dict[str, Callable[[Row], str]] = {
        "variant": lambda row: variant_name(results.names.index(row.name), row.name),
        "seeds": lambda row: str(row.seeds),
        "parameters": lambda row: count(row.parameters),
        "FLOPs of a row": lambda row: operations(row.flops),
        "state": lambda row: memory(row.state_bytes or math.nan),
        "updates": lambda row: count(row.steps),
        f"{results.unit} read": lambda row: count(row.tokens),
        "FLOPs of all updates": lambda row: operations(row.train_flops),
        "time": lambda row: duration(row.seconds),
        "per update": per_update,
        "peak memory": lambda row: memory(row.peak_bytes),
    }
    return table_of(caption, rows, columns)


def _score_against_cost(results: Results) -> str:
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if len(rows) < 2:
        return ""
    charts = []
    for name, axis in (
        ("seconds", Axis("seconds of updates", ",~f")),
        ("train_flops", Axis("FLOPs of all updates", "~s")),
    ):
        series = [variant(row.name, results.names.index(row.name)) for row in rows]
        title = f"{capital(results.score)} against {axis.name}"
        chart = Chart(f"cost-{name}", title, results.score, series, ["mean"], [axis], "marks", logarithmic=True)
        for index, row in enumerate(rows):
            if (cost := getattr(row, name)) > 0:
                chart.add(index, 0, row.mean, cost, interval=interval(row, results.bounds) or (row.mean, row.mean))
        charts.append(chart)
    bars = ", with the 95% interval" if any(interval(row, results.bounds) for row in rows) else ""
    caption = (
        f"Quality against cost: the mean {results.score}{bars}, against the seconds of updates and the floating-point "
        "operations (FLOPs) of its updates: forward, backward, and the forwards that memory replay computes again; a "
        "multiply-add is 2. Seconds are those that passed, so they grow on a busy machine. From "
        f"{results.source}."
    )
    return chart_figure(charts, caption)
