"""Images byte by byte: likelihood and speed (Tables 1 and 2, the latencies), and what a model generates (Figure 3)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mnemos import registry
from mnemos.generate.fused import fused_step
from mnemos.lab.measure.decoding import whole, with_state, without_state
from mnemos.lab.report.image_grids import write_grids
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.metrics import bits
from mnemos.lab.tasks.pixels import WAYS, PixelTask, write_pictures
from mnemos.models.transformer import Transformer, TransformerConfig
from mnemos.types import InputError

from ..claim import Claim
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs, task, train_and_compare, write_report
from .recipes import LSH_ROUNDS, NAMES, PAPER, attention

Time = Callable[[int, int], float]  # (rows, position) to seconds
STEPS = 500
BATCHES = (1, 8, 64)  # tried in order, until the next size yields less than 10 % more images per second


def likelihood_and_speed(claim: Claim, options: Options) -> Finding:
    """Table 1 (MNIST) or 2 (CIFAR-10): models on the data of --data, or without it on scikit-learn's digits."""
    mnist = claim.name == "table1"
    found = Finding([], [_CONVENTION])
    if not options.recipes_only:
        _bits(found, claim, options)
        _images(found, claim, PAPER if mnist else replace(PAPER, layers=16, max_length=3071))
    found.notes.append(at_the_papers_size("mnist-pixels" if mnist else "cifar-pixels"))
    return found


def latency(claim: Claim, options: Options) -> Finding:
    """Seconds to generate one MNIST image at batch size 1 with the paper's model on this CPU."""
    table = Table(
        f"Seconds to generate one image of {PAPER.max_length} bytes, batch size 1, {torch.get_num_threads()} threads",
        ["", "seconds", "relative to linear", "paper seconds", "paper relative to linear"],
    )
    found = Finding([], [_TIMED])
    if options.recipes_only:
        return found
    found.tables.append(table)
    seconds = {name: whole(partial(time, 1), PAPER.max_length) for name, time in _ways(PAPER).items()}
    for name, value in seconds.items():
        theirs = claim.values.get(name, (None,))[0]
        ratio = None if theirs is None else theirs / claim.values["linear"][0]
        table.add(name, value, value / seconds["linear"], theirs, ratio)
    return found


_CONVENTION = (
    "bits/dim: mean negative log-likelihood per predicted byte, divided by ln 2. The first byte of a picture is given, "
    "so there are 783 predictions for MNIST and 3,071 for CIFAR-10."
)


def _bits(found: Finding, claim: Claim, options: Options) -> None:
    """Train small models that differ in their attention only, and compare their bits/dim."""
    recipes = [small_recipe(options, name) for name in NAMES]
    name, _ = task(options)
    steps = recipes[0].train.steps
    comparison = train_and_compare(options, f"pixels-{name}", recipes)
    pictures = "16 x 16 x 3" if name == "cifar" else "28 x 28" if name == "mnist" else "8 x 8"
    data: Any = recipes[0].data
    model: Any = recipes[0].model
    count = data.build().images("test")
    table = Table(
        f"Bits/dim of {count:,} test images of {name} at {pictures}: {model.layers} layers, {steps:,} updates",
        ["", "bits/dim", "minus linear", "seconds of training", "paper bits/dim", "paper minus linear"],
    )
    means = {each: row["mean"] for each, row in zip(NAMES, comparison["rows"], strict=True)}
    for each, row in zip(NAMES, comparison["rows"], strict=True):
        theirs, linear = claim.values[each][0], claim.values["linear"][0]
        ours = spread(bits(row["mean"]), None if row["std"] is None else bits(row["std"]), 1.0, 3)
        table.add(each, ours, bits(means[each] - means["linear"]), row["seconds"], theirs, theirs - linear)
    found.tables.append(table)
    found.notes += [
        "The small models predict one of 256 classes, the paper's models a mixture of logistics.",
        caution(options),
    ]
    found.runs += runs(comparison)
    found.files.append(write_report(comparison))


def small_recipe(options: Options, variant: str) -> Recipe:
    """The small recipe of images byte by byte for the data of the options, with an attention of `NAMES`."""
    name, fields = task(options)
    found: Recipe = registry.load("recipe", "digits-pixels" if name == "digits" else f"{name}-pixels-small")()
    data: Any = found.data
    data = replace(data, images=replace(data.images, **fields))
    model: Any = found.model
    return replace(
        found,
        name=f"{found.name}-{variant}",
        model=replace(model, attention=attention(variant, data.build().max_length)),
        data=data,
        train=replace(found.train, steps=options.steps or STEPS),
    )


