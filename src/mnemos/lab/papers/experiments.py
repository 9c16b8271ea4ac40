"""An experiment on a paper's claim: variants over seeds, the difference to each control, and the power of the seeds.

    δ = |e| / √((s₁² + s₂²)/n)      f = (n − 1)·(s₁² + s₂²)² / (s₁⁴ + s₂⁴)
    power = P(|T| > t(97.5 %, f)),  T noncentral t with f degrees of freedom and noncentrality δ

is the probability that Welch's test of n seeds each shows a true difference e at level 5 %, two-sided, where s₁ and s₂
are the standard deviations of single runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from mnemos.lab.compare import significance
from mnemos.lab.compare.significance import BETTER, LEVEL, NO_DIFFERENCE, WORSE, Difference, Scored
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe

from .findings import Cell, Finding, Table
from .reproduce import Options
from .small_runs import Trained, task, train

POWER = 0.8
MOST_SEEDS = 1000  # counts of seeds beyond it are not searched
Scores = Mapping[str, Sequence[float]]  # by the name of a variant: one value a seed
_SHOWN = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "no", "": "–"}
_EXPLAINED = (
    "Differences: Welch's test, 95 % interval (not corrected), p corrected by Holm over the differences of the table. "
    "Effect: the paper's difference. Power: the probability that as many seeds show a true difference of its size, at "
    "level 5 %, two-sided, with the standard deviations of these runs; beside it the seeds of an arm that make it .8. "
    "Both are optimistic: a difference is shown only below 5 % after Holm, and the standard deviations of a few seeds "
    "are rough. No difference shown is not equality."
)


def power(effect: float, one: Scored, other: Scored, seeds: int) -> float:
    """The power for a true difference `effect` of `seeds` runs each, with the standard deviations of two variants.

    NaN without a spread (fewer than two values, a value that is not finite, or equal values of both).
    """
    a, b = one.std**2, other.std**2
    if seeds < 2 or not (math.isfinite(a + b) and a + b > 0):
        return math.nan
    from scipy import stats

    freedom = (seeds - 1) * (a + b) ** 2 / (a**2 + b**2)
    noncentrality = abs(effect) / math.sqrt((a + b) / seeds)
    bound = stats.t.ppf(1 - LEVEL / 2, freedom)
    far = float(stats.nct.cdf(-bound, freedom, noncentrality))  # SciPy has NaN for some tails below 1e-15
    return float(stats.nct.sf(bound, freedom, noncentrality)) + (0.0 if math.isnan(far) else far)


def seeds_needed(effect: float, one: Scored, other: Scored) -> int | None:
    """The fewest seeds of each with `POWER` for a difference `effect`; None: no spread, or above `MOST_SEEDS`."""
    if math.isnan(power(effect, one, other, 2)):
        return None
    return next((n for n in range(2, MOST_SEEDS + 1) if power(effect, one, other, n) >= POWER), None)


def welch_holm(pairs: Iterable[tuple[Scored, Scored]]) -> list[Difference]:
    """One minus other of each pair by Welch's test, p corrected over the pairs by Holm."""
    return significance.correct([significance.welch(*pair) for pair in pairs])


def add_differences(
    finding: Finding, options: Options, scores: Mapping[str, list[float]], pairs: Sequence[tuple[str, str]]
) -> None:
    """A table of Welch's test of each pair of rows, the first minus the second, where there are several seeds."""
    if options.seeds == 1:
        return
    spreads = {name: significance.spread(values) for name, values in scores.items()}
    tests = welch_holm((spreads[one], spreads[other]) for one, other in pairs)
    columns = ["", "difference", "from", "to", "p"]
    table = finding.table("Differences of perplexity, 95 %; p by Holm over the table", columns)
    for (one, other), test in zip(pairs, tests, strict=True):
        interval = test.interval or (None, None)
        table.add(f"{one} minus {other}", test.difference, *interval, finite(test.p_holm))


