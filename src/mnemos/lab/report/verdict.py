"""What the seeds allow one to say, as sentences with numbers: a difference, its 95 % interval, what it shows.

The memory is credited only with what a row gains over its never-written baseline: the same model with a memory that
nothing is stored in, or with a learned constant in place of a cache that is frozen at inference. A gain over a model
without a memory may be that of the branch which reads it, and emptying a memory shows only that the trained model
depends on it.
"""

import math
from collections.abc import Mapping, Sequence

from mnemos.lab.compare.baselines import CACHE
from mnemos.lab.compare.comparison import Row, cut_note
from mnemos.lab.compare.significance import (
    BETTER,
    NO_DIFFERENCE,
    WORSE,
    Difference,
    Scored,
    correct,
    count_tested,
    differences_of_best,
    interval,
    welch,
    wilson,
)
from mnemos.lab.tasks.metrics import ACCURACY, TOP5
from mnemos.lab.tasks.no_learning import BIGRAMS, no_better

from .curves import Along, along_rows, read_along
from .markup import capital, decimal, duration, escape, listed, memory, plural, table
from .read import Results, finite_spread
from .style import variant_name

_NAMED = 6  # variants at most that a sentence names
_DEPENDS = (
    "A change shows that the trained model depends on what its memory holds, not that it is better than one without a "
    "memory."
)
_SHOWN = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: NO_DIFFERENCE}


def headline(results: Results) -> str:
    """What came out, in one or two sentences: of the whole split, and at the end of the task's axis if it has one."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return "No variant has a test result yet."
    pairs = _pairs(rows)
    found = read_along(results)
    overall = _overall(results, rows, pairs)
    if found is None:
        scores = {row.name: row.mean for row in rows}
        ranked = _ranked(scores, results.higher_is_better)
        return overall or f"{capital(_score(results))} {_scope(results)}: {ranked}."
    return " ".join(filter(None, [overall, _reached(results, found, pairs, alone=not overall)]))


def _scope(results: Results) -> str:
    """What the scores are of: how many rows, where the comparison says so."""
    rows = results.scored_rows.get("valid" if results.split == "validation" else "test")
    return f"over {rows:,} rows of the {results.split} split" if rows else "over the whole split"


def _overall(results: Results, rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> str:
    """What memories add on the whole split, or the best variant; "" where no difference has an interval."""
    if pairs:
        return _sentence(results, pairs)
    if len(rows) > 1 and not _nothing_learned(results, rows):
        scores = {row.name: row for row in rows}
        best, against, _ = differences_of_best(scores, results.higher_is_better, results.bounds)
        if any(one.interval for one in against.values()):
            apart = [name for name, one in against.items() if one.finding(results.higher_is_better) == BETTER]
            score = f"{best} has the best {_score(results)}, {decimal(results.row(best).mean)}"
            if len(apart) == len(against):
                return f"{score}; its difference to every other variant is shown."
            return (
                f"{score}; {f'a difference is shown only to {listed(apart)}' if apart else 'no difference is shown'}."
            )
    return ""


def _score(results: Results) -> str:
    return f"{results.split} {results.metric}"


def _ranked(scores: Mapping[str, float], higher_is_better: bool | None) -> str:
    """The scores from the best, or as they come where the metric's direction is not known; at most `_NAMED`."""
    ranked = list(scores)
    if higher_is_better is not None:
        ranked.sort(key=lambda name: scores[name], reverse=higher_is_better)
    more = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    return f"{', '.join(f'{name} {decimal(scores[name])}' for name in ranked[:_NAMED])}{more}"


def _reached(results: Results, found: Along, pairs: Sequence[tuple[Row, Row]], alone: bool) -> str:
    """The metric at the greatest x of the axis: of the one memory and its baseline, or of all variants."""
    last = found.places[-1]
    means = _at_the_end(found)
    guess = f"; a guess has {decimal(found.chance)}" if math.isfinite(found.chance) else ""
    most = "" if len(found.places) == 1 else ", the most that was tested"
    start = "At" if found.metric == results.metric and not alone else f"Test {found.metric} at"
    if len(pairs) == 1 and all(row.name in means for row in pairs[0]):
        scores = " against ".join(decimal(means[row.name]) for row in pairs[0])
    else:
        scores = _ranked(means, (results.described(found.metric) or {}).get("higher_is_better"))
    return f"{start} {last:,g} {found.x}{most}: {scores}{guess}."


