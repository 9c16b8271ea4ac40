"""Which options of the gated cache help? Variants are compared with the model without a cache, at equal training.

    python benchmarks/which_cache.py listops --seeds 4 --out runs/which-listops      half an hour on one core
    python benchmarks/which_cache.py mnist --data MNIST --seeds 3 --out runs/which-mnist

Every variant is the task's recipe with one change. `mnemos report DIR` draws the comparison, including evaluation with
caches emptied, exchanged and disabled. --result writes the table as JSON.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from mnemos import registry
from mnemos.atomic import write_json
from mnemos.lab.compare.compare import compare
from mnemos.lab.run.recipe import Recipe
from mnemos.memory.gated_cache import GRC

TASKS = {"listops": ("short-listops", "short-listops-wider", 3000), "mnist": ("mnist-vit", "mnist-vit-wider", 1200)}
VARIANTS = {
    "mnemos": GRC(),
    "paper": GRC(preset="paper"),
    "paper-shut": GRC(preset="paper", gate_init=-2.0),
    "official": GRC(preset="official"),
    "bounded-mean-frozen": GRC(read="mean", inference="frozen"),
    "bounded-mean-frozen-half": GRC(read="mean", inference="frozen", gate_init=0.0),
    "bounded-sample-frozen": GRC(inference="frozen"),
    "ratio-1": GRC(ratio=1.0),
}


def recipes(task: str, names: list[str], data: Path | None) -> list[Recipe]:
    """The recipe without a cache, the one with wider MLPs and equal parameters, and the chosen variants."""
    plain_name, wider_name, steps = TASKS[task]

    def variant(name: str, recipe: Recipe, **model: object) -> Recipe:
        recipe = replace(recipe, name=name, model=replace(recipe.model, **model))
        if data is not None:
            recipe = replace(recipe, data=replace(recipe.data, path=str(data)))
        return replace(recipe, train=replace(recipe.train, steps=steps, eval_every=steps, checkpoint_every=steps))

    plain, wider = (registry.load("recipe", name)() for name in (plain_name, wider_name))
    cached = [variant(name, plain, cache=VARIANTS[name]) for name in names]
    return [variant("plain", plain), variant("wider", wider), *cached]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    found = compare(recipes(options.task, options.variants, options.data), options.out, options.seeds)
    if options.result:
        write_json(options.result, {"task": options.task, **found})


if __name__ == "__main__":
    main()
