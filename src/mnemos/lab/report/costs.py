"""What the caches cost: sizes, parameters and FLOPs per layer by formula, and measured times beside the baseline."""

import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from mnemos.types import JSONObject

from .markup import count, duration, escape, listed, memory, missing, operations, table
from .names import shortened
from .origins import flat
from .read_metrics import number
from .results import Cached, Comparison, Row, RunRecord, spread
from .style import VARIANTS

SIZES = ("rows", "tokens", "slots", "width", "cache_width", "heads", "parameters", "training_macs", "inference_macs")


def section(comparison: Comparison) -> str:
    """A table of layers for each cached variant that recorded its costs, and one of measured times for all variants."""
    parts = []
    for name in comparison.variants:
        found = [run for run in comparison.runs.get(name, ()) if run.explained]
        known = [run for run in found if run.explained and any(layer.cost for layer in run.explained.layers)]
        if known:
            parts.append(_layers(comparison, name, known[0]))
        elif name in comparison.with_memory():
            why = (
                "its caches are causal and work in blocks, which the formula does not cover"
                if found
                else "no run has an explain.json"
            )
            parts.append(missing(f"{name}: {why}, so the report has no cost by formula."))
    if not parts:
        parts.append(missing("No variant has a gated cache, so there is no cost of caches to report."))
    return "\n".join([*parts, _measured(comparison)])


def _layers(comparison: Comparison, name: str, run: RunRecord) -> str:
    """Costs by formula: one row for consecutive layers of one shape, and the sum."""
    assert run.explained is not None
    layers = [layer for layer in run.explained.layers if layer.cost]
    every = [layer.name for layer in run.explained.layers]
    called = dict(zip(every, shortened(every), strict=True))
    groups: list[list[Cached]] = []
    for layer in layers:
        if groups and groups[-1][-1].cost == layer.cost:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    rows = []
    for group in groups:
        cost = group[0].cost or {}
        ends = list(dict.fromkeys(called[one.name] for one in (group[0], group[-1])))
        tokens = f"{cost['rows']:.0f} × {cost['tokens']:.0f}" if cost["rows"] > 1 else f"{cost['tokens']:.0f}"
        rows.append(
            [
                f"<code>{escape(' … '.join(ends))}</code>",
                str(len(group)),
                tokens,
                f"{cost['slots']:.0f} × {cost['cache_width']:.0f}",
                f"{cost['heads']:.0f}",
                *_sums(group),
            ]
        )
    if len(groups) > 1:
        rows.append(["all", str(len(layers)), "", "", "", *_sums(layers)])
    caption = (
        f"{name}: what the caches add for one sample, by formula. Tokens: per call (windows × tokens per window). "
        "Cache: "
        "slots × channels. FLOPs, 2 per multiply-add, of a forward in training, which updates the cache, and in "
        f"eval(). {_against(comparison, name, run, layers)}From {run.label}/explain.json."
    )
    head = ["layers", "count", "tokens", "cache", "heads", "parameters", "FLOPs, training", "FLOPs, eval"]
    return table(caption, head, rows)


def _sums(layers: Sequence[Cached]) -> list[str]:
    total = {key: sum((layer.cost or {})[key] for layer in layers) for key in SIZES}
    return [
        count(total["parameters"]),
        operations(2 * total["training_macs"]),
        operations(2 * total["inference_macs"]),
    ]


def _against(comparison: Comparison, name: str, run: RunRecord, layers: list[Cached]) -> str:
    """The sum relative to the whole uncached baseline or, without one, to the rest of the model."""
    added = {key: sum((layer.cost or {})[key] for layer in layers) for key in ("parameters", "training_macs")}
    flops, result = 2 * added["training_macs"], run.result or {}
    whole = {key: float(result.get(key) or math.nan) for key in ("parameters", "flops")}
    baseline = uncached_baseline(comparison, name)
    row = next((row for row in comparison.rows if row.name == baseline), None)
    if row is not None:
        whole = {"parameters": row.parameters, "flops": row.flops}
        beside = f"{baseline} without a cache has"
    else:
        whole = {"parameters": whole["parameters"] - added["parameters"], "flops": whole["flops"] - flops}
        beside = "the rest of the model has"
    if not all(math.isfinite(v) and v > 0 for v in whole.values()):
        return ""
    return (
        f"That is {added['parameters'] / whole['parameters']:.1%} of the parameters and {flops / whole['flops']:.1%} "
        f"of the training forward's FLOPs that {beside} (the paper: about 10% to 15% of both at ratio 0.5). "
    )


