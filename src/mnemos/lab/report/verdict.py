"""What the seeds allow one to say, as sentences with numbers: a difference, its 95 % interval, what it shows.

The memory is credited only with what a row gains over its never-written baseline: the same model with a memory that
nothing is stored in, or with a learned constant in place of a cache that is frozen at inference. A gain over a model
without a memory may be that of the branch which reads it, and emptying a memory shows only that the trained model
depends on it.
"""

import math
from collections.abc import Sequence

from mnemos.lab.compare.baselines import CACHE
from mnemos.lab.compare.comparison import Row
from mnemos.lab.compare.significance import (
    BETTER,
    NO_DIFFERENCE,
    WORSE,
    Difference,
    Scored,
    correct,
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
_SHOWN = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: NO_DIFFERENCE}


def headline(results: Results) -> str:
    """One sentence that answers what was asked: the metric at the end of its axis, what memories add, or the best."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return "No variant has a test result yet."
    if (found := read_along(results)) is not None:
        return _reached(results, found)
    if pairs := _pairs(rows):
        return _sentence(results, pairs)
    if len(rows) > 1 and not _nothing_learned(results, rows):
        best, against = differences_of_best({row.name: row for row in rows}, results.higher_is_better)
        apart = [name for name, one in against.items() if one.finding(results.higher_is_better) == BETTER]
        score = f"{best} has the best {results.split} {results.metric}, {decimal(results.row(best).mean)}"
        if len(apart) == len(against):
            return f"{score}; its difference to every other variant is shown."
        return f"{score}; {f'a difference is shown only to {listed(apart)}' if apart else 'no difference is shown'}."
    scores = [f"{row.name} {decimal(row.mean)}" for row in rows[:_NAMED]]
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"{capital(results.split)} {results.metric}: {', '.join(scores)}{more}."


def _reached(results: Results, found: Along) -> str:
    """The metric at the greatest x of the axis: the best first, at most `_NAMED` variants."""
    last = found.places[-1]
    means = {name: finite_spread(points[last]).mean for name, points in found.values.items() if last in points}
    ranked = sorted(means, key=lambda name: means[name], reverse=results.higher_is_better)
    scores = [f"{name} {decimal(means[name])}" for name in ranked[:_NAMED]]
    more = f" and {len(ranked) - _NAMED} more" if len(ranked) > _NAMED else ""
    guess = f" A guess has {decimal(found.chance)}." if math.isfinite(found.chance) else ""
    return f"Test {found.metric} at {last:,g} {found.x}: {', '.join(scores)}{more}.{guess}"


def _sentence(results: Results, pairs: Sequence[tuple[Row, Row]]) -> str:
    """What the memories add to their never-written baselines, in one sentence."""
    found = correct([welch(row, other) for row, other in pairs])
    parts = []
    for (row, _), one in zip(pairs[:_NAMED], found, strict=False):
        shown = one.finding(results.higher_is_better)
        adds = {BETTER: "the memory pays", WORSE: "the memory costs", NO_DIFFERENCE: "no difference shown"}
        parts.append(f"{row.name} {change(one)} ({adds.get(shown, 'no interval')})")
    return f"What a memory adds to the same model without it, in {results.split} {results.metric}: {'; '.join(parts)}."


def caveats(results: Results) -> list[str]:
    """What weakens the numbers, each once: seeds, baselines, models that did not learn."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return []
    known = {row.name: row.mean for row in rows}
    learned = no_better(known, _without_learning(results), results.metric, results.higher_is_better)
    return [*filter(None, [_one_seed(rows), _missing(rows)]), *learned]


