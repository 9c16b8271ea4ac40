"""Learning curves of all variants: thin lines are seeds, thick lines their mean."""

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from .charts import MOST, Axis, Chart, chart_figure, variant
from .markup import capital, listed, missing, plural
from .read import Results
from .run_records import OWN, Columns, RunRecord

_MOST, _FEWEST = 400, 20  # points of a curve
_WORDS = {"valid": "validation", "train": "training"}


def section(results: Results) -> str:
    """The figure with learning curves of all variants; "" where no run recorded two points of one."""
    runs = results.all_runs()
    panels = [(split, name) for split in _WORDS for name in dict.fromkeys([quality(results), "loss"])]
    recorded = [(split, name) for split, name in panels if any(_has(run, split, name) for run in runs)]
    charts = [curve_chart(results, *panel) for panel in recorded]
    names = [
        f"{_WORDS[split]} {name}" for (split, name), chart in zip(recorded, charts, strict=True) if not chart.empty
    ]

    # --- what the figure cannot show: values that are not finite, and quantities that no run recorded ---
    broken = [missing(line) for run in runs for split in ("train", "valid") if (line := _gaps(run, split))]
    if not names:
        return "".join(broken)
    # Metrics of a whole split, such as BLEU, have no value in training.
    absent = [panel for panel in panels if panel not in recorded and (panel[0] == "valid" or panel[1] == "loss")]
    if absent:
        what = listed([f"{_WORDS[split]} {name}" for split, name in absent]).replace(" and ", " or a ")
        broken.append(missing(f"No run recorded a {what}."))

    several = any(len(of_one) > 1 for of_one in results.records.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    records = sum(
        len(getattr(run, split)["step"]) for split, name in recorded for run in runs if _has(run, split, name)
    )
    thinned = " Each point of a long curve is the mean of several records."
    caption = f"{capital(listed(names))} by update. {lines}."
    caption += thinned * (records > sum(len(chart.columns["y"]) for chart in charts))
    return chart_figure(charts, f"{caption} From metrics.jsonl of {plural(len(runs), 'run')}.") + "".join(broken)


def quality(results: Results) -> str:
    """The metric that the runs are judged by; if that is the loss, the first other metric that they recorded."""
    if results.metric != "loss":
        return results.metric
    records = [getattr(run, split) for run in results.all_runs() for split in _WORDS]
    others = (name for columns in records for name in columns if name not in (*OWN, "step"))
    return next(others, "loss")


def _has(run: RunRecord, split: str, name: str) -> bool:
    columns = getattr(run, split)
    return name in columns and bool(np.isfinite(columns[name]).any())


def _gaps(run: RunRecord, split: str) -> str:
    columns = getattr(run, split)
    bad = ~np.isfinite(columns["loss"])
    if not bad.any():
        return ""
    return (
        f"{run.label}: the {_WORDS[split]} loss is missing, NaN or infinite in {int(bad.sum())} of {len(bad)} records, "
        f"first at step {int(columns['step'][np.argmax(bad)]):,}; the curve has gaps there."
    )


def curve_chart(results: Results, split: str, name: str) -> Chart:
    """A quantity ("loss" or a metric) of the records of a split by update, tokens, seconds and FLOPs."""
    by_variant = {v: [run for run in results.runs_of(v) if _has(run, split, name)] for v in results.names}
    by_variant = {v: runs for v, runs in by_variant.items() if runs}
    every = [run for runs in by_variant.values() for run in runs]
    progress = {run.folder: progress_at(run, getattr(run, split)["step"]) for run in every}
    axes = {"updates": Axis("updates", ",.0f")}
    for unit, form in (("tokens", "~s"), ("seconds", ",~f"), ("FLOPs", "~s")):
        if all(np.isfinite(one[unit]).all() for one in progress.values()):
            axes[unit] = Axis(f"{results.unit} read" if unit == "tokens" else unit, form)
    seeds = seed_names(every)
    majority = [("majority class", results.majority)] if results.majority is not None and name == results.metric else []
    chart = Chart(
        *(f"curve-{split}-{name}", f"{capital(_WORDS[split])} {name}", f"{_WORDS[split]} {name}"),
        [variant(v, results.names.index(v)) for v in by_variant],
        list(dict.fromkeys(seeds.values())),
        list(axes.values()),
        references=majority,
    )
    most = max(_FEWEST, min(_MOST, MOST // max(len(every), 1)))
    for index, runs in enumerate(by_variant.values()):
        parts = intervals([getattr(run, split)["step"] for run in runs], most)
        for run, of_run in zip(runs, parts, strict=True):
            columns = getattr(run, split)
            values = (columns[name], columns["step"], *(progress[run.folder][unit] for unit in list(axes)[1:]))
            for point in zip(*(means(one, of_run) for one in values), strict=True):
                chart.add(index, chart.runs.index(seeds[run.label]), *map(float, point))
    return chart


def intervals(steps: Sequence[np.ndarray], most: int) -> list[list[np.ndarray]]:
    """For each run of a variant, given by the steps of its records: the indices of the records that make each point.

    A point is one record where no run has more than `most`. Else it is the mean of an interval of records. The runs
    share the intervals over the steps that all of them have, so that their points have equal steps.
    """
    size = -(-max(map(len, steps)) // most)
    common = functools.reduce(np.intersect1d, steps) if size > 1 else np.array([])
    points = []
    for own in steps:
        shared = np.flatnonzero(np.isin(own, common))
        alone = np.flatnonzero(own > common[-1]) if len(common) else np.arange(len(own))
        split = [part for records in (shared, alone) for part in np.split(records, range(size, len(records), size))]
        points.append([part for part in split if len(part)])
    return points


def means(value: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of the finite values at the indices of each part; NaN for a part without one."""
    finite = (value[part][np.isfinite(value[part])] for part in parts)
    return np.array([float(one.mean()) if len(one) else np.nan for one in finite])


def seed_names(runs: Iterable[RunRecord]) -> dict[str, str]:
    """What the runs of variants are called, by label: by their seeds, or by label where a seed is there twice."""
    names: dict[str, str] = {}
    used: set[tuple[str, str]] = set()
    for run in runs:
        key = (str(run.recipe.get("name")), f"seed {run.seed}")
        names[run.label] = run.label if key in used else key[1]
        used.add(key)
    return names


def progress_at(run: RunRecord, step: np.ndarray) -> Columns:
    """Tokens, seconds and FLOPs of the updates of a run up to some steps; NaN where it did not record them."""
    progress = {"FLOPs": step * run.cost("update_flops")}
    for name in ("tokens", "seconds"):
        known = np.isfinite(run.train[name])
        progress[name] = np.full(len(step), np.nan)
        if known.any():
            progress[name] = np.interp(step, [0, *run.train["step"][known]], [0, *run.train[name][known]])
    return progress
