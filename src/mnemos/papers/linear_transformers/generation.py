"""Table 1, Table 2 and the latencies: images byte by byte, how well they are predicted and how fast written."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mnemos import registry
from mnemos.evaluate.metrics import bits
from mnemos.evaluate.writing import whole, with_state, without_state
from mnemos.figures import report
from mnemos.models.transformer import Transformer, TransformerConfig
from mnemos.train.compare import compare
from mnemos.train.recipe import Recipe

from ..claim import Claim
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small import caution, runs, task
from .arms import ARMS, LSH_ROUNDS, attention
from .images import PAPER

STEPS = 500
BATCHES = (1, 8, 64)  # of which the best counts; without a state, where a forward is long enough by itself, the first


def table1(claim: Claim, options: Options) -> Finding:
    """Table 1: MNIST (or, without data, scikit-learn's digits)."""
    found = Finding([], [_CONVENTION])
    if not options.recipes_only:
        _bits(found, claim, options)
        _images(found, claim, PAPER, 784)
    found.notes.append(_commands("mnist-pixels"))
    return found


def cifar10(claim: Claim, options: Options) -> Finding:
    """Table 2: CIFAR-10 (with --data; without, scikit-learn's digits)."""
    found = Finding([], [_CONVENTION])
    if not options.recipes_only:
        _bits(found, claim, options)
        _images(found, claim, replace(PAPER, layers=16, max_length=3071), 3072)
    found.notes.append(_commands("cifar-pixels"))
    return found


def latency(claim: Claim, options: Options) -> Finding:
    """Seconds of one MNIST image, at batch 1, of the paper's model on this processor."""
    table = Table(
        f"Seconds to write one image of 784 bytes at batch 1, {torch.get_num_threads()} threads",
        ["", "seconds", "times linear's", "paper seconds", "paper times linear's"],
    )
    found = Finding([], ["Five places of the image are timed, and straight lines drawn between them."])
    if options.recipes_only:
        return found
    found.tables.append(table)
    seconds = {name: whole(time, 784) for name, time in _ways(PAPER, 1).items()}
    for name, value in seconds.items():
        theirs = claim.values.get(name, (None,))[0]
        ratio = None if theirs is None else theirs / claim.values["linear"][0]
        table.add(name, value, value / seconds["linear"], theirs, ratio)
    return found


_CONVENTION = (
    "bits/dim: mean negative log-likelihood of a predicted byte, by ln 2; the first byte of a picture is given, not "
    "predicted (783 predictions for MNIST, 3,071 for CIFAR-10)."
)


def _bits(found: Finding, claim: Claim, options: Options) -> None:
    """Small twins, trained here, that differ in their attention alone."""
    recipes = [_recipe(options, name) for name in ARMS]
    name, _ = task(options)
    steps = recipes[0].train.steps
    folder = options.out / "runs" / f"pixels-{name}-{steps}"
    comparison = {**compare(recipes, folder, options.seeds, quiet=True), "folder": folder}
    pictures = "16 x 16 x 3" if name == "cifar" else "28 x 28" if name == "mnist" else "8 x 8"
    table = Table(
        f"Bits/dim of {name} at {pictures}: models of {recipes[0].model.layers} layers, {steps:,} updates",  # type: ignore[attr-defined]
        ["", "bits/dim", "to linear's", "seconds of training", "paper bits/dim", "paper to linear's"],
    )
    means = {arm: row["mean"] for arm, row in zip(ARMS, comparison["rows"], strict=True)}
    for arm, row in zip(ARMS, comparison["rows"], strict=True):
        theirs, linear = claim.values[arm][0], claim.values["linear"][0]
        said = spread(bits(row["mean"]), None if row["std"] is None else bits(row["std"]), 1.0, 3)
        table.add(arm, said, bits(means[arm] - means["linear"]), row["seconds"], theirs, theirs - linear)
    found.tables.append(table)
    found.notes += ["The small models say one of 256 classes, the paper's a mixture of logistics.", caution(options)]
    found.runs += runs(comparison)
    found.files.append(report([folder], folder / "report.html"))


def _recipe(options: Options, arm: str) -> Recipe:
    name, fields = task(options)
    found: Recipe = registry.load("recipe", "digits-pixels" if name == "digits" else f"{name}-pixels-small")()
    data: Any = found.data
    model: Any = found.model
    return replace(
        found,
        name=f"{found.name}-{arm}",
        model=replace(model, attention=attention(arm)),
        data=replace(data, images=replace(data.images, **fields)),
        train=replace(found.train, steps=options.steps or STEPS),
    )


def _images(found: Finding, claim: Claim, config: TransformerConfig, length: int) -> None:
    """Images a second of the paper's model, untrained: the weights do not change the time."""
    table = Table(
        f"Images of {length} bytes a second, {torch.get_num_threads()} threads, at the best batch of "
        f"{', '.join(map(str, BATCHES))}",
        ["", "images/s", "batch", "linear is faster by", "paper images/s", "paper linear is faster by"],
    )
    best: dict[str, tuple[float, int]] = {}
    for batch in BATCHES:
        for name, time in _ways(config, batch).items():
            if batch == 1 or name in ("linear", "softmax, cached"):
                speed = batch / whole(time, length)
                best[name] = max(best.get(name, (0.0, 0)), (speed, batch))
    for name, (speed, batch) in best.items():
        theirs = claim.values[name][1]
        table.add(name, speed, batch, best["linear"][0] / speed, theirs, claim.values["linear"][1] / theirs)
    found.tables.append(table)
    found.notes.append(
        "Five places of an image are timed, and straight lines drawn between them. The paper's are a GTX 1080 Ti's."
    )


def _ways(config: TransformerConfig, batch: int) -> dict[str, Callable[[int], float]]:
    """Seconds of a step at a place, by what the model keeps."""

    def built(arm: str) -> Transformer:
        torch.manual_seed(0)
        return Transformer(replace(config, attention=attention(arm))).eval()

    softmax, linear = built("softmax"), built("linear")
    ways: dict[str, Callable[[int], float]] = {
        "softmax": partial(without_state, softmax, batch, vocab_size=256),
        "softmax, cached": partial(with_state, softmax, batch, vocab_size=256),
    }
    ways |= {f"lsh-{r}": partial(without_state, built(f"lsh-{r}"), batch, vocab_size=256) for r in LSH_ROUNDS}
    return ways | {"linear": partial(with_state, linear, batch, vocab_size=256)}


def _commands(name: str) -> str:
    where = "path" if name.startswith("mnist") else "folder"
    return f"At the paper's size: mnemos train {name} (and {name}-softmax) --data.images.{where} FOLDER"