def arms(results: Results) -> str:
    """A row for each variant: its score, and its difference to its baseline or to the reference, with intervals."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return ""
    pairs = {row.name: other for row, other in _pairs(rows)}
    against = next((row for row in rows if row.name == results.against), rows[0])
    compared = [(row, pairs.get(row.name, against)) for row in rows]
    tested = [(row, other) for row, other in compared if row is not other]
    found = dict(zip((row.name for row, _ in tested), correct([welch(*pair) for pair in tested]), strict=True))
    cells, counted = [], False
    for row, other in compared:
        ends = interval(row)
        if ends is None and (share := _share(results, row)) is not None:
            ends, counted = wilson(*share), True
        line = [variant_name(results.names.index(row.name), row.name), decimal(row.mean), _range(ends)]
        if (one := found.get(row.name)) is None:
            line += ["", ""]
        else:
            line += [f"{decimal(one.difference, signed=True)} to {escape(other.name)}", _range(one.interval, True)]
        cells.append([*line, memory(row.state_bytes), duration(row.seconds)])
    several = any(row.seeds > 1 for row in rows)
    said = ["Student's t over seeds"] * several + ["Wilson's, of the test rows, and not of seeds"] * counted
    how = f"; 95% intervals: {', '.join(said)}" if said else ""
    caption = (
        f"{capital(results.split)} {results.metric}, and the difference to a variant's baseline or the reference{how}."
    )
    if len(rows) == 1:
        caption = f"{capital(results.split)} {results.metric}{how}."
    if results.about:
        caption += f" {capital(results.metric)}: {results.about}"
    head = ["variant", results.metric, "95% interval", "difference", "95% interval ", "state", "time"]
    return table(caption, head, cells, "arms")


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


def _range(ends: tuple[float, float] | None, signed: bool = False) -> str:
    return "–" if ends is None else f"{decimal(ends[0], signed=signed)} to {decimal(ends[1], signed=signed)}"


def verdict(results: Results) -> list[str]:
    """Paragraphs of plain text: what the results mean; the caveats, once; what emptying the memories changed."""
    rows = [row for row in results.rows if math.isfinite(row.mean)]
    if not rows:
        return ["No variant has a test result yet."]
    known = {row.name: row.mean for row in rows}
    learned = no_better(known, _without_learning(results), results.metric, results.higher_is_better)
    if len(rows) > 1 and any(row.baseline_of is None for row in results.rows):
        unknown = "It is not recorded which row is whose never-written baseline, so the table stands without a verdict."
        return list(filter(None, [" ".join([unknown, *learned]), _one_seed(rows)]))
    ranked = _against_baselines(results, rows)
    ranked += [] if _nothing_learned(results, rows) else [_best(results, rows)]
    scale = [] if learned else _scale(results)
    paragraphs = [" ".join([*ranked[:1], *learned]), " ".join([_one_seed(rows), _missing(rows)]).strip()]
    paragraphs += [*ranked[1:], *filter(None, (_emptied(results, row) for row in rows)), *scale]
    return list(filter(None, paragraphs))


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
    """A difference, p corrected for the `tested` comparisons of its sentence, and what it shows."""
    found = difference.finding(results.higher_is_better)
    by = f" (Holm, {tested} comparisons)" if tested > 1 else ""
    corrected = f", p {difference.p_holm:.2g}{by}" if math.isfinite(difference.p_holm) else ""
    return f"{change(difference)}{corrected}: {_SHOWN.get(found, 'no interval, so nothing is shown')}"


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each row with its never-written baseline."""
    return [(row, other) for other in rows for row in rows if row.name in (other.baseline_of or ())]


def _against_baselines(results: Results, rows: Sequence[Row]) -> list[str]:
    """A sentence for each row with a memory and its never-written baseline."""
    pairs = _pairs(rows)
    found = correct([welch(row, other) for row, other in pairs])
    sentences = [
        f"What the memory of {row.name} adds to its never-written baseline {other.name}, in {results.split} "
        f"{results.metric}: {_shown(results, difference, len(pairs))} ({_seeds(row, other)})."
        for (row, other), difference in zip(pairs, found, strict=True)
    ]
    return [" ".join(sentences)] if sentences else []


def _best(results: Results, rows: Sequence[Row]) -> str:
    """The best row, and its difference to each other one."""
    best, found = differences_of_best({row.name: row for row in rows}, results.higher_is_better)
    row = results.row(best)
    reached = f"{best} has a {results.split} {results.metric} of {mean_and_spread(row)} ({plural(row.seeds, 'seed')})"
    if len(rows) == 1:
        return f"{reached}."
    pairs = len(rows) * (len(rows) - 1) // 2  # the best is chosen by the same scores
    others = [
        f"{name} ({mean_and_spread(results.row(name))}): {_shown(results, d, pairs)}" for name, d in found.items()
    ]
    return f"{reached}, the best of {len(rows)}. Against {'; '.join(others)}."


def _seeds(row: Row, other: Row) -> str:
    return plural(row.seeds, "seed") if row.seeds == other.seeds else f"{row.seeds} and {other.seeds} seeds"


def _one_seed(rows: Sequence[Row]) -> str:
    single = [row.name for row in rows if row.seeds < 2]
    if not single:
        return ""
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
    return (
        f"{row.name} with its {memory} emptied at evaluation: {_shown(results, found)}. A change shows that the "
        "trained model depends on what its memory holds, not that it is better than one without a memory."
    )


def _without_learning(results: Results) -> dict[str, float]:
    """The scores without learning."""
    majority = {} if results.majority is None else {"always answering the most frequent class": results.majority}
    return majority | results.reference


def _nothing_learned(results: Results, rows: Sequence[Row]) -> bool:
    """Whether no row is better than a guess, or than the frequencies of single tokens: then there is no order."""
    weakest = {what: value for what, value in _without_learning(results).items() if not what.endswith(BIGRAMS)}
    found = (no_better({row.name: row.mean}, weakest, results.metric, results.higher_is_better) for row in rows)
    return len(rows) > 1 and all(found)


def _scale(results: Results) -> list[str]:
    """What no learning gives, for scale."""
    found = [f"{name} {decimal(value)}" for name, value in _without_learning(results).items()]
    return [f"For scale, what no learning gives: {listed(found)}."] if found else []
