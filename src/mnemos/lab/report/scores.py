"""The results in numbers: further metrics, the controls of caches, a dot for each seed, and what the runs cost."""

import math
from collections.abc import Callable

from mnemos.errors import plural
from mnemos.lab.compare.budgets import budget_text
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import Difference, interval, spread

from .charts import Axis, Chart, chart_figure, variant
from .curves import seed_names
from .markup import OPERATIONS, capital, count, decimal, duration, escape, memory, operations, table, table_of
from .read import Results
from .run_records import RunRecord
from .shell import variant_name
from .verdict import mean_and_spread

_ACROSS = 8  # metrics in columns; more are rows
CONTROLS = {"emptied": "cache emptied", "exchanged": "cache exchanged for noise", "closed": "gate closed"}
_MEANINGS = {
    "emptied": "Emptied: every slot is zero; a change shows that the model depends on what its cache holds.",
    "exchanged": "Exchanged: noise with the cache's mean and standard deviation per channel.",
    "closed": "Closed: the branch is switched off, which also removes its parameters and so proves nothing by itself.",
}


def section(results: Results) -> str:
    """Tables of the variants' other metrics and of the controls of caches."""
    return "\n".join(filter(None, [_other_metrics(results), _controls(results)]))


def _other_metrics(results: Results) -> str:
    def has(run: RunRecord, metric: str) -> bool:  # a NaN counts: a run that diverged is a result
        return run.result is not None and metric in run.result.scores

    finished = results.finished()
    described = next((one.metrics for one in finished if one.metrics), {})
    about = {name: str(one.get("about", "")) for name, one in described.items() if name not in (results.metric, "loss")}
    scores = {
        row.name: [spread([run.tested(name) for run in results.runs_of(row.name) if has(run, name)]) for name in about]
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


def seeds(results: Results) -> str:
    """The figure of seeds; "" for fewer than two runs."""
    runs = [run for run in results.all_runs() if math.isfinite(run.tested(results.metric))]
    if len(runs) < 2:
        return ""
    called = seed_names(runs)
    chart = Chart(
        *("seeds", f"{capital(results.score)} by variant and seed", results.score),
        [variant(name, i) for i, name in enumerate(results.names)],
        list(dict.fromkeys(called.values())),
        [Axis(results.score)],
        "strip",
        references=[("majority class", results.majority)] if results.majority is not None else [],
    )
    for index, name in enumerate(results.names):
        for run in results.runs_of(name):
            if run.folder in called:
                chart.add(index, chart.runs.index(called[run.folder]), 0.0, run.tested(results.metric))
    caption = f"Marks are seeds, the bar is their mean. From result.json of {plural(len(runs), 'run')}."
    return chart_figure([chart], caption, "wide")


def _controls(results: Results) -> str:
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


# --- what the runs cost, and their scores against it ---


def costs(results: Results) -> str:
    """What each variant spent, and its score against that."""
    return "\n".join(filter(None, [_spent(results), _score_against_cost(results)]))


def _spent(results: Results) -> str:
    rows = results.rows
    reference = next((row for row in rows if row.name == results.against), rows[0])

    def per_update(row: Row) -> str:
        own, other = (one.seconds / (one.steps or math.nan) for one in (row, reference))
        ratio = (
            f"<small>{own / other:.2f}×</small>" if len(rows) > 1 and math.isfinite(own / (other or math.nan)) else ""
        )
        return f"{duration(own)}{ratio}"

    equal = f"{capital(budget_text(results.equal))}. " if results.equal else ""
    ratios = f", below it the ratio to {reference.name}" if len(rows) > 1 else ""
    caption = (
        f"What a run spent. {equal}What updates read is counted without padding, and twice if two updates read it. "
        f"{OPERATIONS} Time: the seconds of all updates that passed; per update: of one{ratios}. State: bytes per "
        "stream after a row of the greatest length that the settings of the data allow, of an encoder-decoder its "
        f"source and its output. Times from a busy machine mean little. Means over seeds. From {results.source}."
    )
    columns: dict[str, Callable[[Row], str]] = {
        "variant": lambda row: variant_name(results.names.index(row.name), row.name),
        "seeds": lambda row: str(row.seeds),
        "parameters": lambda row: count(row.parameters),
        "FLOPs of a row": lambda row: operations(row.flops),
        "state": lambda row: memory(row.state_bytes or math.nan),
        "updates": lambda row: count(row.steps),
        f"{results.unit} read": lambda row: count(row.tokens),
        "FLOPs of all updates": lambda row: operations(row.train_flops),
        "time": lambda row: duration(row.seconds),
        "per update": per_update,
        "peak memory": lambda row: memory(row.peak_bytes),
    }
    return table_of(caption, rows, columns)


def _score_against_cost(results: Results) -> str:
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if len(rows) < 2:
        return ""
    charts = []
    for name, axis in (
        ("seconds", Axis("seconds of updates", ",~f")),
        ("train_flops", Axis("FLOPs of all updates", "~s")),
    ):
        series = [variant(row.name, results.names.index(row.name)) for row in rows]
        title = f"{capital(results.score)} against {axis.name}"
        chart = Chart(f"cost-{name}", title, results.score, series, ["mean"], [axis], "marks", logarithmic=True)
        for index, row in enumerate(rows):
            if (cost := getattr(row, name)) > 0:
                chart.add(index, 0, row.mean, cost, interval=interval(row, results.bounds) or (row.mean, row.mean))
        charts.append(chart)
    bars = ", with the 95% interval" if any(interval(row, results.bounds) for row in rows) else ""
    caption = (
        f"Quality against cost: the mean {results.score}{bars}, against the seconds of updates and the floating-point "
        "operations (FLOPs) of its updates: forward, backward, and the forwards that memory replay computes again; a "
        "multiply-add is 2. Seconds are those that passed, so they grow on a busy machine. From "
        f"{results.source}."
    )
    return chart_figure(charts, caption)
