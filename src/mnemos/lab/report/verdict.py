"""What the seeds allow one to say: the first sentence of a report, a table with a row for each variant, and caveats.
The memory is credited only with what a row gains over its never-written baseline (docs/reading-comparisons.md).
"""

import math
from collections.abc import Mapping

from mnemos.errors import plural
from mnemos.lab.compare.comparison import Row, cut_note
from mnemos.lab.compare.significance import BETTER, NO_DIFFERENCE, WORSE, Difference, Scored, compared, interval, wilson
from mnemos.lab.tasks.metrics import ACCURACY, GUESS, MAJORITY, TOP5
from mnemos.lab.tasks.no_learning import no_better

from .curves import read_by_x
from .markup import capital, decimal, duration, escape, listed, memory, table
from .read import Results
from .shell import variant_name

_NAMED = 6  # variants at most that a sentence names
_VERBS = {BETTER: "helps", WORSE: "harms", NO_DIFFERENCE: "is not shown to help"}
Tests = Mapping[str, tuple[Row, Difference]]  # by variant: the row that it is tested against, and the difference


def headline(results: Results) -> str:
    """What came out, in one or two sentences: over all scored rows, and at the end of the task's axis if it has one."""
    rows = _finite(results)
    if not rows:
        return f"No variant has a finite {results.score} yet."
    tests, by_x, better = differences_of(results), read_by_x(results), results.higher_is_better
    memories = [row for row in rows if row.name in tests and row.name in tests[row.name][0].baseline_of]
    sentences = []

    # --- what the memories add to their never-written baselines ---
    if memories:
        parts = []
        for row in memories[:_NAMED]:
            other, one = tests[row.name]
            unknown = "by one seed" if min(row.seeds, other.seeds) < 2 else "without a spread over seeds"
            verb = _VERBS.get(one.finding(better), f"cannot be judged {unknown}")
            values = f"{decimal(row.mean)}, against {decimal(other.mean)} of its never-written baseline {other.name}"
            ends = " to ".join(decimal(end, signed=True) for end in one.interval or ())
            by = decimal(one.difference, signed=True) + (f", 95% interval {ends}" if ends else "")
            parts.append((f"of {row.name} {verb}", values, f"({by})"))
        if len(memories) == 1:
            what, values, by = parts[0]
            sentences.append(f"The memory {what}: {_scored(results)} {values} {by}.")
        else:
            more = f"; {len(memories) - _NAMED} more are in the table" if len(memories) > _NAMED else ""
            each = "; that ".join(f"{what} {by}" for what, _, by in parts)
            sentences.append(
                f"The memory {each}{more}. Each is compared with its never-written baseline, by {_scored(results)}."
            )

    # --- or the scores from the best, and how many differences to the reference are shown ---
    elif by_x is None or any(one.interval for _, one in tests.values()):
        findings = [one.finding(better) for _, one in tests.values() if one.interval]
        shown = sum(one != NO_DIFFERENCE for one in findings)
        to = f"; {shown} of {plural(len(findings), 'difference')} to {results.against} shown" if findings else ""
        sentences.append(f"{capital(_scored(results))}: {_ranked({row.name: row.mean for row in rows}, better)}{to}.")

    # --- the scores without learning; a guess is said beside the axis, where there is one ---
    beside = by_x is not None and math.isfinite(by_x.chance)
    unlearned = {name: one for name, one in without_learning(results).items() if not (beside and name == GUESS)}
    if sentences and unlearned:
        sentences.append(f"Without learning: {_ranked(unlearned, better)}.")

    # --- at the greatest x of the axis: of the one memory and its baseline, or of all variants ---
    if by_x is not None:
        means = by_x.at_the_end()
        guess = f"; a guess has {decimal(by_x.chance)}" if math.isfinite(by_x.chance) else ""
        most = "" if len(by_x.xs) == 1 else ", the most that was tested"
        same = by_x.metric == results.metric and sentences
        start = "At" if same else f"{capital(results.split)} {by_x.metric} at"
        scores = _ranked(means, (results.described(by_x.metric) or {}).get("higher_is_better"))
        if len(memories) == 1:
            names = [memories[0].name, tests[memories[0].name][0].name]
            scores = " against ".join(decimal(means[name]) for name in names) if {*names} <= {*means} else scores
        sentences.append(f"{start} {by_x.xs[-1]:,g} {by_x.x}{most}: {scores}{guess}.")
    return " ".join(sentences)


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


def _scored(results: Results) -> str:
    """The score, and over what: the counted targets that it is a mean of, or else the rows that hold them."""
    split = "valid" if results.split == "validation" else "test"
    rows, targets = results.scored_rows.get(split), results.scored_targets.get(split)
    if targets and targets != rows:  # a step may have several numbers
        return f"{results.score} over {plural(targets, 'step' if results.unit == 'steps' else 'target')}"
    return f"{results.score} {'over' if targets else 'of'} {plural(rows, 'row')}" if rows else results.score


def without_learning(results: Results) -> dict[str, float]:
    """The scores without learning, by name: the majority class, and the task's others (`Task.reference`)."""
    majority = {} if results.majority is None else {MAJORITY: results.majority}
    return majority | results.reference


