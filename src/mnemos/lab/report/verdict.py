"""What the seeds allow one to say: the first sentence of a report, a table with a row for each variant, and caveats.

The memory is credited only with what a row gains over its never-written baseline: the model with a memory that nothing
is stored in, or with a learned constant in place of a cache that is frozen at inference. A gain over a model without a
memory may be that of the branch which reads it, and emptying a memory shows only that the trained model depends on it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mnemos.lab.compare.comparison import Row, cut_note
from mnemos.lab.compare.significance import (
    BETTER,
    NO_DIFFERENCE,
    WORSE,
    Difference,
    Scored,
    compared,
    interval,
    wilson,
)
from mnemos.lab.tasks.metrics import ACCURACY, GUESS, TOP5
from mnemos.lab.tasks.no_learning import no_better

from .markup import capital, decimal, duration, escape, listed, memory, plural, table
from .metric_by_x import MetricByX, read_by_x, rows_by_x
from .read import Results
from .style import variant_name

_NAMED = 6  # variants at most that a sentence names
_VERBS = {BETTER: "helps", WORSE: "harms", NO_DIFFERENCE: "is not shown to help"}
Tests = Mapping[str, tuple[Row, Difference]]  # by variant: the row that it is tested against, and the difference


def headline(results: Results) -> str:
    """What came out, in one or two sentences: over all scored rows, and at the end of the task's axis if it has one."""
    rows = _finite(results)
    if not rows:
        return f"No variant has a finite {results.split} {results.metric} yet."
    tests, by_x, overall = differences_of(results), read_by_x(results), ""
    memories = [row for row in rows if row.name in tests and row.name in tests[row.name][0].baseline_of]
    if memories:
        overall = _of_memories(results, memories, tests)
    elif by_x is None or any(one.interval for _, one in tests.values()):
        overall = _of_scores(results, rows, tests)
    without = _without_learning(results, by_x) if overall else ""
    return " ".join(filter(None, [overall, without, _at_the_end(results, by_x, memories, tests, overall)]))


def differences_of(results: Results) -> Tests:
    """Each variant against its never-written baseline, else against the reference; all are corrected together."""
    rows = _finite(results)
    baselines = {name: other for other in rows for name in other.baseline_of}
    reference = next((row for row in rows if row.name == results.against), None)
    tested = [(row, baselines.get(row.name, reference)) for row in rows]
    pairs = [(a, b) for a, b in tested if b is not None and a is not b and b.name not in a.baseline_of]
    differences = compared(pairs, results.bounds)
    return {row.name: (other, one) for (row, other), one in zip(pairs, differences, strict=True)}


def _finite(results: Results) -> list[Row]:
    return [row for row in results.rows if math.isfinite(row.mean)]


class Over(NamedTuple):
    """What was scored of a split. averaged: the scores are means over these; else the rows hold what is averaged."""

    number: int
    noun: str
    averaged: bool


def scored_of(results: Results, split: str) -> Over | None:
    """What the scores of a split ("valid" or "test") are averaged over, where the runs say so and agree."""

    def agreed(counts: Sequence[int | None], otherwise: int | None) -> int | None:
        found = set(counts or [otherwise])
        return found.pop() if len(found) == 1 else None

    finished = [run.result for run in results.all_runs() if run.result]
    rows = agreed([one.scored_rows.get(split) for one in finished], results.scored_rows.get(split))
    targets = agreed([one.scored_targets.get(split) for one in finished], results.scored_targets.get(split))
    if targets and targets != rows:
        return Over(targets, "step" if results.unit == "steps" else "target", True)  # a step may have several numbers
    return Over(rows, "row", bool(targets)) if rows else None


def _score(results: Results) -> str:
    """What the scores are, and what they are averaged over, where that is known."""
    over = scored_of(results, "valid" if results.split == "validation" else "test")
    of = f" {'over' if over.averaged else 'of'} {plural(over.number, over.noun)}" if over else ""
    return f"{results.split} {results.metric}{of}"


def without_learning(results: Results) -> dict[str, float]:
    """The scores without learning, by name: the most frequent class, and the task's others (`Task.reference`)."""
    majority = {} if results.majority is None else {"most frequent class": results.majority}
    return majority | results.reference


