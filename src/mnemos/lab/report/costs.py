"""What quality costs: what the runs spent, score against time and FLOPs, what the caches add, and measured times."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from mnemos.lab.compare.budgets import budget_text
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import interval
from mnemos.lab.evaluate.recorded import LayerCost

from .charts import Axis, Chart, arm, chart_figure
from .markup import OPERATIONS, capital, count, duration, escape, memory, operations, shortened, table
from .read import Results, finite_spread
from .run_records import RunRecord
from .style import variant_name

_SECONDS, _FLOPS = "seconds", "FLOPs"


def quality_section(results: Results) -> str:
    """What each variant spent on its updates, and its score against that; "" for one variant or no finished run."""
    rows = [row for row in results.rows if math.isfinite(row.mean) and math.isfinite(_mean_cost(results, row, "steps"))]
    if len(rows) < 2:
        return ""
    axes = [_SECONDS] + [_FLOPS] * any(math.isfinite(_spent(results, row, _FLOPS)) for row in rows)
    charts = [_scores(results, rows, unit) for unit in axes]
    bars = ", with the 95% interval" if any(interval(row, results.bounds) for row in rows) else ""
    caption = (
        f"Quality against cost: the mean {results.split} {results.metric}{bars}, against the seconds of updates and "
        "the floating-point operations (FLOPs) of its updates: forward, backward, and the forwards that memory replay "
        "computes again; a multiply-add is 2. Seconds are those that passed, so they grow on a busy machine. From "
        "result.json and metrics.jsonl."
    )
    return _spent_table(results, rows) + "\n" + chart_figure(charts, caption)


def _scores(results: Results, rows: list[Row], unit: str) -> Chart:
    """A mark with its interval for each variant, on a logarithmic axis of cost."""
    against = "time" if unit == _SECONDS else "FLOPs"
    axis = Axis("seconds of updates", ",~f") if unit == _SECONDS else Axis("FLOPs of all updates", "~s")
    arms = [arm(row.name, results.names.index(row.name)) for row in rows]
    score = f"{results.split} {results.metric}"
    chart = Chart(f"cost-{unit}", f"{capital(score)} against {against}", score, arms, ["mean"], [axis], "marks", True)
    for place, row in enumerate(rows):
        if (cost := _spent(results, row, unit)) > 0 and math.isfinite(cost):
            ends = interval(row, results.bounds) or (row.mean, row.mean)
            chart.add(place, 0, row.mean, cost, interval=ends)
    return chart


def _spent_table(results: Results, rows: list[Row]) -> str:
    head = [
        "variant",
        "updates",
        f"{results.unit} read",
        "FLOPs of all updates",
        "time",
        "time per update",
        "learning rate",
    ]
    cells = []
    for row in rows:
        steps = _mean_cost(results, row, "steps")
        cells.append(
            [
                variant_name(results.names.index(row.name), row.name),
                count(steps),
                count(_mean_cost(results, row, "tokens")),
                operations(_spent(results, row, _FLOPS)),
                duration(row.seconds),
                duration(row.seconds / steps),
                _rate(results, row),
            ]
        )
    equal = f"{capital(budget_text(results.equal))}. " if results.equal else ""
    caption = (
        f"What a run spent. {equal}What updates read is counted without padding, and twice if two updates read it. "
        f"{OPERATIONS} Time: the seconds of all updates that passed. Means over seeds. From result.json."
    )
    return table(caption, head, cells)


def _rate(results: Results, row: Row) -> str:
    """The learning rate of a variant's runs."""
    optim = [run.recipe.get("optim") for run in results.runs_of(row.name)]
    rates = {one.get("lr") for one in optim if isinstance(one, dict)}
    rate = rates.pop() if len(rates) == 1 else None
    return f"{rate:.2g}" if isinstance(rate, float) else "–"


def _mean_cost(results: Results, row: Row, key: str) -> float:
    """The mean of a number of result.json over the finished runs of a variant; NaN if no run has it."""
    return finite_spread(run.cost(key) for run in results.runs_of(row.name)).mean


def _spent(results: Results, row: Row, unit: str) -> float:
    """Seconds or FLOPs of all updates of a run."""
    return row.seconds if unit == _SECONDS else _mean_cost(results, row, "train_flops")


def cost_section(results: Results) -> str:
    """A table of layers for each cached variant that recorded its costs, and one of measured times for all variants."""
    parts = []
    for name in results.names:
        runs = results.runs_of(name)
        known = [run for run in runs if run.explained and any(layer.cost for layer in run.explained.layers)]
        parts += [_layers(name, known[0])] if known else []
    return "\n".join(filter(None, [*parts, _measured(results)]))


