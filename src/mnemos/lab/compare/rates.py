"""Learning rates of a comparison: each recipe has the rate with the best score on the validation split.

    rate* = argbest_rate  valid(recipe, rate, first seed),   then the other seeds at rate* only

The test split has no part in the choice, and only the runs at the chosen rate are reported.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.types import InputError

from .runs import Planned, RunsLeft, train_several


@dataclass(frozen=True)
class Sweep:
    """The scores of one recipe on the validation split by learning rate: {rate: score; None for a run that failed}."""

    scores: Mapping[float, float | None]
    higher_is_better: bool

    @property
    def best(self) -> float | None:
        """The rate of the best score, the first of equal ones; None if every run failed."""
        found = {rate: score for rate, score in self.scores.items() if score is not None}
        choose = max if self.higher_is_better else min
        return choose(found, key=found.__getitem__) if found else None

    @property
    def at_an_end(self) -> bool:
        """Whether the best of several rates is the lowest or the highest, and none between them is as good."""
        best = self.best
        if best is None or len(self.scores) < 2:
            return False
        ends = (min(self.scores), max(self.scores))
        return all(rate in ends for rate, score in self.scores.items() if score == self.scores[best])


def check_rates(rates: Sequence[float]) -> None:
    """Raise InputError unless there are rates above 0 that differ in the two digits that name their folders."""
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise InputError(f"--rates: expected learning rates above 0, found {list(rates)}; such as 1e-3,1e-2")
    if len({f"{rate:.1e}" for rate in rates}) < len(rates):
        raise InputError(f"--rates: expected rates that differ in two digits, found {list(rates)}; leave some out")


def read_rates(text: str) -> tuple[float, ...]:
    """The rates of a list such as 1e-3,1e-2. Raises InputError if they are no numbers."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError(f"--rates: expected numbers such as 1e-3,1e-2, found {text!r}; see --help") from None


def at_rate(recipe: Recipe, rate: float) -> Recipe:
    """The recipe with another learning rate."""
    return replace(recipe, optim=replace(recipe.optim, lr=rate))


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed."""
    return replace(recipe, train=replace(recipe.train, seed=seed))


def place_at_rate(folder: Path, recipe: Recipe) -> Path:
    """The folder of a run of a sweep: folder/RECIPE/RATE/seed-N."""
    return folder / recipe.name / f"{recipe.optim.lr:.1e}" / f"seed-{recipe.train.seed}"


def sweep(
    recipes: Sequence[Recipe],
    rates: Sequence[float],
    folder: Path,
    jobs: int = 1,
    left: RunsLeft | None = None,
    *,
    tell: bool = True,
) -> dict[str, Sweep]:
    """Train each recipe once with each rate and its own seed; {name: scores on the validation split}.

    The runs are in the folders `place_at_rate`, `jobs` at a time. A run that fails, for example because its loss is
    not finite, is reported and counts as worse than any score. Finished runs are read again. left, tell: see
    `train_several`.
    """
    check_rates(rates)
    runs = [at_rate(recipe, rate) for rate in rates for recipe in recipes]
    train_several([(run, place_at_rate(folder, run)) for run in runs], jobs, tell=tell, keep_going=True, left=left)
    found = {}
    for recipe in recipes:
        places = {rate: place_at_rate(folder, at_rate(recipe, rate)) for rate in rates}
        directions = {d for place in places.values() if (d := _higher_is_better(place)) is not None}
        scores = {rate: valid_score(place) for rate, place in places.items()}
        found[recipe.name] = Sweep(scores, directions.pop() if directions else True)
    return found


def at_best_rates(recipes: Sequence[Recipe], sweeps: Mapping[str, Sweep], seeds: int, folder: Path) -> list[Planned]:
    """The runs that are reported: each recipe at its best rate, with its own seed and those after it.

    They are ordered by seed. The runs with the recipes' own seeds are those of the sweep. A recipe whose runs all
    failed is left out.
    """
    found = []
    for offset in range(seeds):
        for recipe in recipes:
            if (rate := sweeps[recipe.name].best) is not None:
                run = with_seed(at_rate(recipe, rate), recipe.train.seed + offset)
                found.append((run, place_at_rate(folder, run)))
    return found


def valid_score(place: Path) -> float | None:
    """The score of a finished run on the validation split; None for a run that failed."""
    if not Result.exists(place):
        return None
    result = Result.read(place)
    value = result.valid[result.metric]
    return value if math.isfinite(value) else None


def _higher_is_better(place: Path) -> bool | None:
    if not Result.exists(place):
        return None
    result = Result.read(place)
    higher: bool = result.description(result.metric, place)["higher_is_better"]
    return higher


def end_warning(sweeps: Mapping[str, Sweep]) -> str | None:
    """One line that names the recipes whose best rate is at an end of the sweep; None if there is none."""
    names = [f"{name} ({one.best:.1e})" for name, one in sweeps.items() if one.at_an_end]
    return f"the best learning rate is at an end of the sweep: {', '.join(names)}; widen --rates" if names else None
