"""Is the gain of a cache that is read per row the gain of a constant? A ViT on scikit-learn's digits or on MNIST.

    nice python benchmarks/constant_start.py --seeds 5 --out results/constant_start.json
    nice python benchmarks/constant_start.py --seeds 5 --mnist FOLDER --out results/constant_start.json

The written cache starts an update from a stored array, which is fixed at inference; its never-written baseline starts
from zeros. Between them stands a constant: `learned` starts every update from a parameter [Tm, Dm], trained with the
other weights and read per row, `random` from the fixed numbers of a standard deviation of 0.02 with which `learned`
begins, and `large` from those times 25, about the size of a written cache. All arms have the cache's other parameters,
and a seed's initial weights and batches. What the file has of this data is not run again.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from command import command
from torch import nn

from mnemos import registry
from mnemos.atomic import write_text
from mnemos.lab.compare.significance import correct, spread, welch
from mnemos.lab.run.provenance import provenance
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.run import Run
from mnemos.memory.gated_cache import caches

STEPS = 500
PRESETS = {"paper, per row": "paper", "mnemos": "cached"}
ARMS = ("written", "never written", "learned", "random", "large")


def recipe(preset: str, arm: str, seed: int, mnist: Path | None) -> Recipe:
    name = "mnist" if mnist else "digits"
    found: Recipe = registry.load("recipe", f"{name}-vit-{PRESETS[preset]}")()
    model: Any = found.model
    cache = replace(model.cache, read="sample", inference="transient")
    cache = cache if arm == "written" else cache.unwritten()
    data = replace(found.data, path=str(mnist)) if mnist else found.data
    train = replace(found.train, steps=STEPS, seed=seed, threads=1)
    return replace(found, data=data, model=replace(model, cache=cache), train=train)


def started(model: nn.Module, arm: str, seed: int) -> nn.Module:
    """The model, whose caches start from a parameter or from fixed numbers."""
    generator = torch.Generator().manual_seed(seed)
    for cache in caches(model):
        start = (0.5 if arm == "large" else 0.02) * torch.randn(cache.cache.shape, generator=generator)
        if arm == "learned":
            del cache.cache
            cache.cache, cache.learned = nn.Parameter(start), True
        else:
            cache.cache.copy_(start)
    return model


def accuracy(preset: str, arm: str, seed: int, mnist: Path | None) -> dict[str, float]:
    made = recipe(preset, arm, seed, mnist)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(prefix="constant-start-") as folder:
        # The model of the run's own seed, so that all arms begin with the same weights.
        probe = Run.open(made, Path(folder, "probe"), quiet=True)
        model = probe.model
        probe.close()
        assert model is not None
        if arm in ARMS[2:]:
            model = started(model, arm, seed)
        result = Run.open(made, Path(folder, "run"), model=model, quiet=True).train()
        moved = [float(cache.cache.detach().std()) for cache in caches(model)]
        return {"accuracy": result.test["accuracy"], "loss": result.test["loss"], "std of the start": max(moved)}


def main() -> None:
    parser = command(__doc__, out=Path, seeds=5)
    parser.add_argument("--mnist", type=Path, help="a folder with MNIST, in place of digits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = "mnist" if options.mnist else "digits"
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    entry = results.setdefault(data, {"steps": STEPS, "runs": {}, "provenance": provenance(0, "cpu")})
    for seed in range(options.seeds):
        for preset in PRESETS:
            for arm in ARMS:
                name = f"{preset}: {arm}"
                runs = entry["runs"].setdefault(name, {})
                if str(seed) in runs:
                    continue
                commit = provenance(seed, "cpu")["commit"]  # runs of several calls are in one file
                runs[str(seed)] = accuracy(preset, arm, seed, options.mnist) | {"commit": commit}
                print(data, seed, name, runs[str(seed)], flush=True)
                write_text(options.out, json.dumps(results, indent=2) + "\n")
    scores = {name: spread([100 * run["accuracy"] for run in runs.values()]) for name, runs in entry["runs"].items()}
    against = [("written", arm) for arm in ARMS[1:]] + [(arm, "never written") for arm in ARMS[2:]]
    pairs = [(f"{preset}: {one}", f"{preset}: {other}") for preset in PRESETS for one, other in against]
    differences = correct([welch(scores[one], scores[other]) for one, other in pairs])
    for (one, other), found in zip(pairs, differences, strict=True):
        print(f"{one} − {other}: {found}")
    entry["scores"] = {name: {"mean": score.mean, "std": score.std} for name, score in scores.items()}
    write_text(options.out, json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
