"""comparison.json: the scores of finished runs, their spread over seeds and their costs; written, read and printed."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mnemos.atomic import write_json
from mnemos.lab.evaluate.controls import legend
from mnemos.lab.evaluate.records import OMITTED, from_json, read_object, to_json
from mnemos.lab.run.files import Result
from mnemos.lab.run.provenance import shared, trained
from mnemos.lab.tasks.metrics import bounds_json, bounds_of
from mnemos.lab.tasks.no_learning import no_better
from mnemos.types import InputError, JSONObject

from .baselines import Role
from .budgets import budget_text
from .runs import Sweep, at_end
from .significance import (
    LEVEL,
    NO_SPREAD,
    ONE_SEED,
    UNBOUNDED,
    Bounds,
    Difference,
    Scored,
    differences,
    interval,
    spread,
)

FILE = "comparison.json"
_REMEDY = "compare again"
_STATE = "state KiB: what the model keeps of a row from one call to the next, after a row of the greatest length"
_WIDTH = 150  # of a printed table in a file, which has no width of its own; enough for all columns


@dataclass(frozen=True)
class ScoreAt:
    """The scores at one position of an axis of the task, such as a distance."""

    x: float
    mean: float
    std: float
    seeds: int


@dataclass(frozen=True)
class MetricByX:
    """A metric along an axis of the task, which is named `x`."""

    metric: str | None
    x: str | None
    values: tuple[ScoreAt, ...]


@dataclass(frozen=True)
class Control:
    """A row evaluated under a control of its stored caches: "emptied", "exchanged" or "closed"."""

    name: str
    control: str
    mean: float
    std: float = math.nan
    seeds: int = 1


@dataclass(frozen=True)
class Row:
    """One recipe of a comparison: the mean and the spread of the metric over its runs, and the mean cost of a run."""

    name: str
    mean: float
    std: float = math.nan
    seeds: int = 1
    parameters: float = math.nan
    flops: float = math.nan  # of a forward of one row
    state_bytes: float = math.nan  # of a stream, after a row of the greatest length
    seconds: float = math.nan
    peak_bytes: float = math.nan
    steps: float = math.nan
    tokens: float = math.nan  # that updates read, without padding, in the comparison's unit
    train_flops: float = math.nan  # of all updates
    baseline_of: tuple[str, ...] = ()  # the rows whose never-written baseline it is
    memory: str | None = None  # what its model writes ("cache", "slots", …)
    interval: tuple[float, float] | None = None  # of the mean (95 %)
    against: Difference | None = None  # to the reference row
    along: MetricByX | None = field(default=None, metadata=OMITTED)
    # Where rates were swept: the best, and [rate, score on the validation split] of each.
    rate: float | None = field(default=None, metadata=OMITTED)
    rates: tuple[tuple[float, float | None], ...] | None = field(default=None, metadata=OMITTED)
    runs: tuple[dict[str, Any], ...] = ()  # the folder, seed and commit of each


@dataclass(frozen=True)
class Comparison:
    """The content of comparison.json."""

    metric: str  # the first of the task, on the test split
    higher_is_better: bool
    rows: tuple[Row, ...]
    about: str = ""  # one sentence on the metric
    bounds: Bounds = UNBOUNDED  # its least and greatest value; null in the file for an infinite one
    majority: float | None = None  # the score of the most frequent class
    reference: dict[str, float] = field(default_factory=dict)  # scores without learning (`Task.reference`)
    against: str = ""  # the row that the others are tested against
    unit: str = Result.unit  # what "tokens" of the rows counts
    scored_rows: dict[str, Any] = field(default_factory=dict)
    scored_targets: dict[str, int] = field(default_factory=dict, metadata=OMITTED)
    controls: tuple[Control, ...] = ()
    runs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the folders of each row's runs
    provenance: dict[str, Any] = field(default_factory=dict)  # `provenance.shared`
    # What was made equal (`Budget.apply`), "parameters": whether they are, and "early": rows with a run that
    # `train.patience` stopped. None where files do not say.
    equal: dict[str, Any] | None = field(default=None, metadata=OMITTED)

    def as_json(self) -> JSONObject:
        """The content of the file. A row's "baseline_of" is a name, a list of names if there are several, or null."""
        content: JSONObject = to_json(self) | {"bounds": bounds_json(self.bounds)}
        for row in content["rows"]:
            names = row["baseline_of"]
            row["baseline_of"] = names[0] if len(names) == 1 else names or None
        return content

    def write(self, folder: Path) -> None:
        write_json(folder / FILE, self.as_json())


