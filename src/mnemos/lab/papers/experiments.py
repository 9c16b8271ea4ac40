"""An experiment on a paper's claim: arms over seeds, the difference to each control, and the power that the seeds had.

    δ = |e| / √((s₁² + s₂²)/n)      f = (n − 1)·(s₁² + s₂²)² / (s₁⁴ + s₂⁴)
    power = P(|T| > t(97.5 %, f)),  T noncentral t with f degrees of freedom and noncentrality δ

is the probability that Welch's test of n seeds each shows a true difference e at level 5 %, two-sided, where s₁ and s₂
are the standard deviations of single runs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mnemos.lab.compare.significance import (
    BETTER,
    LEVEL,
    NO_DIFFERENCE,
    WORSE,
    Difference,
    Scored,
    Spread,
    correct,
    spread,
    welch,
)
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.types import JSONObject

from .findings import Cell, Finding, Table
from .reproduce import Options
from .small_runs import runs, runs_of, train_and_compare, write_report

POWER = 0.8
MOST_SEEDS = 1000  # counts of seeds beyond it are not searched
Values = Mapping[str, Sequence[float]]  # by the name of an arm: one value a seed


@dataclass(frozen=True)
class Measure:
    """What an experiment is judged by. unit: its name and unit in tables; score: of a finished run."""

    unit: str
    score: Callable[[Result], float]
    higher_is_better: bool


def power(effect: float, one: Scored, other: Scored, seeds: int) -> float:
    """The power for a true difference `effect` of `seeds` runs each, with the standard deviations of two arms.

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
    """The fewest seeds of each arm with `POWER` for a difference `effect`; None: no spread, or above `MOST_SEEDS`."""
    if math.isnan(power(effect, one, other, 2)):
        return None
    return next((n for n in range(2, MOST_SEEDS + 1) if power(effect, one, other, n) >= POWER), None)


def differences(scores: Mapping[str, Spread], arm: str, controls: Iterable[str]) -> dict[str, Difference]:
    """`arm` minus each control by Welch's test, p corrected over the controls by Holm."""
    names = list(controls)
    return dict(zip(names, correct([welch(scores[arm], scores[name]) for name in names]), strict=True))


def train_arms(found: Finding, options: Options, name: str, arms: Mapping[str, Recipe]) -> JSONObject:
    """Train the recipes of all arms, one thread each, with the seeds of the options; add runs and report to `found`.

    The folder is options.out/runs/NAME-STEPS, with RECIPE/seed-N below it; what is finished there is not trained again.
    """
    recipes = [replace(one, train=replace(one.train, threads=1)) for one in arms.values()]
    comparison = train_and_compare(options, name, recipes)
    found.runs += runs(comparison)
    found.files.append(write_report(comparison))
    return comparison


def add_tables(
    found: Finding,
    arms: Mapping[str, Recipe],
    comparison: JSONObject,
    measure: Measure,
    controls: Mapping[str, float | None],
    extra: Mapping[str, Values] = {},
) -> None:
    """Add the tables of an experiment to `found`: arms, differences to the controls, and the score of each seed.

    Minutes are those of the training as measured, with what else the machine did.

    controls: the arms that the first one is tested against, each with the effect whose power is given, first arm minus
    control, in the unit of the scores: the paper's difference. None: no power.

    extra: further columns of the arms' table, by their titles; arms without values have a dash. An interval or a power
    needs two seeds or more.
    """
    places = {arm: runs_of(comparison, recipe) for arm, recipe in arms.items()}
    values = {arm: [measure.score(Result.read(place)) for place in every] for arm, every in places.items()}
    rows = dict(zip(arms, comparison["rows"], strict=True))
    minutes = {arm: row["seconds"] / 60 for arm, row in rows.items()}  # the mean over seeds
    seeds = len(next(iter(values.values())))
    first = next(iter(arms.values()))
    title = f"{first.train.steps:,} updates of {first.train.batch_size}, {seeds} seed{'s' * (seeds > 1)}"
    title += f", {seeds * sum(minutes.values()):.0f} minutes in all"
    costs = ["parameters", "training TFLOP", "minutes per run"]
    added = [part for name in extra for part in (name, f"{name}, sd")]
    table = Table(f"Arms: {title}", ["", measure.unit, "sd", *costs, *added])
    for arm in arms:
        more: list[Cell] = []
        for each in extra.values():
            more += mean_and_spread(each.get(arm, ()))
        own = mean_and_spread(values[arm])
        row = rows[arm]
        table.add(arm, *own, int(row["parameters"]), row["train_flops"] / 1e12, minutes[arm], *more)
    minus = differences_table(values, measure.unit, measure.higher_is_better, controls)
    found.tables += [table, minus, _seeds_table(values, places)]
    found.notes.append(_EXPLAINED)


def mean_and_spread(values: Sequence[float]) -> tuple[Cell, Cell]:
    """The mean and the standard deviation over seeds as cells; None for what there is not."""
    mean, std, count = spread(values)
    return (mean if count else None), _finite(std)


def _finite(value: float) -> Cell:
    return value if math.isfinite(value) else None


def differences_table(values: Values, unit: str, higher_is_better: bool, controls: Mapping[str, float | None]) -> Table:
    """The first arm minus each of its controls; see `add_tables`."""
    scores = {arm: spread(every) for arm, every in values.items()}
    arm = next(iter(scores))
    table = Table(
        f"{arm} minus each control, {unit}",
        ["minus", "difference", "from", "to", "p", "p (Holm)", "shown", "effect", "power", "seeds for .8"],
    )
    for name, difference in differences(scores, arm, controls).items():
        low, high = difference.interval or (None, None)
        effect = controls[name]
        table.add(
            name,
            difference.difference,
            low,
            high,
            _finite(difference.p),
            _finite(difference.p_holm),
            _SHOWN[difference.finding(higher_is_better)],
            effect,
            *((None, None) if effect is None else _powers(effect, scores[arm], scores[name])),
        )
    return table


_SHOWN = {BETTER: "better", WORSE: "worse", NO_DIFFERENCE: "no", "": "–"}


def _powers(effect: float, one: Spread, other: Spread) -> tuple[Cell, Cell]:
    """The power that the seeds had for a difference, and the seeds that would have `POWER`."""
    had = _finite(power(effect, one, other, min(one.seeds, other.seeds)))
    needed = seeds_needed(effect, one, other)
    return had, f"> {MOST_SEEDS:,}" if needed is None and had is not None else needed


def _seeds_table(values: Values, places: Mapping[str, Sequence[object]]) -> Table:
    """The score of each run, so that the other tables can be computed again."""
    table = Table("Each seed", ["seed", *values])
    for i, place in enumerate(next(iter(places.values()))):
        table.add(str(place).rpartition("-")[2], *(every[i] for every in values.values()))
    return table


_EXPLAINED = (
    "Differences: Welch's test, 95 % interval (not corrected), p corrected by Holm over the differences of the table. "
    "Effect: the paper's difference. Power: the probability that as many seeds show a true difference of its size, at "
    "level 5 %, two-sided, with the standard deviations of these runs; beside it the seeds of an arm that make it .8. "
    "Both are optimistic: a difference is shown only below 5 % after Holm, and the standard deviations of a few seeds "
    "are rough. No difference shown is not equality."
)
