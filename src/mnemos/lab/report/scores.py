"""The results in numbers: scores of every variant, the controls of caches, a dot for each seed."""

import math
from collections.abc import Sequence

from mnemos.lab.compare.comparison import Control
from mnemos.lab.compare.significance import Difference

from .charts import Axis, Chart, chart_figure, variant
from .curves import seed_names
from .markup import OPERATIONS, capital, count, decimal, escape, memory, missing, operations, plural, table, table_of
from .read import Results, finite_spread
from .run_records import flat
from .style import variant_name
from .verdict import mean_and_spread, without_learning

_ACROSS = 8  # metrics in columns; more are rows
CONTROLS = {"emptied": "cache emptied", "exchanged": "cache exchanged for noise", "closed": "gate closed"}
_MEANINGS = {
    "emptied": "Emptied: every slot is zero; a change shows that the model depends on what its cache holds.",
    "exchanged": "Exchanged: noise with the cache's mean and standard deviation per channel.",
    "closed": "Closed: the branch is switched off, which also removes its parameters and so proves nothing by itself.",
}


def section(results: Results) -> str:
    """Tables of variants, of their other metrics and of the controls; lines say what is missing."""
    parts = [_variants(results), _other_metrics(results)]
    if not _tested(results):
        what = f"{results.split} {results.metric}"
        parts.append(missing(f"No result.json gives a {what}, so single seeds cannot be drawn."))
    return "\n".join(filter(None, [*parts, _controls(results)]))


def _variants(results: Results) -> str:
    score, better = f"{results.split} {results.metric}", "higher" if results.higher_is_better else "lower"
    head = ["variant", score, "seeds", "parameters", "FLOPs of a row", "state"]
    rows = []
    for i, row in enumerate(results.rows):
        costs = [count(row.parameters), operations(row.flops), memory(row.state_bytes or math.nan)]
        rows.append([variant_name(i, row.name), mean_and_spread(row), str(row.seeds), *costs])
    rows += [[escape(name), decimal(one), *[""] * 4] for name, one in without_learning(results).items()]
    caption = (
        f"{capital(score)} ({better} is better), mean ± sample standard deviation over seeds, and the size of the "
        f"models. {OPERATIONS} State: bytes per stream after a row of the greatest length that the settings of the "
        f"data allow, of an encoder-decoder its source and its output. From {results.source}."
    )
    return table(caption, head, rows)


def _other_metrics(results: Results) -> str:
    """The other metrics of the test split, and how they are computed; "" for a task of one metric."""
    finished = [run.result for run in results.all_runs() if run.result]
    described = next((one.metrics for one in finished if one.metrics), {})
    about = {name: str(one.get("about", "")) for name, one in described.items() if name not in (results.metric, "loss")}
    scores = {
        row.name: [finite_spread(run.tested(name) for run in results.runs_of(row.name)) for name in about]
        for row in results.rows
    }
    scores = {name: of_one for name, of_one in scores.items() if any(one.seeds for one in of_one)}
    if not about or not scores:
        return ""
    caption = f"Other metrics of the {results.split} split, mean ± sample standard deviation over seeds."
    if len(about) > _ACROSS:
        rows = [
            [escape(name), *(mean_and_spread(of_one[i]) for of_one in scores.values()), escape(text)]
            for i, (name, text) in enumerate(about.items())
        ]
        return table(caption, ["metric", *scores, "what it is"], rows, "metrics")
    caption += "".join(f" {capital(name)}: {text}" for name, text in about.items() if text)
    if any("signatures" in one.artifacts for one in finished):
        caption += " mnemos score gives intervals over test sentences."
    rows = [
        [variant_name(results.names.index(name), name), *map(mean_and_spread, of_one)]
        for name, of_one in scores.items()
    ]
    return table(caption, ["variant", *about], rows)