def read_comparison(folder: Path) -> Comparison:
    """The content of folder/comparison.json. Raises InputError, which names the file and the field."""
    path = folder / FILE
    content = read_object(path, _REMEDY)
    for row in rows if isinstance(rows := content.get("rows"), list) else ():
        if isinstance(row, dict) and "baseline_of" in row:
            of = row["baseline_of"]
            row["baseline_of"] = [of] if isinstance(of, str) else [] if of is None else of
    comparison = from_json(Comparison, content, path, _REMEDY)
    if not comparison.rows:
        raise InputError(f'{path}: expected "rows" to be a list of recipes, found none; {_REMEDY}')
    return replace(comparison, bounds=bounds_of(comparison.bounds))


def summarise(
    runs: Mapping[str, Sequence[Path]],
    folder: Path,
    against: str | None = None,
    roles: Mapping[str, Role] = {},
    sweeps: Mapping[str, Sweep] = {},
) -> Comparison:
    """The comparison of finished runs: {name: run folders}. against: the reference row, or the first.

    roles: of the rows (`baselines.roles_of`). sweeps: of learning rates, by the rows' names.
    """
    results = {name: [Result.read(path) for path in every] for name, every in runs.items()}
    paths = [path for every in runs.values() for path in every]
    first, against = next(iter(results.values()))[0], against or next(iter(runs))
    described = first.description(first.metric, paths[0])
    folders = {name: tuple(str(path.relative_to(folder)) for path in every) for name, every in runs.items()}
    commits = {name: tuple(map(trained, runs[name], folders[name])) for name in runs}
    bounds = bounds_of(described["bounds"])
    rows = rows_of(results, first.metric, against, roles, commits, bounds)
    return Comparison(
        metric=first.metric,
        higher_is_better=described["higher_is_better"],
        rows=tuple(
            replace(row, rate=swept.best, rates=tuple(swept.scores.items())) if (swept := sweeps.get(row.name)) else row
            for row in rows
        ),
        about=described["about"],
        bounds=bounds,
        majority=first.majority,
        reference={name: one for name, one in first.reference.items() if math.isfinite(one)},
        against=against,
        unit=first.unit,
        scored_rows=first.scored_rows,
        scored_targets=first.scored_targets,
        controls=controls_of(results, first.metric),
        runs=folders,
        provenance=shared(paths),
    )


Results = Mapping[str, Sequence[Result]]  # by the name of a row: those of its finished runs


def rows_of(
    results: Results,
    metric: str,
    against: str,
    roles: Mapping[str, Role] = {},
    commits: Mapping[str, tuple[JSONObject, ...]] = {},
    bounds: Bounds = UNBOUNDED,
) -> tuple[Row, ...]:
    """The rows of a comparison. roles, against: see `summarise`; commits: `Row.runs`; bounds: of the metric."""
    spreads = {name: spread([one.score(metric) for one in every]) for name, every in results.items()}
    tests = differences(spreads, against, bounds)
    rows = []
    for name, every in results.items():
        costs: dict[str, Any] = {}
        for key in ("seconds", "peak_bytes", "steps", "tokens", "train_flops"):
            values = [getattr(one, key) for one in every]  # a mean over some of the runs would be of other runs
            costs[key] = statistics.fmean(values) if values and None not in values else math.nan
        for key in ("parameters", "flops", "state_bytes"):
            value = getattr(every[0], key) if every else None
            costs[key] = math.nan if value is None else value

        # --- the metric along an axis of the task, where runs measured one ---
        along, scores = None, defaultdict[float, list[float]](list)
        for measured in (one.artifacts["along"] for one in every if "along" in one.artifacts):
            for x, value in measured["values"]:
                scores[x].append(math.nan if value is None else value)
            along = along or measured
        if along is not None:
            at = tuple(ScoreAt(x, *spread(scores[x])) for x in sorted(scores))
            along = MetricByX(along.get("metric"), along.get("x"), at)

        role, test = roles.get(name, Role()), tests.get(name)
        rows.append(
            Row(
                name,
                *spreads[name],
                **costs,
                baseline_of=tuple(owner for owner in role.baseline_of if owner in results),
                memory=role.memory,
                interval=interval(spreads[name], bounds),
                against=test if test is not None and test.interval else None,
                along=along,
                runs=commits.get(name, ()),
            )
        )
    return tuple(rows)


def controls_of(results: Results, metric: str) -> tuple[Control, ...]:
    """The scores of each row under the controls that its first run has."""
    return tuple(
        Control(name, control, *spread([one.score(metric, control) for one in every]))
        for name, every in results.items()
        for control in (every[0].controls if every else ())
    )


# --- the tables for a terminal ---


