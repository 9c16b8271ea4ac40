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
    welch,
)
from mnemos.lab.tasks.no_learning import BIGRAMS, no_better

from .markup import decimal, listed, plural
from .read import Results

_SHOWN = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: NO_DIFFERENCE}


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


def _against_baselines(results: Results, rows: Sequence[Row]) -> list[str]:
    """A sentence for each row with a memory and its never-written baseline."""
    pairs = [(row, other) for other in rows for row in rows if row.name in (other.baseline_of or ())]
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
    others = [
        f"{name} ({mean_and_spread(results.row(name))}): {_shown(results, d, len(found))}" for name, d in found.items()
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
        "trained model depends on what its memory holds, and not that the memory pays."
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