def _ranked(scores: Mapping[str, float], higher_is_better: bool | None) -> str:
    ranked = list(scores)
    if higher_is_better is not None:
        ranked.sort(key=lambda name: scores[name], reverse=higher_is_better)
    more = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    return f"{', '.join(f'{name} {decimal(scores[name])}' for name in ranked[:_NAMED])}{more}"


def caveats(results: Results) -> list[str]:
    """What weakens the numbers, each once: models that did not learn or diverged, seeds, baselines, the data."""
    rows = _finite(results)
    scores = {row.name: row.mean for row in rows}
    notes = list(no_better(scores, without_learning(results), results.metric, results.higher_is_better))

    if diverged := [row.name for row in results.rows if row.seeds and not math.isfinite(row.mean)]:
        notes.append(f"Without a finite {results.score}: {listed(diverged)}.")

    single = [row.name for row in rows if row.seeds < 2]
    if single and len(rows) == 1:
        notes.append("One seed: another may give another score. Compare with --seeds 5.")
    elif single:
        who = "every variant" if len(single) == len(rows) else listed(single)
        notes.append(f"One seed ranks nothing, and another may give another order: {who}. Compare with --seeds 5.")

    judged = {name for row in results.rows for name in row.baseline_of}
    if lacking := [row.name for row in results.rows if row.memory and row.name not in judged]:
        notes.append(
            f"No never-written baseline shows what the memory adds: {listed(lacking)}. Compare with --unwritten."
        )

    warnings = dict.fromkeys(line for run in results.all_runs() if run.provenance for line in run.provenance.warnings)
    return [*notes, *(f"{capital(str(line))}." for line in warnings)]


def summary_table(results: Results) -> str:
    """A row for each variant: its score, and its difference to its baseline or to the reference, with intervals."""
    rows = _finite(results)
    if not rows:
        return ""
    tests, by_x = differences_of(results), read_by_x(results)
    better = "higher" if results.higher_is_better else "lower"
    last = by_x.at_the_end() if by_x and by_x.metric == results.metric and len(by_x.xs) > 1 else {}
    of_seeds = {row.name: interval(row, results.bounds) for row in rows}
    of_rows = {row.name: _interval_of_rows(results, row) for row in rows if of_seeds[row.name] is None}

    def with_range(value: float, ends: tuple[float, float] | None, signed: bool = False) -> str:
        small = "" if ends is None else f" <small>{' to '.join(decimal(end, signed=signed) for end in ends)}</small>"
        return f"{decimal(value, signed=signed)}{small}"

    cells = []
    for row in rows:
        of = f"never-written baseline of {listed(row.baseline_of)}" if row.baseline_of else ""
        name = variant_name(results.names.index(row.name), row.name) + (f"<small>{escape(of)}</small>" if of else "")
        score = with_range(row.mean, of_seeds[row.name] or of_rows[row.name])
        line = [score, decimal(last.get(row.name, math.nan)), "", ""]
        if row.name in tests:
            other, one = tests[row.name]
            line[2] = f"{with_range(one.difference, one.interval, True)}<span>to {escape(other.name)}</span>"
            line[3] = "" if math.isnan(one.p_holm) else "&lt; 0.001" if one.p_holm < 0.001 else f"{one.p_holm:.3f}"
        cells.append([name, *line, memory(row.state_bytes or math.nan), duration(row.seconds)])
    cells += [[escape(name), decimal(one), *[""] * 5] for name, one in without_learning(results).items()]

    # --- the caption says what is in the table and no more ---
    end = f"at {by_x.xs[-1]:,g}" if by_x and last else ""
    sentences = [capital(_scored(results)).replace(results.metric, f"{results.metric} ({better} is better)", 1)]
    sentences[0] += f"; {end}: with that many {by_x.x}" if by_x and last else ""
    ranges = ["Student's t over seeds"] * any(of_seeds.values())
    ranges += ["Wilson's, of the scored rows, and not of seeds"] * any(of_rows.values())
    if ranges:
        notes = cut_note(results, list(of_seeds.values()))
        sentences.append(f"Below a score: its 95% interval ({', '.join([*ranges, *notes])})")
    if tested := sum(one.interval is not None for _, one in tests.values()):
        holm = f", both corrected for {tested} comparisons by Holm" if tested > 1 else ""
        sentences.append(f"Difference: Welch's test, its 95% interval and p{holm}")
    if any(row.state_bytes > 0 for row in rows):
        sentences.append("State: what the model keeps of a row from one call to the next")
    caption = ". ".join(sentences) + "."
    caption += f" {capital(results.metric)}: {results.about}" if results.about else ""
    return table(caption, ["variant", results.metric, end, "difference", "p", "state", "time"], cells, "variants")


def _interval_of_rows(results: Results, row: Row) -> tuple[float, float] | None:
    """The interval of one run's score that is a share of the scored rows, each with one target; else None."""
    runs = results.runs_of(row.name)
    split = "valid" if results.split == "validation" else "test"
    if len(runs) != 1 or not runs[0].result or results.metric not in (ACCURACY.name, TOP5.name):
        return None
    of, targets = (counts.get(split, 0) for counts in (runs[0].result.scored_rows, runs[0].result.scored_targets))
    return wilson(round(row.mean * of), of) if of and of == targets and 0 <= row.mean <= 1 else None


def mean_and_spread(score: Scored) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = score.seeds > 1 and math.isfinite(score.std)
    return f"{decimal(score.mean)}\u00a0±\u00a0{decimal(score.std)}" if several else decimal(score.mean)
