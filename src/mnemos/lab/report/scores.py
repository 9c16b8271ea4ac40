"""The results in numbers: scores of every variant, the controls of caches, a dot for each seed."""

import math
from collections.abc import Sequence

from mnemos.errors import plural
from mnemos.lab.compare.significance import Difference
from mnemos.lab.evaluate.records import flat

from .charts import Axis, Chart, chart_figure, variant
from .curves import seed_names
from .markup import OPERATIONS, capital, count, decimal, escape, memory, missing, operations, table, table_of
from .read import Results, finite_spread
from .shell import variant_name
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
    better = "higher" if results.higher_is_better else "lower"
    head = ["variant", results.score, "seeds", "parameters", "FLOPs of a row", "state"]
    rows = []
    for i, row in enumerate(results.rows):
        costs = [count(row.parameters), operations(row.flops), memory(row.state_bytes or math.nan)]
        rows.append([variant_name(i, row.name), mean_and_spread(row), str(row.seeds), *costs])
    rows += [[escape(name), decimal(one), *[""] * 4] for name, one in without_learning(results).items()]
    caption = (
        f"{capital(results.score)} ({better} is better), mean ± sample standard deviation over seeds, and the size of "
        f"the models. {OPERATIONS} State: bytes per stream after a row of the greatest length that the settings of the "
        f"data allow, of an encoder-decoder its source and its output. From {results.source}."
    )
    parts = [table(caption, head, rows), _other_metrics(results)]
    if not _tested(results):
        parts.append(missing(f"No result.json gives a {results.score}, so single seeds cannot be drawn."))
    return "\n".join(filter(None, [*parts, _controls(results)]))


def _other_metrics(results: Results) -> str:
    finished = results.finished()
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
        rows = []
        for i, (name, text) in enumerate(about.items()):
            rows.append([escape(name), *(mean_and_spread(of_one[i]) for of_one in scores.values()), escape(text)])
        return table(caption, ["metric", *scores, "what it is"], rows, "metrics")
    caption += "".join(f" {capital(name)}: {text}" for name, text in about.items() if text)
    names = {name: variant_name(results.names.index(name), name) for name in scores}
    rows = [[names[name], *map(mean_and_spread, of_one)] for name, of_one in scores.items()]
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
    runs = {name: results.runs_of(name) for name in results.names}
    return [name for name in runs if any(math.isfinite(run.tested(results.metric, control)) for run in runs[name])]


def seeds(results: Results) -> str:
    """The figure of seeds; "" for fewer than two runs."""
    variants, emptied = _tested(results), _tested(results, "emptied")
    if not variants or len(results.all_runs()) < 2:
        return ""
    shown: dict[str, tuple[str, str | None]] = {}  # by name: the variant, and its control
    for name in variants:
        shown |= {name: (name, None)} | ({f"{name}, cache emptied": (name, "emptied")} if name in emptied else {})
    called = seed_names(run for name in variants for run in results.runs_of(name))
    chart = Chart(
        *("seeds", "", results.score),
        [variant(label, results.names.index(name)) for label, (name, _) in shown.items()],
        list(dict.fromkeys(called.values())),
        [Axis(results.score)],
        "strip",
        references=[("majority class", results.majority)] if results.majority is not None else [],
        label=f"{capital(results.score)} by variant and seed",
    )
    for index, (name, control) in enumerate(shown.values()):
        for run in results.runs_of(name):
            if math.isfinite(value := run.tested(results.metric, control)):
                chart.add(index, chart.runs.index(called[run.folder]), 0.0, value)
    caption = f"{capital(results.score)}: marks are seeds, the bar is their mean"
    caption += ", cache emptied: the same trained models" * bool(emptied)
    return chart_figure([chart], f"{caption}. From result.json of {plural(len(results.all_runs()), 'run')}.", "wide")


def _controls(results: Results) -> str:
    if not results.controls:
        if any(results.state_controls(name) or results.uncontrolled(name) for name in results.names):
            return ""  # a section of its own has the controls of the state
        if not results.cached() and not any(row.memory for row in results.rows):
            return ""
        return missing("No control was run, so these results do not show whether the models use their memory.")

    changes = [(one, results.effect(one.name, one.control) or Difference(math.nan)) for one in results.controls]
    meanings = [text for name, text in _MEANINGS.items() if name in {one.control for one in results.controls}]
    spread = "; its 95% interval comes from the spread between seeds" * any(one.interval for _, one in changes)
    return table_of(
        f"Controls: the same trained models, evaluated with a changed memory. The change is in {results.score} "
        f"relative to the intact model{spread}. {' '.join(meanings)} What the memory adds is the difference to the "
        f"never-written baseline. From {results.source}.",
        changes,
        {
            "variant": lambda one: variant_name(results.names.index(one[0].name), one[0].name),
            "control": lambda one: escape(CONTROLS.get(one[0].control, one[0].control)),
            results.score: lambda one: mean_and_spread(one[0]),
            "seeds": lambda one: str(one[0].seeds),
            "change": lambda one: decimal(one[1].difference, signed=True),
            "95% interval": lambda one: " to ".join(decimal(end, signed=True) for end in one[1].interval or ()) or "–",
        },
        "controls",
    )