def train_variants(finding: Finding, options: Options, variants: Mapping[str, Recipe]) -> Trained:
    """Train the recipes of all variants, one thread each, with the seeds of the options."""
    recipes = {name: altered(one, train={"threads": 1}) for name, one in variants.items()}
    return train(finding, options, f"experiment-{task(options)[0]}", recipes)


def add_tables(
    finding: Finding,
    first: Recipe,
    trained: Trained,
    unit: str,
    score: Callable[[Result], float],
    higher_is_better: bool,
    controls: Mapping[str, float | None],
    extra: Mapping[str, Scores] = {},
) -> None:
    """Add the tables of an experiment: its variants, differences to the controls, and the score of each seed.

    first: the recipe of the first variant. unit: of the score, as tables name it. controls: the variants that the first
    one is tested against, each with the effect whose power is told, first minus control, in the unit of the scores: the
    paper's difference; None: no power. extra: further columns of the table of variants, by their titles. Minutes are
    those of the training as measured, with what else the processor did.
    """
    values = {name: [score(one) for one in trained.results(name)] for name in trained.runs}
    seeds = len(next(iter(values.values())))
    minutes = {name: row["seconds"] / 60 for name, row in trained.rows.items()}  # the mean over seeds
    title = f"Arms: {first.train.steps:,} updates of {first.train.batch_size}, {seeds} seed{'s' * (seeds > 1)}"
    costs = ["parameters", "training TFLOP", "minutes per run"]
    table = Table(
        f"{title}, {seeds * sum(minutes.values()):.0f} minutes in all",
        ["", unit, "sd", *costs, *(part for name in extra for part in (name, f"{name}, sd"))],
    )
    for name, row in trained.rows.items():
        more = [cell for each in extra.values() for cell in mean_and_spread(each.get(name, ()))]
        flops = row["train_flops"] / 1e12
        table.add(name, *mean_and_spread(values[name]), int(row["parameters"]), flops, minutes[name], *more)
    every = Table("Each seed", ["seed", *values])  # so that the other tables can be computed again
    for i, run in enumerate(next(iter(trained.runs.values()))):
        every.add(str(run).rpartition("-")[2], *(each[i] for each in values.values()))
    finding.tables += [table, differences_table(values, unit, higher_is_better, controls), every]
    finding.notes.append(_EXPLAINED)


def mean_and_spread(values: Sequence[float]) -> tuple[Cell, Cell]:
    """The mean and the standard deviation over seeds as cells; None for what there is not."""
    mean, std, count = significance.spread(values)
    return (mean if count else None), finite(std)


def finite(value: float) -> Cell:
    """The value as a cell; None for NaN and infinity."""
    return value if math.isfinite(value) else None


def differences_table(values: Scores, unit: str, higher_is_better: bool, controls: Mapping[str, float | None]) -> Table:
    """The first variant minus each of its controls; see `add_tables`."""
    scores = {name: significance.spread(each) for name, each in values.items()}
    first = next(iter(scores))
    table = Table(
        f"{first} minus each control, {unit}",
        ["minus", "difference", "from", "to", "p", "p (Holm)", "shown", "effect", "power", "seeds for .8"],
    )
    tests = welch_holm((scores[first], scores[name]) for name in controls)
    for (name, effect), tested in zip(controls.items(), tests, strict=True):
        low, high = tested.interval or (None, None)
        both = scores[first], scores[name]
        powers: tuple[Cell, Cell] = (None, None)
        if effect is not None:
            powered = finite(power(effect, *both, min(one.seeds for one in both)))
            enough = seeds_needed(effect, *both)
            powers = powered, f"> {MOST_SEEDS:,}" if enough is None and powered is not None else enough
        p = finite(tested.p), finite(tested.p_holm)
        shown = _SHOWN[tested.finding(higher_is_better)]
        table.add(name, tested.difference, low, high, *p, shown, effect, *powers)
    return table