def _layers(name: str, run: RunRecord) -> str:
    """Costs by formula: one row for consecutive layers of one shape, and the sum."""
    every = run.explained.layers if run.explained else ()
    called = dict(zip((layer.name for layer in every), shortened([layer.name for layer in every]), strict=True))
    layers = [(layer, layer.cost) for layer in every if layer.cost]
    rows = []
    for cost, members in itertools.groupby(layers, key=lambda one: one[1]):
        names = [called[layer.name] for layer, _ in members]
        tokens = f"{cost.rows} × {cost.tokens}" if cost.rows > 1 else str(cost.tokens)
        ends = " to ".join(dict.fromkeys((names[0], names[-1])))
        cells = [tokens, f"{cost.slots} × {cost.cache_width}", str(cost.heads), *_sums([cost] * len(names))]
        rows.append([f"<code>{escape(ends)}</code>", str(len(names)), *cells])
    costs = [cost for _, cost in layers]
    if len(rows) > 1:
        rows.append(["all", str(len(layers)), "", "", "", *_sums(costs)])
    caption = (
        f"{name}: what the caches add for one sample, by formula. Tokens: per call (windows × tokens per window). "
        "Cache: slots × channels. FLOPs: 2 per multiply-add; a forward in training updates a cache that is written. "
        f"{_share(run, costs)}From {run.label}/explain.json."
    )
    head = [
        "layers",
        "count",
        "tokens",
        "cache",
        "heads",
        "parameters",
        "FLOPs of a forward in training",
        "FLOPs in evaluation",
    ]
    return table(caption, head, rows)


def _sums(costs: Sequence[LayerCost]) -> list[str]:
    macs = (sum(cost.training_macs for cost in costs), sum(cost.inference_macs for cost in costs))
    return [count(sum(cost.parameters for cost in costs)), *(operations(2 * one) for one in macs)]


def _share(run: RunRecord, costs: Sequence[LayerCost]) -> str:
    """The sum relative to the rest of the model."""
    parameters, flops = sum(cost.parameters for cost in costs), 2 * sum(cost.training_macs for cost in costs)
    rest = (run.cost("parameters") - parameters, run.cost("flops") - flops)
    if not all(math.isfinite(value) and value > 0 for value in rest):
        return ""
    return (
        f"That is {parameters / rest[0]:.1%} of the parameters and {flops / rest[1]:.1%} of the training forward's "
        "FLOPs that the rest of the model has. "
    )


def _measured(results: Results) -> str:
    """Seconds per update and rows per second in evaluation of every variant, and ratios to the reference."""
    variants = [row for row in results.rows if results.runs_of(row.name)]
    if not any(math.isfinite(_update(results, row)) for row in variants):
        return ""
    reference = next((row for row in variants if row.name == results.against), variants[0])
    several = len(variants) > 1
    rows = []
    for row in variants:
        rate = _rows_per_second(results, row)
        rows.append(
            [
                variant_name(results.names.index(row.name), row.name),
                duration(_update(results, row)),
                _ratio(_update(results, row), _update(results, reference)) if several else "–",
                duration(_evaluation(results, row)),
                _ratio(_evaluation(results, row), _evaluation(results, reference)) if several else "–",
                f"{rate:,.0f}" if math.isfinite(rate) else "–",
                memory(row.peak_bytes),
                _ratio(row.flops, reference.flops) if several else "–",
            ]
        )
    caption = (
        "Measured: seconds per update, seconds of an evaluation on the validation split (median over evaluations) and "
        "the rows that it scored per second (of translation: sentences; of text: segments), means over runs. "
        f"{f'Ratios are to {reference.name}. ' if several else ''}Times from a busy machine mean little. From "
        "result.json and metrics.jsonl."
    )
    head = [
        "variant",
        "update",
        "update, ratio",
        "evaluation",
        "evaluation, ratio",
        "rows/s",
        "peak memory",
        "FLOPs of a forward, ratio",
    ]
    return table(caption, head, rows)


def _update(results: Results, row: Row) -> float:
    """Seconds per update, mean over the finished runs of a variant."""
    runs = results.runs_of(row.name)
    return finite_spread(run.cost("seconds") / steps for run in runs if (steps := run.cost("steps"))).mean


def _evaluation(results: Results, row: Row) -> float:
    """Seconds per evaluation on the validation split: median over the evaluations of a run, mean over runs."""
    return finite_spread(map(_evaluation_of, results.runs_of(row.name))).mean


def _evaluation_of(run: RunRecord) -> float:
    seconds = run.valid["seconds"]
    return float(np.median(seconds[np.isfinite(seconds)])) if np.isfinite(seconds).any() else math.nan


def _rows_per_second(results: Results, row: Row) -> float:
    """The rows that an evaluation scored per second, mean over runs; NaN if no result says how many they were."""
    rates = []
    for run in results.runs_of(row.name):
        rows = run.result.scored_rows.get("valid", math.nan) if run.result else math.nan
        seconds = _evaluation_of(run)
        rates.append(rows / seconds if seconds > 0 else math.nan)
    return finite_spread(rates).mean


def _ratio(value: float, reference: float) -> str:
    ratio = value / reference if reference else math.nan
    return f"{ratio:.2f}×" if math.isfinite(ratio) else "–"
