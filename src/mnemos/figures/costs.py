"""What the caches cost: sizes, parameters and FLOPs a layer by formula, and measured times beside the uncached twin."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .markup import count, duration, escape, listed, memory, missing, operations, table
from .names import shortened
from .provenance import flat
from .results import Cached, Comparison, Row, RunRecord
from .style import ARMS

SIZES = ("rows", "tokens", "slots", "width", "cache_width", "heads", "parameters", "training_macs", "inference_macs")


def section(comparison: Comparison) -> str:
    """A table of layers for each cached arm that recorded its costs, and one of measured times for all arms."""
    parts = []
    for name in comparison.arms:
        found = [run for run in comparison.runs.get(name, ()) if run.explained]
        known = [run for run in found if run.explained and any(layer.cost for layer in run.explained.layers)]
        if known:
            parts.append(_layers(comparison, name, known[0]))
        elif name in comparison.with_memory():
            why = "its caches walk in blocks, which the formula is not for" if found else "no run recorded explain.json"
            parts.append(missing(f"{name}: {why}, so there is no cost by formula."))
    if not parts:
        parts.append(missing("No arm has a gated cache, so none was added to its cost."))
    return "\n".join([*parts, _measured(comparison)])


def _layers(comparison: Comparison, name: str, run: RunRecord) -> str:
    """By formula: one row for layers of one shape that follow one another, and their sum."""
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
        f"{name}: what the caches add, by formula, for one sample. Tokens: of a call (windows × tokens of one); cache: "
        "slots × channels. FLOPs, 2 a multiply-add, of a training forward, in which the cache moves, and of one in "
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
    """The sum beside what the uncached twin costs as a whole, or beside the run's own total."""
    added = {key: sum((layer.cost or {})[key] for layer in layers) for key in ("parameters", "training_macs")}
    flops, result = 2 * added["training_macs"], run.result or {}
    whole = {key: float(result.get(key) or math.nan) for key in ("parameters", "flops")}
    twin = twin_of(comparison, name)
    row = next((row for row in comparison.rows if row.name == twin), None)
    if row is not None:
        whole = {"parameters": row.parameters, "flops": row.flops}
        beside = f"{twin} without a cache has"
    else:
        whole = {"parameters": whole["parameters"] - added["parameters"], "flops": whole["flops"] - flops}
        beside = "the rest of the model has"
    if not all(math.isfinite(v) and v > 0 for v in whole.values()):
        return ""
    return (
        f"That is {added['parameters'] / whole['parameters']:.1%} of the parameters and {flops / whole['flops']:.1%} "
        f"of the training forward's FLOPs that {beside} (the paper: about 10% to 15% of both at ratio 0.5). "
    )


def twin_of(comparison: Comparison, name: str) -> str | None:
    """The arm whose recipe is that of `name` without its cache; None where there is none."""
    recipes = {arm: flat(runs[0].recipe) for arm in comparison.arms if (runs := comparison.runs.get(arm))}
    mine = recipes.get(name)
    if mine is None:
        return None
    for other, theirs in recipes.items():
        # A configuration without a cache is null there, one with it an object.
        if other != name and theirs.get("model.cache", 0) is None and _rest(theirs) == _rest(mine):
            return other
    return None


def _rest(recipe: dict[str, Any]) -> str:
    """A recipe less its name, its seed and its cache."""
    skipped = ("name", "about", "train.seed", "model.cache")
    kept = {k: v for k, v in recipe.items() if k not in skipped and not k.startswith("model.cache.")}
    return json.dumps(kept, sort_keys=True, default=str)


def _measured(comparison: Comparison) -> str:
    """Seconds an update and samples a second in evaluation of every arm, and their ratios to the twin."""
    arms = [row for row in comparison.rows if comparison.runs.get(row.name)]
    if not any(math.isfinite(_update(comparison, row)) for row in arms):
        return missing("No finished run is at hand, so no time was measured.")
    size = next((s for run in comparison.all_runs() if (s := _size(run))), math.nan)
    rows = []
    for row in arms:
        twin = next((r for r in arms if r.name == twin_of(comparison, row.name)), None)
        rate = size / _evaluation(comparison, row)
        rows.append(
            [
                f'<i class="dot" style="color:var(--arm-{comparison.arms.index(row.name) % len(ARMS)})"></i>'
                f"{escape(row.name)}",
                duration(_update(comparison, row)),
                _ratio(comparison, row, twin, _update),
                duration(_evaluation(comparison, row)),
                f"{rate:,.0f}" if math.isfinite(rate) else "–",
                _ratio(comparison, row, twin, _evaluation),
                memory(row.peak_bytes),
                "–" if twin is None else _times(row.flops / twin.flops),
            ]
        )
    pairs = [(row.name, other) for row in arms if (other := twin_of(comparison, row.name))]
    beside = (
        f"Ratios are to the same recipe without a cache ({listed([f'{a} to {b}' for a, b in pairs])}). "
        if pairs
        else "No arm is the twin of another without a cache, so there is no ratio to give. "
    )
    caption = (
        "Measured: seconds an update, and a pass over the validation split with its samples a second (the median over "
        f"passes), means over runs. {beside}Runs of a comparison take turns on one machine; others may not have had "
        "the same one, and on a machine with other work times mean little. From result.json and metrics.jsonl."
    )
    head = ["arm", "an update", "ratio", "evaluation", "samples/s", "ratio", "peak memory", "FLOPs, ratio"]
    return table(caption, head, rows)


def _size(run: RunRecord) -> float:
    return run.explained.sizes.get("valid", math.nan) if run.explained else 0.0


def _update(comparison: Comparison, row: Row) -> float:
    """Seconds an update, mean over an arm's finished runs."""
    found = []
    for run in comparison.runs.get(row.name, ()):
        result = run.result or {}
        if result.get("seconds") and result.get("steps"):
            found.append(result["seconds"] / result["steps"])
    return float(np.mean(found)) if found else math.nan


def _evaluation(comparison: Comparison, row: Row) -> float:
    """Seconds of a pass over the validation split: the median of each run's, mean over runs."""
    found = [run.valid["seconds"] for run in comparison.runs.get(row.name, ())]
    medians = [float(np.median(s[np.isfinite(s)])) for s in found if np.isfinite(s).any()]
    return float(np.mean(medians)) if medians else math.nan


def _ratio(comparison: Comparison, row: Row, twin: Row | None, measure: Any) -> str:
    return "–" if twin is None else _times(measure(comparison, row) / measure(comparison, twin))


def _times(value: float) -> str:
    return f"{value:.2f}×" if math.isfinite(value) else "–"
