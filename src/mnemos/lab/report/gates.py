"""The gates over training: σ(λ) by layer and head, gate activity, and the size and rank of the cache."""

import numpy as np

from .charts import MOST, Axis, Chart, Series, chart_figure
from .curves import intervals, means
from .markup import missing, paragraph, plural, shortened
from .read import Results
from .run_records import GateCurves, RunRecord
from .style import HEADS, layer_variable

ACTIVITY = (
    ("update.mean", "Update gate, mean"),
    ("update.saturated", "Update gate, saturated share"),
    ("cache.rms", "Cache, root mean square"),
    ("reset.mean", "Reset gate, mean"),
    ("reset.saturated", "Reset gate, saturated share"),
    ("cache.rank", "Cache, effective rank"),
)


def section(results: Results) -> str:
    """Two figures for each variant with gated caches, or a line that says its gates were not recorded."""
    parts = []
    for index, name in enumerate(results.names):
        runs = [run for run in results.runs_of(name) if run.gates]
        if runs:
            parts.append(_variant(index, name, runs))
        elif name in results.cached():
            parts.append(missing(f"{name}: no run recorded its gates."))
    return "\n".join(parts)


def _variant(index: int, name: str, runs: list[RunRecord]) -> str:
    layers = runs[0].gates.layers if runs[0].gates else ()
    gates = [run.gates for run in runs if run.gates and run.gates.layers == layers]
    called = shortened(layers)
    series = [Series(label, layer_variable(i, len(layers))) for i, label in enumerate(called)]
    seeds, files = plural(len(gates), "seed"), _files(runs)
    caption = (
        f"{name}: the gate σ(λ) of the cached branch over training, one thin line per head and seed, one thick line "
        f"per layer (the mean). From {files}."
    )
    mix = chart_figure([_mix_chart(f"mix-{index}", series, gates)], caption, "wide")
    end = chart_figure(
        [_end_chart(f"mix-{index}-end", called, gates)],
        f"{name}: the same at the last record, by layer: one mark per head and seed ({seeds}). The dotted line is the "
        f"mean at the first record. From {files}.",
        "wide",
    )
    recorded = [(key, title) for key, title in ACTIVITY if any(np.isfinite(g.values[key]).any() for g in gates)]
    activity = chart_figure(
        [
            _activity_chart(f"gate-{index}-{key.replace('.', '-')}", title, series, gates, key)
            for key, title in recorded
        ],
        f"{name}: activity of the gates and state of the cache over training, by layer. The saturated share is the "
        "part of a gate's values below 0.05 or above 0.95. The effective rank is exp of the entropy of the normalised "
        f"singular values. From {files}.",
    )
    left_out = len(runs) - len(gates)
    notes = [f"{plural(left_out, 'run')} of {name} is left out: it has other layers."] if left_out else []
    if len(recorded) < len(ACTIVITY):
        absent = [title.lower() for key, title in ACTIVITY if (key, title) not in recorded]
        notes.append(f"Not recorded for {name}: {'; '.join(absent)}.")
    parts = [paragraph(_summary(name, gates)), mix, end, activity, *map(missing, notes)]
    return "\n".join(filter(None, parts))


def _files(runs: list[RunRecord]) -> str:
    if len(runs) == 1:
        return f"{runs[0].label}/metrics.jsonl"
    return f"metrics.jsonl (records of kind gates) of {runs[0].label} and {plural(len(runs) - 1, 'other run')}"


def _summary(name: str, gates: list[GateCurves]) -> str:
    """Two sentences: how σ(λ) changed, and in how many layers it is above a half."""
    starts = np.concatenate([g.mix[0].ravel() for g in gates])
    ends = np.concatenate([g.mix[-1].ravel() for g in gates])
    starts, ends = starts[np.isfinite(starts)], ends[np.isfinite(ends)]
    if not starts.size or not ends.size:
        return f"{name}: σ(λ) was not recorded."
    means = _row_means(np.concatenate([g.mix[-1] for g in gates], 1))
    above = int((means > 0.5).sum())
    return (
        f"{name}: the mean gate σ(λ) of the cache went from {starts.mean():.3f} to {ends.mean():.3f} between the first "
        f"record and the last, where the heads range from {ends.min():.3f} to {ends.max():.3f}. The mean over heads is "
        f"above 0.5 in {above} of {plural(len(means), 'layer')}."
    )


def _end_chart(slug: str, called: list[str], gates: list[GateCurves]) -> Chart:
    """σ(λ) by layer at the last record, a mark per head and seed."""
    heads = max(one.mix.shape[2] for one in gates)
    start = np.concatenate([one.mix[0].ravel() for one in gates])
    chart = Chart(
        slug,
        "σ(λ) by layer and head, at the last record",
        "σ(λ)",
        [Series(f"head {h}", f"head-{h % len(HEADS)}", h // len(HEADS)) for h in range(heads)],
        [f"seed {i}" for i in range(len(gates))],
        [Axis("layer", "~g")],
        "marks",
        ticks=range(len(called)) if len(called) <= 24 else (),
        references=[("mean at the first record", float(np.nanmean(start)))] if np.isfinite(start).any() else [],
        limits=(0, 1),
    )
    for i, one in enumerate(gates):
        for place, values in enumerate(one.mix[-1]):
            for h, value in enumerate(values):
                chart.add(h, i, float(value), float(place))
    return chart


def _mix_chart(slug: str, series: list[Series], gates: list[GateCurves]) -> Chart:
    heads = max(one.mix.shape[2] for one in gates)
    runs = [f"seed {i}, head {h}" for i in range(len(gates)) for h in range(heads)]
    chart = Chart(slug, "Gate of the cache, σ(λ)", "σ(λ)", series, runs, [Axis("updates", ",.0f")])
    parts = intervals([one.step for one in gates], max(20, MOST // (len(runs) * len(series))))
    for i, one in enumerate(gates):
        for place in range(len(series)):
            for h in range(one.mix.shape[2]):
                _add(chart, place, i * heads + h, one.step, one.mix[:, place, h], parts[i])
    return chart


def _activity_chart(slug: str, title: str, series: list[Series], gates: list[GateCurves], key: str) -> Chart:
    """One quantity of ACTIVITY over training, by layer."""
    runs = [f"seed {i}" for i in range(len(gates))]
    chart = Chart(slug, title, title.split(", ")[-1], series, runs, [Axis("updates", ",.0f")])
    parts = intervals([one.step for one in gates], 200)
    for i, one in enumerate(gates):
        for place in range(len(series)):
            _add(chart, place, i, one.step, one.values[key][:, place], parts[i])
    return chart


def _add(chart: Chart, series: int, run: int, step: np.ndarray, value: np.ndarray, parts: list[np.ndarray]) -> None:
    """Add a curve: a point for each of `parts`, which seeds share so that their points have equal updates."""
    for at, one in zip(means(step, parts), means(value, parts), strict=True):
        chart.add(series, run, float(one), float(at))


def _row_means(values: np.ndarray) -> np.ndarray:
    """The mean of the finite values of each row; NaN for a row without any."""
    finite = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.where(finite, values, 0).sum(1) / np.where(finite.any(1), finite.sum(1), np.nan)
