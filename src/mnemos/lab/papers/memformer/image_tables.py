"""Table 1: images byte by byte with Memformer, its ablations and the baselines."""

from dataclasses import replace
from typing import Any

import torch

from mnemos.config import ModelConfig
from mnemos.lab.measure.flops import forward_flops
from mnemos.lab.run.recipe import Recipe
from mnemos.types import InputError

from ..claim import Claim
from ..findings import Finding, Table
from ..perplexities import shape, train
from ..reproduce import Options
from ..small_runs import task
from .recipes import picture_recipe
from .table_models import PICTURES, ImageSizes, picture_variant


def table1(claim: Claim, options: Options) -> Finding:
    """Table 1: FLOPs of the paper's models; perplexities of small models on MNIST or scikit-learn's digits."""
    found = Finding([], [_COMMANDS])
    if not options.recipes_only:
        found.tables.append(_costs(claim))
        found.notes.insert(0, _COUNTED)
        _perplexities(found, claim, options)
    return found


_COUNTED = (
    "GFLOP: a multiply-add counts as 2. A picture is read from its first byte, with empty memories. The paper does not "
    "say how it counts."
)
_COMMANDS = (
    "At the paper's size: mnemos train RECIPE --data.images.path MNIST, where RECIPE is one of "
    f"{', '.join(f'mnist-{ending}' for ending in PICTURES.values())}."
)


def _costs(claim: Claim) -> Table:
    size = ImageSizes()
    table = Table("The paper's models: one picture of 784 bytes", ["", "parameters", "GFLOP", "paper GFLOP"])
    for name in PICTURES:
        model, rollout = picture_variant(name, size)
        # Memformer divides a picture into segments itself, with the same operations.
        segment = rollout.segment_length if model.name == "transformer" else 0
        theirs = claim.values[name][0] if name in claim.values else None
        table.add(name, *_cost(model, size.length, segment), theirs)
    return table


def _cost(config: ModelConfig, length: int, segment: int) -> tuple[int, float]:
    """Parameters, and GFLOP of a forward pass of `length` tokens, from shapes only; an LSTM must run to be counted."""
    with torch.device("cpu" if config.name == "lstm" else "meta"):
        model, tokens = config.build().eval(), torch.zeros(1, length, dtype=torch.int64)
        return sum(p.numel() for p in model.parameters()), forward_flops(model, tokens, segment=segment) / 1e9


def _perplexities(found: Finding, claim: Claim, options: Options) -> None:
    data = task(options)[0]
    recipes = {name: _recipe(options, name) for name in PICTURES}
    trained = train(found, options, f"table1-{data}", recipes)
    table = Table(
        f"Perplexity per byte of {data}, small models",
        ["", "model here", "perplexity", "GFLOP", "seconds of training", "paper perplexity"],
    )
    for name, recipe in recipes.items():
        row = trained.rows[name]
        theirs = claim.values[name][1] if name in claim.values else None
        table.add(name, shape(recipe), trained.perplexity(name), row["flops"] / 1e9, row["seconds"], theirs)
    found.tables.append(table)
    found.notes.append(trained.order(claim.values, 1))


def _recipe(options: Options, name: str) -> Recipe:
    data, fields = task(options)
    if data == "cifar":
        raise InputError(
            f"--data {options.data}: expected a folder with MNIST, found no MNIST files; omit --data to use digits"
        )
    found = picture_recipe(data, name)
    pixels: Any = found.data
    return replace(found, data=replace(pixels, images=replace(pixels.images, **fields)))
