"""Does a cache help a small image model? Five seeds of four arms: plain, cached, as wide, and cached but never written.

    python benchmarks/small_images.py mnist-vit --data MNIST --steps 1200 [--seeds 5] [--out results/mnist_vit.json]

The first three are `mnemos compare TASK TASK-cached TASK-wider`; the fourth trains and tests the cached recipe with a
memory that stays empty, so that a row reads only what it has just written itself: what it gains is the branch's, not
the memory's. Runs that are finished in --runs are read, not trained again.
"""

import argparse
import json
import multiprocessing
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnemos import registry
from mnemos.atomic import write_json
from mnemos.config import from_dict, to_dict
from mnemos.memory.stored import StoredCache
from mnemos.train.checks import complete
from mnemos.train.compare import compare
from mnemos.train.recipe import Recipe
from mnemos.train.session import run

ARMS = ("", "-cached", "-wider")


def load(name: str, data: str | None, steps: int | None) -> Recipe:
    recipe: Recipe = registry.load("recipe", name)()
    if data:
        field = "folder" if hasattr(recipe.data, "folder") else "path"
        recipe = replace(recipe, data=replace(recipe.data, **{field: data}))
    return replace(recipe, train=replace(recipe.train, steps=steps)) if steps else recipe


def unwritten(recipe: dict[str, Any], place: str) -> None:
    """Train in a process of its own, in which no cache is ever written."""
    StoredCache.stage = lambda self, successor, rows: None  # type: ignore[method-assign]
    run(from_dict(Recipe, recipe), Path(place), quiet=True)


def never_written(recipe: Recipe, folder: Path, seeds: int) -> list[float]:
    found = []
    for seed in range(recipe.train.seed, recipe.train.seed + seeds):
        place = folder / f"seed-{seed}"
        if not (place / "result.json").is_file():
            one = complete(replace(recipe, name=folder.name, train=replace(recipe.train, seed=seed)))
            child = multiprocessing.get_context("spawn").Process(target=unwritten, args=(to_dict(one), str(place)))
            child.start()
            child.join()
        found.append(accuracy(place))
        print(f"{folder.name} seed {seed}: {found[-1]:.4f}", flush=True)
    return found


def accuracy(place: Path | str) -> float:
    return json.loads((Path(place) / "result.json").read_text())["test"]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="a small recipe's name: digits-vit, mnist-vit, cifar-pvt, photos-vit, …")
    parser.add_argument("--data", help="where its images are")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, help="where to train (runs/TASK)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.runs or Path("runs") / options.task
    recipes = [load(options.task + arm, options.data, options.steps) for arm in ARMS]
    found = compare(recipes, folder / "compared", options.seeds)
    accuracies = {
        name: [accuracy(folder / "compared" / place) for place in places] for name, places in found.pop("runs").items()
    }
    name = f"{options.task}-never-written"
    accuracies[name] = each = never_written(recipes[1], folder / name, options.seeds)
    found["never_written"] = {
        "name": name,
        "mean": statistics.mean(each),
        "std": statistics.stdev(each) if len(each) > 1 else None,
        "seeds": len(each),
    }
    found["accuracies"] = accuracies
    print(f"{name} {found['never_written']['mean']:.4f} ± {found['never_written']['std'] or 0:.4f}")
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