def show(comparison: Comparison) -> None:
    """Print a comparison as tables: scores with what the seeds show, costs, and the metric along the task's axis."""
    from rich.console import Console

    console = Console(width=max(_WIDTH, Console().width), markup=False)
    say = partial(console.print, highlight=False, soft_wrap=True)
    rows = comparison.rows

    def text(score: Scored) -> str:
        return f"{score.mean:.4f}" + ("" if math.isnan(score.std) else f" ± {score.std:.4f}")

    def number(value: float, unit: float = 1, digits: int = 0) -> str:
        return "–" if math.isnan(value) else f"{value / unit:,.{digits}f}"

    # --- the scores, with their controls; with several seeds also intervals and tests against the reference ---
    tested = any(row.interval for row in rows)
    columns = ["95 % interval", f"difference to {comparison.against}", "p (Holm)", "shown"] if tested else []
    columns += ["learning rate"] if any(row.rate is not None for row in rows) else []
    table = plain_table(["", comparison.metric, "seeds", *columns])
    for row in rows:
        cells = [row.name, text(row), str(row.seeds)]
        if tested:
            cells.append("–" if row.interval is None else "{:.4f} to {:.4f}".format(*row.interval))
            test = row.against
            if test is None or test.interval is None:
                cells += ["", "", "reference" if row.name == comparison.against else "–"]
            else:
                low, high = test.interval
                cells.append(f"{test.difference:+.4f} ({low:+.4f} to {high:+.4f})")
                cells += [f"{test.p_holm:.3g}", test.finding(comparison.higher_is_better)]
        if row.rate is not None:
            end = at_end(row.rate, [rate for rate, _ in row.rates or ()])
            cells.append(f"{row.rate:.1e}" + (end and f", {end}"))
        table.add_row(*cells)
        for control in comparison.controls:
            if control.name == row.name:
                table.add_row(f"  cache {control.control}", text(control), str(control.seeds))
    for name, value in comparison.reference.items():  # without learning
        table.add_row(name, f"{value:.4f}")
    console.print(table)

    # --- what was made equal, and how the differences are to be read ---
    if comparison.equal is not None:
        say(budget_text(comparison.equal))
    if comparison.controls:
        say(f"caches {legend(one.control for one in comparison.controls)}")
    scores = {row.name: row.mean for row in rows}
    for line in no_better(scores, comparison.reference, comparison.metric, comparison.higher_is_better):
        say(line)
    if len(rows) > 1 and any(row.against for row in rows):
        say(
            f"differences: Welch's t-test against {comparison.against}, 95 % interval and p corrected over the rows by "
            f"Holm; no difference is shown where p ≥ {LEVEL:g}"
        )
    elif len(rows) > 1 and any(row.seeds == 1 for row in rows):
        say(ONE_SEED)
    if any(row.seeds > 1 and row.std == 0 for row in rows):
        say(NO_SPREAD)
    for line in cut_note(comparison, [row.interval for row in rows]):
        say(line)

    # --- the costs ---
    costs = ["parameters", "steps", f"{comparison.unit} read", "training TFLOP", "forward MFLOP/row", "state KiB"]
    table = plain_table(["", *costs, "seconds passed", "peak MiB"])
    for row in rows:
        table.add_row(
            row.name,
            number(row.parameters),
            number(row.steps),
            number(row.tokens),
            "–" if math.isnan(row.train_flops) else f"{row.train_flops / 1e12:.3g}",
            number(row.flops, 1e6, 2),
            number(row.state_bytes, 2**10, 1),
            number(row.seconds, 1, 1),
            number(row.peak_bytes, 2**20),
        )
    console.print(table)
    say(_STATE)

    # --- the metric along the task's axis ---
    if along := {row.name: row.along for row in rows if row.along is not None}:
        first = next(iter(along.values()))
        table = plain_table(["", *(f"{one.x:g}" for one in first.values)], f"{first.metric} by {first.x}")
        for name, one in along.items():
            table.add_row(name, *map(text, one.values))
        console.print(table)


def cut_note(comparison: Comparison, intervals: Sequence[tuple[float, float] | None]) -> list[str]:
    """A sentence where an interval of a mean was cut at a bound of the comparison's metric."""
    low, high = comparison.bounds
    if not any(one is not None and (one[0] == low or one[1] == high) for one in intervals):
        return []
    ends = " and ".join(f"{end:g}" for end in comparison.bounds if math.isfinite(end))
    return [f"intervals end at {ends}: {comparison.metric} has no value beyond"]


def plain_table(columns: Sequence[str], title: str | None = None) -> Any:
    """An empty table of rich, whose first column has names and whose others have numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    return table