def uncached_baseline(comparison: Comparison, name: str) -> str | None:
    """The variant with the recipe of `name` but without its cache; None if there is none."""
    recipes = {
        variant: flat(runs[0].recipe) for variant in comparison.variants if (runs := comparison.runs.get(variant))
    }
    mine = recipes.get(name)
    if mine is None:
        return None
    for other, theirs in recipes.items():
        # model.cache is null without a cache and an object with one.
        if other != name and theirs.get("model.cache", 0) is None and _rest(theirs) == _rest(mine):
            return other
    return None


def _rest(recipe: JSONObject) -> str:
    """A recipe without its name, seed and cache, as text."""
    skipped = ("name", "about", "train.seed", "model.cache")
    kept = {k: v for k, v in recipe.items() if k not in skipped and not k.startswith("model.cache.")}
    return json.dumps(kept, sort_keys=True, default=str)


def _measured(comparison: Comparison) -> str:
    """Seconds per update and rows per second in evaluation of every variant, and ratios to the uncached baseline."""
    variants = [row for row in comparison.rows if comparison.runs.get(row.name)]
    if not any(math.isfinite(_update(comparison, row)) for row in variants):
        return missing("No run has finished, so the report has no measured times.")
    rows = []
    for row in variants:
        baseline = next((r for r in variants if r.name == uncached_baseline(comparison, row.name)), None)
        place = comparison.variants.index(row.name)
        rate = _rows_per_second(comparison, row)
        rows.append(
            [
                f'<i class="dot" style="color:var(--variant-{place % len(VARIANTS)})"></i>{escape(row.name)}',
                duration(_update(comparison, row)),
                _ratio(comparison, row, baseline, _update),
                duration(_evaluation(comparison, row)),
                f"{rate:,.0f}" if math.isfinite(rate) else "–",
                _ratio(comparison, row, baseline, _evaluation),
                memory(row.peak_bytes),
                "–" if baseline is None else _times(row.flops / baseline.flops),
            ]
        )
    pairs = [(row.name, other) for row in variants if (other := uncached_baseline(comparison, row.name))]
    beside = (
        f"Ratios are to the same recipe without a cache ({listed([f'{a} to {b}' for a, b in pairs])}). "
        if pairs
        else "No variant is another one without its cache, so there are no ratios. "
    )
    caption = (
        "Measured: seconds per update, seconds of an evaluation on the validation split (median over evaluations) and "
        "the rows that it scored per second (of translation: sentences; of text: segments), means over runs. "
        f"{beside}The runs of a comparison take turns on one machine; other runs may "
        "come from other machines. Times from a busy machine mean little. From result.json and metrics.jsonl."
    )
    head = ["variant", "update", "ratio", "evaluation", "rows/s", "ratio", "peak memory", "FLOPs, ratio"]
    return table(caption, head, rows)


def _update(comparison: Comparison, row: Row) -> float:
    """Seconds per update, mean over the finished runs of a variant."""
    found = []
    for run in comparison.runs.get(row.name, ()):
        result = run.result or {}
        if result.get("seconds") and result.get("steps"):
            found.append(result["seconds"] / result["steps"])
    return float(np.mean(found)) if found else math.nan


def _evaluation(comparison: Comparison, row: Row) -> float:
    """Seconds per evaluation on the validation split: median over the evaluations of a run, mean over runs."""
    return _mean([_evaluation_of(run) for run in comparison.runs.get(row.name, ())])


def _evaluation_of(run: RunRecord) -> float:
    seconds = run.valid["seconds"]
    return float(np.median(seconds[np.isfinite(seconds)])) if np.isfinite(seconds).any() else math.nan


def _rows_per_second(comparison: Comparison, row: Row) -> float:
    """The rows that an evaluation scored per second, mean over runs; NaN if no result says how many they were."""
    rates = []
    for run in comparison.runs.get(row.name, ()):
        scored = (run.result or {}).get("scored_rows")
        rows = number(scored.get("valid"), run.label, "scored_rows.valid") if isinstance(scored, dict) else math.nan
        seconds = _evaluation_of(run)
        rates.append(rows / seconds if seconds > 0 else math.nan)
    return _mean(rates)


def _mean(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN if there is none."""
    return spread(list(values))[0]


def _ratio(comparison: Comparison, row: Row, baseline: Row | None, measure: Callable[[Comparison, Row], float]) -> str:
    return "–" if baseline is None else _times(measure(comparison, row) / measure(comparison, baseline))


def _times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"
