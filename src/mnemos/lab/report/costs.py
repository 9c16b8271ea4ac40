"""What the runs cost: what they spent, their scores against it, and what each cached layer adds."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from mnemos.lab.compare.budgets import budget_text
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import interval
from mnemos.lab.evaluate.recorded import LayerCost

from .charts import Axis, Chart, chart_figure, variant
from .markup import OPERATIONS, capital, count, duration, escape, memory, operations, shortened, table, table_of
from .read import Results, finite_spread
from .run_records import RunRecord
from .shell import variant_name


def section(results: Results) -> str:
    """What each variant spent, its score against that, and a table of layers for each variant that recorded costs."""
    recorded = results.first_runs(lambda run: run.explained and any(layer.cost for layer in run.explained.layers))
    parts = [_spent(results), _score_against_cost(results), *(_layers(name, run) for name, run in recorded)]
    return "\n".join(filter(None, parts))


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


def _layers(name: str, run: RunRecord) -> str:
    every = run.explained.layers if run.explained else ()
    called = shortened([layer.name for layer in every])
    layers = [(label, layer.cost) for label, layer in zip(called, every, strict=True) if layer.cost]

    def sums(costs: Sequence[LayerCost]) -> list[str]:
        macs = (sum(cost.training_macs for cost in costs), sum(cost.inference_macs for cost in costs))
        return [count(sum(cost.parameters for cost in costs)), *(operations(2 * one) for one in macs)]

    # --- by formula: one row for consecutive layers of one shape, and the sum ---
    rows = []
    for cost, members in itertools.groupby(layers, key=lambda one: one[1]):
        labels = [label for label, _ in members]
        tokens = f"{cost.rows} × {cost.tokens}" if cost.rows > 1 else str(cost.tokens)
        ends = " to ".join(dict.fromkeys((labels[0], labels[-1])))
        sizes = [tokens, f"{cost.slots} × {cost.cache_width}", str(cost.heads)]
        rows.append([f"<code>{escape(ends)}</code>", str(len(labels)), *sizes, *sums([cost] * len(labels))])
    costs = [cost for _, cost in layers]
    if len(rows) > 1:
        rows.append(["all", str(len(layers)), "", "", "", *sums(costs)])

    # --- the sum beside the rest of the model ---
    parameters, flops = sum(cost.parameters for cost in costs), 2 * sum(cost.training_macs for cost in costs)
    rest, share = (run.cost("parameters") - parameters, run.cost("flops") - flops), ""
    if all(math.isfinite(value) and value > 0 for value in rest):
        share = (
            f"That is {parameters / rest[0]:.1%} of the parameters and {flops / rest[1]:.1%} of the training forward's "
            "FLOPs that the rest of the model has. "
        )
    caption = (
        f"{name}: what the caches add for one sample, by formula. Tokens: per call (windows × tokens per window). "
        "Cache: slots × channels. FLOPs: 2 per multiply-add; a forward in training updates a cache that is written. "
        f"{share}From {run.label}/explain.json."
    )
    shape = ["layers", "count", "tokens", "cache", "heads", "parameters"]
    return table(caption, [*shape, "FLOPs of a forward in training", "FLOPs in evaluation"], rows)