def _at_the_end(found: Along) -> dict[str, float]:
    """The mean at the greatest x of each variant that has one."""
    last = found.places[-1]
    return {name: finite_spread(points[last]).mean for name, points in found.values.items() if last in points}


_VERBS = {BETTER: "helps", WORSE: "harms", NO_DIFFERENCE: "is not shown to help", "": "cannot be judged by one seed"}


def _sentence(results: Results, pairs: Sequence[tuple[Row, Row]]) -> str:
    """What the memories add to their never-written baselines, in one sentence."""
    found = correct([welch(row, other, results.bounds) for row, other in pairs])
    score = f"{results.metric} over the whole {results.split} split"
    if len(pairs) == 1:
        (row, other), one = pairs[0], found[0]
        return (
            f"The memory of {row.name} {_verb(results, row, other, one)}: {score} {decimal(row.mean)}, against "
            f"{decimal(other.mean)} for the same model with a memory that is never written ({change(one)})."
        )
    parts = [
        f"of {row.name} {_verb(results, row, other, one)} ({change(one)})"
        for (row, other), one in zip(pairs[:_NAMED], found, strict=False)
    ]
    more = f"; {len(pairs) - _NAMED} more are in the table" if len(pairs) > _NAMED else ""
    against = "Each is compared with the same model with a memory that is never written"
    return f"The memory {'; that '.join(parts)}{more}. {against}, by {score}."


def _verb(results: Results, row: Row, other: Row, one: Difference) -> str:
    shown = one.finding(results.higher_is_better)
    return _VERBS[shown] if shown or min(row.seeds, other.seeds) < 2 else "cannot be judged without a spread over seeds"


def caveats(results: Results) -> list[str]:
    """What weakens the numbers, each once: seeds, baselines, models that did not learn."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return []
    known = {row.name: row.mean for row in rows}
    learned = no_better(known, _without_learning(results), results.metric, results.higher_is_better)
    return [*learned, *filter(None, [_one_seed(rows), _unknown(results, rows) or _missing(rows)])]


def arms(results: Results) -> str:
    """A row for each variant: its score, and its difference to its baseline or to the reference, with intervals."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return ""
    pairs = {row.name: other for row, other in _pairs(rows)}
    against = next((row for row in rows if row.name == results.against), rows[0])
    compared = [(row, pairs.get(row.name, against)) for row in rows]
    tested = [(row, other) for row, other in compared if row is not other]
    found = dict(
        zip((row.name for row, _ in tested), correct([welch(*pair, results.bounds) for pair in tested]), strict=True)
    )
    along = read_along(results)
    last = _at_the_end(along) if along and along.metric == results.metric and len(along.places) > 1 else {}
    cells, means, counted = [], [], False
    for row, other in compared:
        means.append(ends := interval(row, results.bounds))
        if ends is None and (share := _share(results, row)) is not None:
            ends, counted = wilson(*share), True
        name = variant_name(results.names.index(row.name), row.name) + _about(results, row)
        line = [_with_range(row.mean, ends), decimal(last.get(row.name, math.nan)), ""]
        if (one := found.get(row.name)) is not None:
            line[2] = f"{_with_range(one.difference, one.interval, True)}<span>to {escape(other.name)}</span>"
        cells.append([name, *line, memory(row.state_bytes or math.nan), duration(row.seconds)])
    head = ["variant", results.metric, f"at {along.places[-1]:,g}" if along and last else "", "difference"]
    caption = _said_of_arms(results, rows, along if last else None, means, counted)
    return table(caption, [*head, "state", "time"], cells, "arms")


def _about(results: Results, row: Row) -> str:
    """What a variant's recipe says of it: HTML, below its name."""
    runs = results.runs_of(row.name)
    about = runs[0].recipe.get("about") if runs else None
    return f"<small>{escape(about)}</small>" if about else ""


