"""Which runs a comparison trains: every recipe with every seed, each at the learning rate that suits it best.

    rate* = argbest_rate  valid(recipe, rate, first seed),   then the other seeds at rate* only

The test split has no part in the choice. Runs alternate between recipes, so a machine that becomes slower affects all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mnemos.errors import say
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.types import InputError

from .processes import Count, Planned, train_several


@dataclass(frozen=True)
class Sweep:
    """The scores of one recipe on the validation split by learning rate: {rate: score; None for a run that failed}."""

    scores: Mapping[float, float | None]
    higher_is_better: bool

    @property
    def best(self) -> float | None:
        """The rate of the best score, the first of equal ones; None if every run failed."""
        finite = {rate: score for rate, score in self.scores.items() if score is not None}
        choose = max if self.higher_is_better else min
        return choose(finite, key=finite.__getitem__) if finite else None


@dataclass(frozen=True)
class Trained:
    """The folders of the runs that are reported, by recipe, and the sweeps of learning rates that chose them."""

    runs: dict[str, list[Path]]
    sweeps: dict[str, Sweep]


def train(
    recipes: Sequence[Recipe],
    folder: Path,
    seeds: int,
    rates: Sequence[float] = (),
    jobs: int = 1,
    *,
    quiet: bool = True,
    tell: bool = True,
    keep_going: bool = False,
) -> Trained:
    """Train every recipe with its own seed and those after it, in folder/RECIPE/seed-N, or continue the runs there.

    rates: each recipe is first trained with each, in folder/RECIPE/RATE/seed-N; a run that fails there counts as worse
    than any score. keep_going: a recipe that fails with every rate, and a later seed that fails, are left out. quiet,
    tell: see `train_several`, which says what is raised; also TrainingFailed if a recipe, or with keep_going every
    recipe, fails with every rate.
    """
    count = Count(len(recipes) * (max(1, len(rates)) + seeds - 1))
    sweeps, chosen = dict[str, Sweep](), list(recipes)

    def planned(run: Recipe) -> Planned:
        rate = [f"{run.optim.lr:.1e}"] if rates else []
        return run, folder.joinpath(run.name, *rate, f"seed-{run.train.seed}")

    # --- the first seed at each rate: its best on the validation split is the recipe's ---
    if rates:
        swept = {one.name: [planned(at_rate(one, rate)) for rate in rates] for one in recipes}
        in_turn = [runs[i] for i in range(len(rates)) for runs in swept.values()]
        train_several(in_turn, jobs, tell=tell, keep_going=True, count=count)
        for name, runs_of_one in swept.items():
            scores = {run.optim.lr: _valid_score(path) for run, path in runs_of_one}
            ended = [(Result.read(path), path) for _, path in runs_of_one if Result.exists(path)]
            higher = all(result.description(result.metric, path)["higher_is_better"] for result, path in ended)
            sweeps[name] = Sweep(scores, higher)
        failed = [name for name, one in sweeps.items() if one.best is None]
        if failed and (not keep_going or len(failed) == len(sweeps)):
            raise TrainingFailed(f"{folder / failed[0]}: the run failed with every learning rate; give other --rates")
        count.all -= len(failed) * (seeds - 1)
        chosen = [at_rate(one, best) for one in recipes if (best := sweeps[one.name].best) is not None]
        for one in chosen if tell else ():
            end = f", and {end}" if (end := at_end(one.optim.lr, rates)) else ""
            say(f"{one.name}: learning rate {one.optim.lr:.1e}, the best of {len(rates)} on the validation split{end}")

    # --- the other seeds; of a sweep the first is trained already ---
    seeded = [replace(one, train=replace(one.train, seed=one.train.seed + i)) for i in range(seeds) for one in chosen]
    every = list(map(planned, seeded))
    later = every[len(chosen) if rates else 0 :]
    train_several(later, jobs, quiet=quiet, tell=tell, keep_going=keep_going, count=count)
    runs: dict[str, list[Path]] = {one.name: [] for one in chosen}
    for run, path in every:
        if not keep_going or _valid_score(path) is not None:
            runs[run.name].append(path)
    return Trained(runs, sweeps)


def at_end(rate: float, rates: Sequence[float]) -> str:
    """Where the chosen rate is at an end of the sweep, so that the best one may be beyond it: "the highest tried"."""
    if len(rates) < 2 or min(rates) < rate < max(rates):
        return ""
    return f"the {'highest' if rate == max(rates) else 'lowest'} tried"


def at_rate(recipe: Recipe, rate: float) -> Recipe:
    """The recipe with another learning rate."""
    return replace(recipe, optim=replace(recipe.optim, lr=rate))


def _valid_score(folder: Path) -> float | None:
    if not Result.exists(folder):
        return None
    result = Result.read(folder)
    value = result.valid[result.metric]
    return value if math.isfinite(value) else None


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
