"""Curves of all variants: over training, and along an axis of the task, such as a distance.

A task writes the latter to result.json: "along": {"metric", "x": the name of the axis, "values": [[x, value]], "rows":
of which each value is a share, if it is one, "chance": the value of a guess, if it has one}.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mnemos.config import from_dict
from mnemos.errors import plural
from mnemos.lab.compare.comparison import ScoreAt
from mnemos.lab.compare.significance import wilson
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, JSONObject

from .charts import MOST, WHOLE, Axis, Chart, chart_figure, variant
from .markup import capital, decimal, listed, missing, table
from .read import Results
from .run_records import OWN, RunRecord
from .shell import variant_name

_MOST, _FEWEST = 400, 20  # points of a curve
_OCTAVES = 8.0  # greatest / least value of an axis of a task from which it is drawn in octaves
_WORDS = {"valid": "validation", "train": "training"}


# --- over training: thin lines are seeds, thick lines their mean ---


def section(results: Results) -> str:
    """The figure with learning curves of all variants; "" where no run recorded two points of one."""
    runs = results.all_runs()
    panels = [(split, name) for split in _WORDS for name in dict.fromkeys([_quality(results), "loss"])]
    charts = [curve_chart(results, *panel) for panel in panels if any(_has(run, *panel) for run in runs)]
    broken = []
    for run, split in ((run, split) for run in runs for split in ("train", "valid")):
        columns = getattr(run, split)
        if (bad := ~np.isfinite(columns["loss"])).any():
            first = int(columns["step"][np.argmax(bad)])
            broken.append(
                f"{run.label}: the {_WORDS[split]} loss is missing, NaN or infinite in {int(bad.sum())} of {len(bad)} "
                f"records, first at step {first:,}; the curve has gaps there."
            )
    several = any(len(of_one) > 1 for of_one in results.records.values())
    lines = "A thin line is one seed, the thick line their mean" if several else "One run per variant"
    caption = (
        f"{capital(listed([chart.y for chart in charts if not chart.empty]))} by update. {lines}. A long curve "
        f"has every so many of its records. From metrics.jsonl of {plural(len(runs), 'run')}."
    )
    return chart_figure(charts, caption) + "".join(map(missing, broken))


def _quality(results: Results) -> str:
    """The metric that the runs are judged by; if that is the loss, the first other metric that they recorded."""
    if results.metric != "loss":
        return results.metric
    records = [getattr(run, split) for run in results.all_runs() for split in _WORDS]
    return next((name for columns in records for name in columns if name not in (*OWN, "step")), "loss")


def _has(run: RunRecord, split: str, name: str) -> bool:
    columns = getattr(run, split)
    return name in columns and bool(np.isfinite(columns[name]).any())


def curve_chart(results: Results, split: str, name: str) -> Chart:
    """A quantity ("loss" or a metric) of the records of a split by update, tokens, seconds and FLOPs."""
    by_variant = {v: [run for run in results.runs_of(v) if _has(run, split, name)] for v in results.names}
    by_variant = {v: runs for v, runs in by_variant.items() if runs}
    every = [run for runs in by_variant.values() for run in runs]

    # --- updates, tokens, seconds and FLOPs up to each record; those that a run did not record are no axis ---
    progress: dict[Path, dict[str, np.ndarray]] = {}
    for run in every:
        step, train = getattr(run, split)["step"], run.train
        progress[run.folder] = {"updates": step, "FLOPs": step * run.cost("update_flops")}
        for unit in ("tokens", "seconds"):
            known = np.isfinite(train[unit])
            amounts = np.interp(step, [0, *train["step"][known]], [0, *train[unit][known]])
            progress[run.folder][unit] = amounts if known.any() else np.full(len(step), math.nan)
    forms = {"updates": WHOLE, "tokens": "~s", "seconds": ",~f", "FLOPs": "~s"}
    units = [unit for unit in forms if all(np.isfinite(one[unit]).all() for one in progress.values())]

    seeds = seed_names(every)
    majority = [("majority class", results.majority)] if results.majority is not None and name == results.metric else []
    chart = Chart(
        *(f"curve-{split}-{name}", f"{capital(_WORDS[split])} {name}", f"{_WORDS[split]} {name}"),
        [variant(v, results.names.index(v)) for v in by_variant],
        list(dict.fromkeys(seeds.values())),
        [Axis(f"{results.unit} read" if unit == "tokens" else unit, forms[unit]) for unit in units],
        references=majority,
    )
    for index, runs in enumerate(by_variant.values()):
        columns = [getattr(run, split) for run in runs]
        drawn = every_nth([one["step"] for one in columns], max(_FEWEST, min(_MOST, MOST // len(every))))
        for run, of_run in zip(runs, columns, strict=True):
            values = (of_run[name], *(progress[run.folder][unit] for unit in units))
            chart.add(index, chart.runs.index(seeds[run.folder]), *(one[drawn] for one in values))
    return chart


def every_nth(records: Sequence[np.ndarray], most: int) -> slice:
    """The records of curves that are drawn: at most so many, the last of the longest, the same ones of each seed."""
    longest = max(map(len, records))
    size = max(1, -(-longest // most))
    return slice((longest - 1) % size, None, size)


def seed_names(runs: Iterable[RunRecord]) -> dict[Path, str]:
    """What the runs of variants are called, by folder: by their seeds, or by label where a seed is there twice."""
    names: dict[Path, str] = {}
    used: set[tuple[str, str]] = set()
    for run in runs:
        key = (str(run.recipe.get("name")), f"seed {run.seed}")
        names[run.folder] = run.label if key in used else key[1]
        used.add(key)
    return names


# --- along an axis of the task ---


@dataclass(frozen=True)
class ByX:
    """A metric along an axis, of the rows that measured it: their scores by x. chance: the value of a guess, or NaN."""

    metric: str
    x: str
    xs: list[float]
    rows: dict[str, dict[float, ScoreAt]]
    chance: float

    def at_the_end(self) -> dict[str, float]:
        return {name: scores[self.xs[-1]].mean for name, scores in self.rows.items() if self.xs[-1] in scores}

    def of(self, run: RunRecord) -> JSONObject:
        along = run.artifacts.get("along") or {}
        return along if (along.get("metric"), along.get("x")) == (self.metric, self.x) else {}


def read_by_x(results: Results) -> ByX | None:
    """What was measured along the axis of the first row that has one; rows with another axis are left out."""
    along = {row.name: row.along for row in results.rows if row.along is not None and row.along.values}
    if not along:
        return None
    first = next(iter(along.values()))
    rows = {
        name: {at.x: at for at in one.values}
        for name, one in along.items()
        if (one.metric, one.x) == (first.metric, first.x)
    }
    guesses = ((run.artifacts.get("along") or {}).get("chance") for run in results.all_runs())
    chance = next((float(one) for one in guesses if one is not None), math.nan)
    xs = sorted({x for scores in rows.values() for x in scores})
    return ByX(str(first.metric), str(first.x), xs, rows, chance)


def by_x_figure(results: Results) -> str:
    """The metric along the axis: a line for each variant, a mark for each seed; "" if no run measured one."""
    if (by_x := read_by_x(results)) is None:
        return ""
    xs, runs_of = by_x.xs, {name: [run for run in results.runs_of(name) if by_x.of(run)] for name in by_x.rows}
    every = [run for runs in runs_of.values() for run in runs]
    seeds = seed_names(every)
    label = f"{capital(results.split)} {by_x.metric} by {by_x.x}"
    chart = Chart(
        *("along", "", f"{results.split} {by_x.metric}"),
        [variant(name, results.names.index(name)) for name in runs_of],
        list(dict.fromkeys(seeds.values())),
        [Axis(by_x.x, "~g")],
        "points",
        logarithmic=xs[0] > 0 and xs[-1] / xs[0] >= _OCTAVES,
        ticks=xs if len(xs) <= 12 else (),
        references=[("a guess", by_x.chance)] if math.isfinite(by_x.chance) else [],
    )
    for index, runs in enumerate(runs_of.values()):
        for run in runs:
            values, rows = by_x.of(run)["values"], by_x.of(run).get("rows") or []
            for i, (x, written) in enumerate(values):
                value = math.nan if written is None else written
                shares = len(rows) == len(values) and len(runs) == 1 and math.isfinite(value)
                ends = wilson(round(value * rows[i]), rows[i]) if shares else None
                chart.add(index, chart.runs.index(seeds[run.folder]), value, x, interval=ends)

    # --- what training read along the axis, by the settings of the task, where all runs say the same ---
    try:
        read = {from_dict(DataConfig, run.recipe.get("data")).trained_on(int(run.cost("steps"))) for run in every}
    except InputError:  # settings of another version, or of a plug-in
        read = set()
    trained = f" {read.pop()}" if len(read) == 1 else ""
    several = any(len(runs) > 1 for runs in runs_of.values())
    marks = "marks are seeds, lines their mean" if several else "one run per variant"
    bars = " Bars are 95% intervals of the rows (Wilson)." if "low" in chart.columns else ""
    return chart_figure([chart], f"{label}; {marks}.{bars}{trained.rstrip()} From result.json.", "wide")


def by_x_table(results: Results) -> str:
    """The metric along an axis in numbers; "" if no run measured one."""
    if (by_x := read_by_x(results)) is None:
        return ""

    def cell(at: ScoreAt | None) -> str:
        return "–" if at is None else decimal(at.mean) + (f" ± {decimal(at.std)}" if math.isfinite(at.std) else "")

    rows = [
        [variant_name(results.names.index(name), name), *(cell(scores.get(x)) for x in by_x.xs)]
        for name, scores in by_x.rows.items()
    ]
    score = f"{capital(results.split)} {by_x.metric} by {by_x.x}"
    caption = f"{score}, in numbers: mean ± sample standard deviation over seeds."
    return table(caption, ["variant", *(f"{x:g}" for x in by_x.xs)], rows)