def _said_of_arms(
    results: Results,
    rows: Sequence[Row],
    along: Along | None,
    means: Sequence[tuple[float, float] | None],
    counted: bool,
) -> str:
    """The caption of `arms`: what the scores are of, and where the intervals come from."""
    several = any(row.seeds > 1 for row in rows)
    score = f"{capital(_score(results))} {_scope(results)}"
    at = f"; at {along.places[-1]:,g}: with that many {along.x}" if along else ""
    how = ["Student's t over seeds"] * several + ["Wilson's, of the test rows, and not of seeds"] * counted
    said = [f"{score}{at}"]
    if how:
        said.append(f"The range below a number is its 95% interval ({', '.join([*how, *cut_note(results, means)])})")
    if _pairs(rows):
        said.append(f"Difference: to the never-written baseline where there is one, else to {results.against}")
    if any(row.state_bytes > 0 for row in rows):
        said.append("State: what the model keeps of a row from one call to the next")
    caption = ". ".join(said) + "."
    return f"{caption} {capital(results.metric)}: {results.about}" if results.about else caption


def _share(results: Results, row: Row) -> tuple[int, int] | None:
    """(right, of) where the score of a row's only run is a share of the rows that were scored; None where it is not.

    It is one if each row has one target: in a task with a majority class, or whose axis counts every row.
    """
    runs = results.runs_of(row.name)
    split = "valid" if results.split == "validation" else "test"
    if len(runs) != 1 or not runs[0].result or results.metric not in (ACCURACY.name, TOP5.name):
        return None
    of = runs[0].result.scored_rows.get(split, 0)
    one_each = results.majority is not None or (split == "test" and along_rows(runs[0], results.metric) == of)
    return (round(row.mean * of), of) if of and one_each and 0 <= row.mean <= 1 else None


def _with_range(value: float, ends: tuple[float, float] | None, signed: bool = False) -> str:
    """A value, and its interval in small letters: HTML."""
    small = "" if ends is None else f"<small>{' to '.join(decimal(end, signed=signed) for end in ends)}</small>"
    return f"{decimal(value, signed=signed)}{small}"


def verdict(results: Results) -> list[str]:
    """Paragraphs of plain text: what memories add, the best, and what emptying the memories changed."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if _unrecorded(results, rows) and not _pairs(rows):
        return []
    best = [_best(results, rows)] if len(rows) > 1 and not _nothing_learned(results, rows) else []
    emptied = [text for row in rows if (text := _emptied(results, row))]
    return [
        *_against_baselines(results, rows),
        *filter(None, best),
        *([" ".join([*emptied, _DEPENDS])] if emptied else []),
    ]


def _unrecorded(results: Results, rows: Sequence[Row]) -> list[str]:
    """The variants for which it is not recorded whether they are a never-written baseline."""
    return [row.name for row in results.rows if row.baseline_of is None] if len(rows) > 1 else []


def _unknown(results: Results, rows: Sequence[Row]) -> str:
    """What is not recorded of the baselines; "" where all is."""
    if not (names := _unrecorded(results, rows)):
        return ""
    if not _pairs(rows):
        return "It is not recorded which variant is the never-written baseline of which, so no memory is judged."
    are = "is a never-written baseline" if len(names) == 1 else "are never-written baselines"
    return f"It is not recorded whether {listed(names)} {are}, so only memories with a recorded one are judged."


def mean_and_spread(score: Scored) -> str:
    """0.559 ± 0.007, or the one value of one seed, unbroken over lines."""
    several = score.seeds > 1 and math.isfinite(score.std)
    return f"{decimal(score.mean)}\u00a0±\u00a0{decimal(score.std)}" if several else decimal(score.mean)


def change(difference: Difference) -> str:
    """+0.050, 95% interval +0.012 to +0.088; without a spread between seeds the difference alone."""
    value = decimal(difference.difference, signed=True)
    if difference.interval is None:
        return value
    low, high = (decimal(end, signed=True) for end in difference.interval)
    return f"{value}, 95% interval {low} to {high}"


def _shown(results: Results, difference: Difference, tested: int = 1) -> str:
    """A difference, p with the number of comparisons that it is corrected for, and what it shows."""
    found = difference.finding(results.higher_is_better)
    by = f" (Holm, {tested} comparisons)" if tested > 1 else " (one comparison, not corrected)"
    corrected = f", p {difference.p_holm:.2g}{by}" if math.isfinite(difference.p_holm) else ""
    return f"{change(difference)}{corrected}: {_SHOWN.get(found, 'no interval, so nothing is shown')}"


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each row with its never-written baseline."""
    return [(row, other) for other in rows for row in rows if row.name in (other.baseline_of or ())]


