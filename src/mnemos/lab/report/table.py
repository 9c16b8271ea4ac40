"""The comparison in numbers: scores and costs of every variant, the controls, a dot per seed."""

import math
from collections.abc import Sequence

from mnemos.lab.compare.significance import Difference

from .charts import Axis, Chart, arm, chart_figure
from .curves import seed_names
from .markup import OPERATIONS, capital, count, decimal, duration, escape, memory, missing, operations, plural, table
from .read import Results, finite_spread
from .run_records import flat
from .style import variant_name
from .verdict import mean_and_spread

_ACROSS = 8  # metrics in columns; more are rows

CONTROLS = {"emptied": "cache emptied", "exchanged": "cache exchanged for noise", "closed": "gate closed"}
_MEANINGS = {
    "emptied": "Emptied: every slot is zero; a change shows that the model depends on what its cache holds.",
    "exchanged": "Exchanged: noise with the cache's mean and standard deviation per channel.",
    "closed": "Closed: the branch is switched off, which also removes its parameters and so proves nothing by itself.",
}


def section(results: Results) -> str:
    """Tables of variants, of their other metrics and of the controls; lines say what is missing."""
    parts = [_variants(results), _other_metrics(results), _untested(results), _controls(results)]
    return "\n".join(filter(None, parts))


def _variants(results: Results) -> str:
    score = f"{results.split} {results.metric}"
    head = ["variant", score, "seeds", "parameters", "FLOPs of a row", "state", "time", "per epoch", "peak memory"]
    rows = [
        [
            variant_name(i, row.name),
            mean_and_spread(row),
            str(row.seeds),
            count(row.parameters),
            operations(row.flops),
            memory(row.state_bytes or math.nan),
            duration(row.seconds),
            duration(finite_spread(run.cost("epoch_seconds") for run in results.runs_of(row.name)).mean),
            memory(row.peak_bytes),
        ]
        for i, row in enumerate(results.rows)
    ]
    epochs = any(row[7] != "–" for row in rows)
    majority = {} if results.majority is None else {"most frequent class": results.majority}
    rows += [[escape(name), decimal(one), *[""] * 7] for name, one in (majority | results.reference).items()]
    better = "higher" if results.higher_is_better else "lower"
    caption = (
        f"{capital(score)} ({better} is better), mean ± sample standard deviation over seeds, and the mean cost of a "
        f"run. {OPERATIONS} State: bytes per stream after a row of the greatest length that the settings of the data "
        "allow, of an encoder-decoder its source and its output."
        f"{' An epoch is the number of updates that reads the training split once.' if epochs else ''} "
        f"From {results.source}."
    )
    return table(caption, head, rows)


def _other_metrics(results: Results) -> str:
    """The other metrics of the test split, and how they are computed; "" for a task of one metric."""
    found = [run.result for run in results.all_runs() if run.result]
    described = next((one.metrics for one in found if one.metrics), {})
    names = [name for name in described if name not in (results.metric, "loss")]
    abouts = [str(described[name].get("about", "")) for name in names]
    values = {
        row.name: [finite_spread(run.tested(name) for run in results.runs_of(row.name)) for name in names]
        for row in results.rows
    }
    values = {name: scores for name, scores in values.items() if any(score.seeds for score in scores)}
    if not names or not values:
        return ""
    caption = f"Other metrics of the {results.split} split, mean ± sample standard deviation over seeds."
    if len(names) > _ACROSS:
        cells = [
            [escape(name), *(mean_and_spread(scores[i]) for scores in values.values()), escape(abouts[i])]
            for i, name in enumerate(names)
        ]
        return table(caption, ["metric", *values, "what it is"], cells, "metrics")
    said = [f"{capital(name)}: {about}" for name, about in zip(names, abouts, strict=True) if about]
    more = (
        " mnemos score gives intervals over test sentences."
        if any("signatures" in one.artifacts for one in found)
        else ""
    )
    cells = [
        [variant_name(results.names.index(name), name), *map(mean_and_spread, scores)]
        for name, scores in values.items()
    ]
    return table(f"{caption} {' '.join(said)}{more}", ["variant", *names], cells)