def _images(found: Finding, claim: Claim, config: TransformerConfig) -> None:
    """Images per second of the paper's model. It is not trained, because the weights do not change the time."""
    table = Table(
        f"Images of {config.max_length} bytes per second, {torch.get_num_threads()} threads, each at its best batch of "
        f"{', '.join(map(str, BATCHES))}",
        ["", "images/s", "batch", "linear is faster by", "paper images/s", "paper linear is faster by"],
    )
    best = {name: _fastest(time, config.max_length) for name, time in _ways(config).items()}
    for name, (speed, batch) in best.items():
        theirs = claim.values[name][1] if name in claim.values else None
        ratio = None if theirs is None else claim.values["linear"][1] / theirs
        table.add(name, speed, batch, best["linear"][0] / speed, theirs, ratio)
    found.tables.append(table)
    found.notes.append(f"{_TIMED} The paper's values are from a GTX 1080 Ti.")


def _fastest(time: Time, length: int) -> tuple[float, int]:
    """Images per second at the best batch, and that batch."""
    best = 0.0, 0
    for batch in BATCHES:
        found = batch / whole(partial(time, batch), length), batch
        faster = found[0] > best[0] * 1.1
        best = max(best, found)
        if not faster:
            break
    return best


def _ways(config: TransformerConfig) -> dict[str, Time]:
    """For each way to generate: a function that times one step, given the number of rows and the position."""
    softmax, linear = built("softmax", config), built("linear", config)
    hashed = {f"lsh-{rounds}": built(f"lsh-{rounds}", config) for rounds in LSH_ROUNDS}
    stateless = {"softmax": softmax, **hashed}
    ways: dict[str, Time] = {name: partial(without_state, model, vocab_size=256) for name, model in stateless.items()}
    ways["softmax, cached"] = partial(with_state, softmax, vocab_size=256)
    ways |= {f"{name}, cached": partial(with_state, model, vocab_size=256) for name, model in hashed.items()}
    ways["linear"] = partial(with_state, linear, vocab_size=256)
    for name, model in (("softmax, cached", softmax), ("linear", linear)):
        if (step := fused_step(model)).fused:
            ways[f"{name}, fused"] = partial(with_state, model, vocab_size=256, step=step)
    return ways


def built(name: str, config: TransformerConfig) -> Transformer:
    """The model with an attention of `NAMES`, not trained."""
    torch.manual_seed(0)
    return Transformer(replace(config, attention=attention(name, config.max_length))).eval()


_TIMED = "Steps are timed at five positions of an image and interpolated linearly. Fused: mnemos.fused_step."


def at_the_papers_size(name: str) -> str:
    """A note: the commands that train the recipe `name` and the paper's other rows."""
    where = "path" if name.startswith("mnist") else "folder"
    return f"At the paper's size: mnemos train {name} (and {name}-softmax, -lsh-1, -lsh-4) --data.images.{where} FOLDER"


COUNT, COMPLETED = 24, 8


def figure3(claim: Claim, options: Options) -> Finding:
    """Figure 3 from the run in --run, or from a small model that is trained on MNIST (--data) or scikit-learn's digits.

    Writes two images, of samples and of completions. Nothing is selected; there is no number to compare.
    """
    found = Finding([], [at_the_papers_size("mnist-pixels")])
    if options.recipes_only:
        return found
    run = options.run
    if run is None:
        recipe = small_recipe(options, "linear")
        (run,) = runs(train_and_compare(options, f"pictures-{task(options)[0]}", [recipe], seeds=1))
    recipe, data, model = open_run(run)
    if not isinstance(data, PixelTask):
        raise InputError(
            f"{run}: expected a run on images byte by byte, found one on {recipe.data.name}; choose another"
        )
    folder = options.out / "figure3"
    folder.mkdir(parents=True, exist_ok=True)
    written = write_pictures(model, data, folder, COUNT, COMPLETED)
    table = Table(f"Images of {' x '.join(map(str, data.shape))} bytes that {recipe.name} generated", ["", "images"])
    table.add("samples", len(written["samples"]))
    table.add(f"half test images, completed in {WAYS} ways", len(written["originals"]))
    found.tables.append(table)
    found.files += write_grids(folder)
    found.runs.append(run)
    found.notes.append("Not selected, temperature 1, seed 0. The paper's model is trained for 250 epochs.")
    return found