def _against_baselines(results: Results, rows: Sequence[Row]) -> list[str]:
    """A sentence for each row with a memory and its never-written baseline."""
    pairs = _pairs(rows)
    found = correct([welch(row, other, results.bounds) for row, other in pairs])
    sentences = [
        f"What the memory of {row.name} adds to its never-written baseline {other.name}, in {results.split} "
        f"{results.metric}: {_shown(results, difference, count_tested(found))} ({_seeds(row, other)})."
        for (row, other), difference in zip(pairs, found, strict=True)
    ]
    return [" ".join(sentences)] if sentences else []


def _best(results: Results, rows: Sequence[Row]) -> str:
    """The best row, and its difference to each other one; "" where no difference has an interval."""
    scores = {row.name: row for row in rows}
    best, found, pairs = differences_of_best(scores, results.higher_is_better, results.bounds)
    if not any(one.interval for one in found.values()):
        return ""
    row = results.row(best)
    reached = f"{best} has a {_score(results)} of {mean_and_spread(row)} ({plural(row.seeds, 'seed')})"
    others = [
        f"{name} ({mean_and_spread(results.row(name))}): {_shown(results, d, pairs)}" for name, d in found.items()
    ]
    corrected = f" The {pairs} are all pairs of variants that can be tested: the best is chosen by the same scores."
    return f"{reached}, the best of {len(rows)}. Against {'; '.join(others)}.{corrected if pairs > 1 else ''}"


def _seeds(row: Row, other: Row) -> str:
    return plural(row.seeds, "seed") if row.seeds == other.seeds else f"{row.seeds} and {other.seeds} seeds"


def _one_seed(rows: Sequence[Row]) -> str:
    single = [row.name for row in rows if row.seeds < 2]
    if not single:
        return ""
    if len(rows) == 1:
        return "One seed: another may give another score. Compare with --seeds 5."
    who = "every variant" if len(single) == len(rows) > 1 else listed(single)
    return f"One seed ranks nothing, and another may give another order: {who}. Compare with --seeds 5."


def _missing(rows: Sequence[Row]) -> str:
    """Which memories have no never-written baseline."""
    owners = {name for row in rows for name in row.baseline_of or ()}
    lacking = [row.name for row in rows if row.memory and row.name not in owners]
    if not lacking:
        return ""
    return f"No never-written baseline shows what the memory adds: {listed(lacking)}. Compare with --unwritten."


def _emptied(results: Results, row: Row) -> str:
    """What emptying the memory did: the cache on the whole test split, else that part of the state on some rows."""
    memory = row.memory or CACHE
    found = results.effect(row.name) or results.memory_effect(row.name, memory, "emptied")
    if found is None or not (row.memory or results.effect(row.name)):
        return ""
    return f"{row.name} with its {memory} emptied at evaluation: {_shown(results, found)}."


def _without_learning(results: Results) -> dict[str, float]:
    """The scores without learning."""
    majority = {} if results.majority is None else {"always answering the most frequent class": results.majority}
    return majority | results.reference


def _nothing_learned(results: Results, rows: Sequence[Row]) -> bool:
    """Whether no row is better than a guess, or than the frequencies of single tokens: then there is no order."""
    weakest = {what: value for what, value in _without_learning(results).items() if not what.endswith(BIGRAMS)}
    found = (no_better({row.name: row.mean}, weakest, results.metric, results.higher_is_better) for row in rows)
    return len(rows) > 1 and all(found)