def _range(ends: tuple[float, float] | None, signed: bool = False) -> str:
    return "–" if ends is None else f"{decimal(ends[0], signed=signed)} to {decimal(ends[1], signed=signed)}"


def side_by_side(tasks: Sequence[Results]) -> str:
    """One table of the variants of several tasks, each with the metric of its task."""
    rows = []
    for one in tasks:
        task = next((str(flat(run.recipe).get("data.is", "–")) for run in one.all_runs()), "–")
        for row in one.rows:
            found = [row.name, task, one.metric, mean_and_spread(row), str(row.seeds), count(row.parameters)]
            rows.append([escape(cell) for cell in found])
    caption = (
        "All variants, mean ± sample standard deviation over seeds of their task's metric. Rows of different tasks "
        "cannot be compared. From the runs' result.json."
    )
    return table(caption, ["variant", "task", "metric", "value", "seeds", "parameters"], rows, "runs")


def _tested(results: Results) -> list[str]:
    """The variants with a run that has a test result."""
    return [
        name
        for name in results.names
        if any(math.isfinite(run.tested(results.metric)) for run in results.runs_of(name))
    ]


def _untested(results: Results) -> str:
    if _tested(results):
        return ""
    return missing(f"No result.json gives a {results.split} {results.metric}, so single seeds cannot be drawn.")


def seeds(results: Results) -> str:
    """The figure of seeds; "" for fewer than two runs."""
    variants = _tested(results)
    if not variants or len(results.all_runs()) < 2:
        return ""
    score = f"{results.split} {results.metric}"
    emptied = any(math.isfinite(r.tested(results.metric, "emptied")) for r in results.all_runs())
    arms: list[tuple[str, str | None]] = [(name, None) for name in variants]
    if emptied:
        pairs = ((name, control) for name in variants for control in (None, "emptied"))
        arms = [pair for pair in pairs if _scored(results, *pair)]
    names = [name if control is None else f"{name}, cache {control}" for name, control in arms]
    called = seed_names(run for name in variants for run in results.runs_of(name))
    chart = Chart(
        "seeds",
        "",
        score,
        [arm(shown, results.names.index(name)) for shown, (name, _) in zip(names, arms, strict=True)],
        list(dict.fromkeys(called.values())),
        [Axis(score)],
        "strip",
        references=[("majority class", results.majority)] if results.majority is not None else [],
        label=f"{capital(score)} by variant and seed",
    )
    for place, (name, control) in enumerate(arms):
        for run in results.runs_of(name):
            if math.isfinite(value := run.tested(results.metric, control)):
                chart.add(place, chart.runs.index(called[run.label]), 0.0, value)
    caption = (
        f"{capital(score)}: marks are seeds, the bar is their mean"
        + (", cache emptied: the same trained models" if emptied else "")
        + f". From result.json of {plural(len(results.all_runs()), 'run')}."
    )
    return chart_figure([chart], caption, "wide")


def _scored(results: Results, name: str, control: str | None) -> bool:
    return any(math.isfinite(run.tested(results.metric, control)) for run in results.runs_of(name))


def _controls(results: Results) -> str:
    if not results.controls:
        if any(results.state_controls(name) or results.uncontrolled(name) for name in results.names):
            return ""  # a section of its own has the controls of the state
        if not results.cached() and not any(row.memory for row in results.rows):
            return ""
        return missing("No control was run, so these results do not show whether the models use their memory.")
    score, rows = f"{results.split} {results.metric}", []
    for control in results.controls:
        change = results.effect(control.name, control.control) or Difference(math.nan)
        rows.append(
            [
                variant_name(results.names.index(control.name), control.name),
                escape(CONTROLS.get(control.control, control.control)),
                mean_and_spread(control),
                str(control.seeds),
                decimal(change.difference, signed=True),
                _range(change.interval, signed=True),
            ]
        )
    meanings = [text for name, text in _MEANINGS.items() if name in {one.control for one in results.controls}]
    caption = (
        f"Controls: the same trained models, evaluated with a changed memory. The change is in {score} relative to the "
        f"intact model; its 95% interval comes from the spread between seeds. {' '.join(meanings)} What the memory "
        f"adds is the difference to the never-written baseline. From {results.source}."
    )
    return table(caption, ["variant", "control", score, "seeds", "change", "95% interval"], rows, "controls")