def _without_learning(results: Results, by_x: MetricByX | None) -> str:
    """The scores without learning, in one sentence; a guess is not in it where that along the axis is said."""
    said = by_x is not None and math.isfinite(by_x.chance)
    known = {name: one for name, one in without_learning(results).items() if not (said and name == GUESS)}
    return f"Without learning: {_ranked(known, results.higher_is_better)}." if known else ""


def _of_memories(results: Results, memories: Sequence[Row], tests: Tests) -> str:
    """What the memories add to their never-written baselines, in one sentence."""
    parts = []
    for row in memories[:_NAMED]:
        other, one = tests[row.name]
        unknown = "by one seed" if min(row.seeds, other.seeds) < 2 else "without a spread over seeds"
        verb = _VERBS.get(one.finding(results.higher_is_better), f"cannot be judged {unknown}")
        values = f"{decimal(row.mean)}, against {decimal(other.mean)} of its never-written baseline {other.name}"
        ends = " to ".join(decimal(end, signed=True) for end in one.interval or ())
        by = decimal(one.difference, signed=True) + (f", 95% interval {ends}" if ends else "")
        parts.append((f"of {row.name} {verb}", values, f"({by})"))
    if len(memories) == 1:
        what, values, by = parts[0]
        return f"The memory {what}: {_score(results)} {values} {by}."
    more = f"; {len(memories) - _NAMED} more are in the table" if len(memories) > _NAMED else ""
    each = "; that ".join(f"{what} {by}" for what, _, by in parts)
    return f"The memory {each}{more}. Each is compared with its never-written baseline, by {_score(results)}."


def _of_scores(results: Results, rows: Sequence[Row], tests: Tests) -> str:
    """The scores from the best, and how many differences to the reference are shown."""
    findings = [one.finding(results.higher_is_better) for _, one in tests.values() if one.interval]
    shown = sum(one != NO_DIFFERENCE for one in findings)
    to = f"; {shown} of {plural(len(findings), 'difference')} to {results.against} shown" if findings else ""
    return f"{capital(_score(results))}: {_ranked({row.name: row.mean for row in rows}, results.higher_is_better)}{to}."


def _ranked(scores: Mapping[str, float], higher_is_better: bool | None) -> str:
    """The scores from the best, or as they come where the metric's direction is not known; at most `_NAMED`."""
    ranked = list(scores)
    if higher_is_better is not None:
        ranked.sort(key=lambda name: scores[name], reverse=higher_is_better)
    more = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    return f"{', '.join(f'{name} {decimal(scores[name])}' for name in ranked[:_NAMED])}{more}"


def _at_the_end(results: Results, by_x: MetricByX | None, memories: Sequence[Row], tests: Tests, overall: str) -> str:
    """The metric at the greatest x of the axis: of the one memory and its baseline, or of all variants."""
    if by_x is None:
        return ""
    means = by_x.at_the_end()
    guess = f"; a guess has {decimal(by_x.chance)}" if math.isfinite(by_x.chance) else ""
    most = "" if len(by_x.xs) == 1 else ", the most that was tested"
    start = "At" if by_x.metric == results.metric and overall else f"{capital(results.split)} {by_x.metric} at"
    scores = _ranked(means, (results.described(by_x.metric) or {}).get("higher_is_better"))
    if len(memories) == 1:
        names = [memories[0].name, tests[memories[0].name][0].name]
        scores = " against ".join(decimal(means[name]) for name in names) if {*names} <= {*means} else scores
    return f"{start} {by_x.xs[-1]:,g} {by_x.x}{most}: {scores}{guess}."


def caveats(results: Results) -> list[str]:
    """What weakens the numbers, each once: models that did not learn or diverged, seeds, baselines, the data."""
    rows = _finite(results)
    majority = {} if results.majority is None else {"always answering the most frequent class": results.majority}
    scores = {row.name: row.mean for row in rows}
    said = list(no_better(scores, majority | results.reference, results.metric, results.higher_is_better))

    if diverged := [row.name for row in results.rows if row.seeds and not math.isfinite(row.mean)]:
        said.append(f"Without a finite {results.split} {results.metric}: {listed(diverged)}.")

    single = [row.name for row in rows if row.seeds < 2]
    if single and len(rows) == 1:
        said.append("One seed: another may give another score. Compare with --seeds 5.")
    elif single:
        who = "every variant" if len(single) == len(rows) else listed(single)
        said.append(f"One seed ranks nothing, and another may give another order: {who}. Compare with --seeds 5.")

    judged = {name for row in results.rows for name in row.baseline_of}
    if lacking := [row.name for row in results.rows if row.memory and row.name not in judged]:
        said.append(
            f"No never-written baseline shows what the memory adds: {listed(lacking)}. Compare with --unwritten."
        )

    warnings = dict.fromkeys(line for run in results.all_runs() if run.provenance for line in run.provenance.warnings)
    return [*said, *(f"{capital(str(line))}." for line in warnings)]