def side_by_side(tasks: Sequence[Results]) -> str:
    """One table of the variants of several tasks, each with the metric of its task."""

    def task(results: Results) -> str:
        return next((str(flat(run.recipe).get("data.is", "–")) for run in results.all_runs()), "–")

    return table_of(
        "All variants, mean ± sample standard deviation over seeds of their task's metric. Rows of different tasks "
        "cannot be compared. From the runs' result.json.",
        [(results, row) for results in tasks for row in results.rows],
        {
            "variant": lambda one: escape(one[1].name),
            "task": lambda one: escape(task(one[0])),
            "metric": lambda one: escape(one[0].metric),
            "value": lambda one: mean_and_spread(one[1]),
            "seeds": lambda one: str(one[1].seeds),
            "parameters": lambda one: count(one[1].parameters),
        },
        "runs",
    )


def _tested(results: Results, control: str | None = None) -> list[str]:
    """The variants with a run that has a test result, as trained or under a control."""
    runs = {name: results.runs_of(name) for name in results.names}
    return [name for name in runs if any(math.isfinite(run.tested(results.metric, control)) for run in runs[name])]


def seeds(results: Results) -> str:
    """The figure of seeds; "" for fewer than two runs."""
    variants, emptied = _tested(results), _tested(results, "emptied")
    if not variants or len(results.all_runs()) < 2:
        return ""
    score = f"{results.split} {results.metric}"
    shown: dict[str, tuple[str, str | None]] = {}  # by name: the variant, and its control
    for name in variants:
        shown |= {name: (name, None)} | ({f"{name}, cache emptied": (name, "emptied")} if name in emptied else {})
    called = seed_names(run for name in variants for run in results.runs_of(name))
    chart = Chart(
        *("seeds", "", score),
        [variant(label, results.names.index(name)) for label, (name, _) in shown.items()],
        list(dict.fromkeys(called.values())),
        [Axis(score)],
        "strip",
        references=[("majority class", results.majority)] if results.majority is not None else [],
        label=f"{capital(score)} by variant and seed",
    )
    for index, (name, control) in enumerate(shown.values()):
        for run in results.runs_of(name):
            if math.isfinite(value := run.tested(results.metric, control)):
                chart.add(index, chart.runs.index(called[run.label]), 0.0, value)
    caption = f"{capital(score)}: marks are seeds, the bar is their mean"
    caption += ", cache emptied: the same trained models" * bool(emptied)
    return chart_figure([chart], f"{caption}. From result.json of {plural(len(results.all_runs()), 'run')}.", "wide")


def _controls(results: Results) -> str:
    if not results.controls:
        if any(results.state_controls(name) or results.uncontrolled(name) for name in results.names):
            return ""  # a section of its own has the controls of the state
        if not results.cached() and not any(row.memory for row in results.rows):
            return ""
        return missing("No control was run, so these results do not show whether the models use their memory.")

    def change(one: Control) -> Difference:
        return results.effect(one.name, one.control) or Difference(math.nan)

    def interval(one: Control) -> str:
        ends = change(one).interval
        return " to ".join(decimal(end, signed=True) for end in ends) if ends else "–"

    score = f"{results.split} {results.metric}"
    meanings = [text for name, text in _MEANINGS.items() if name in {one.control for one in results.controls}]
    return table_of(
        f"Controls: the same trained models, evaluated with a changed memory. The change is in {score} relative to the "
        f"intact model; its 95% interval comes from the spread between seeds. {' '.join(meanings)} What the memory "
        f"adds is the difference to the never-written baseline. From {results.source}.",
        results.controls,
        {
            "variant": lambda one: variant_name(results.names.index(one.name), one.name),
            "control": lambda one: escape(CONTROLS.get(one.control, one.control)),
            score: mean_and_spread,
            "seeds": lambda one: str(one.seeds),
            "change": lambda one: decimal(change(one).difference, signed=True),
            "95% interval": interval,
        },
        "controls",
    )