def summary_table(results: Results) -> str:
    """A row for each variant: its score, and its difference to its baseline or to the reference, with intervals."""
    rows = _finite(results)
    if not rows:
        return ""
    tests, by_x = differences_of(results), read_by_x(results)
    last = by_x.at_the_end() if by_x and by_x.metric == results.metric and len(by_x.xs) > 1 else {}
    of_seeds = {row.name: interval(row, results.bounds) for row in rows}
    of_rows = {row.name: _interval_of_rows(results, row) for row in rows if of_seeds[row.name] is None}
    cells = []
    for row in rows:
        of = f"never-written baseline of {listed(row.baseline_of)}" if row.baseline_of else ""
        name = variant_name(results.names.index(row.name), row.name) + (f"<small>{escape(of)}</small>" if of else "")
        score = _with_range(row.mean, of_seeds[row.name] or of_rows[row.name])
        line = [score, decimal(last.get(row.name, math.nan)), "", ""]
        if row.name in tests:
            other, one = tests[row.name]
            line[2] = f"{_with_range(one.difference, one.interval, True)}<span>to {escape(other.name)}</span>"
            line[3] = "" if math.isnan(one.p_holm) else "&lt; 0.001" if one.p_holm < 0.001 else f"{one.p_holm:.3f}"
        cells.append([name, *line, memory(row.state_bytes or math.nan), duration(row.seconds)])
    cells += [[escape(name), decimal(one), *[""] * 5] for name, one in without_learning(results).items()]

    # --- the caption says what is in the table and no more ---
    end = f"at {by_x.xs[-1]:,g}" if by_x and last else ""
    said = [capital(_score(results)) + (f"; {end}: with that many {by_x.x}" if by_x and last else "")]
    ranges = ["Student's t over seeds"] * any(of_seeds.values())
    ranges += ["Wilson's, of the scored rows, and not of seeds"] * any(of_rows.values())
    if ranges:
        notes = cut_note(results, list(of_seeds.values()))
        said.append(f"Below a score: its 95% interval ({', '.join([*ranges, *notes])})")
    if tested := sum(one.interval is not None for _, one in tests.values()):
        holm = f", both corrected for {tested} comparisons by Holm" if tested > 1 else ""
        said.append(f"Difference: Welch's test, its 95% interval and p{holm}")
    if any(row.state_bytes > 0 for row in rows):
        said.append("State: what the model keeps of a row from one call to the next")
    caption = ". ".join(said) + "."
    caption += f" {capital(results.metric)}: {results.about}" if results.about else ""
    return table(caption, ["variant", results.metric, end, "difference", "p", "state", "time"], cells, "variants")


def _interval_of_rows(results: Results, row: Row) -> tuple[float, float] | None:
    """The interval of a score of one run that is a share of the rows that were scored; None where it is not.

    It is one if each row has one target: in a task with a majority class, or whose axis counts every row.
    """
    runs = results.runs_of(row.name)
    split = "valid" if results.split == "validation" else "test"
    if len(runs) != 1 or not runs[0].result or results.metric not in (ACCURACY.name, TOP5.name):
        return None
    of = runs[0].result.scored_rows.get(split, 0)
    one_each = results.majority is not None or (split == "test" and rows_by_x(runs[0], results.metric) == of)
    return wilson(round(row.mean * of), of) if of and one_each and 0 <= row.mean <= 1 else None


def _with_range(value: float, ends: tuple[float, float] | None, signed: bool = False) -> str:
    """A value, and its interval in small letters: HTML."""
    small = "" if ends is None else f" <small>{' to '.join(decimal(end, signed=signed) for end in ends)}</small>"
    return f"{decimal(value, signed=signed)}{small}"


def mean_and_spread(score: Scored) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = score.seeds > 1 and math.isfinite(score.std)
    return f"{decimal(score.mean)}\u00a0±\u00a0{decimal(score.std)}" if several else decimal(score.mean)
