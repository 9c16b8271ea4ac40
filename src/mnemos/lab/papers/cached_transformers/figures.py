"""Figures 1, 4 and 5: accuracy by FLOPs, the two branches as images, and σ(λ) by layer and head."""

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.errors import plural
from mnemos.lab.compare.significance import BETTER, ONE_SEED, Difference, Spread
from mnemos.lab.evaluate.recorded import BranchMaps, Explanation
from mnemos.lab.recipes.family import altered
from mnemos.lab.report import gated_caches
from mnemos.lab.report.markup import shortened
from mnemos.lab.report.read import read_run
from mnemos.lab.report.shell import HEADS, RULE
from mnemos.types import InputError

from ..claims import PAPERS, Claim
from ..drawing import panel, panels, picture, variant
from ..experiments import mean_and_spread, train_variants, welch_holm
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import task
from .experiment import CACHED, variants
from .tables import PAPER, about, compared, costs, points, recipe

# The families of Figure 1 (one size of ViT and Swin is in Table 1), and the depths of the small PVTs of our curve.
FAMILIES = {
    "PVT": ("PVT-Tiny", "PVT-Small", "PVT-Medium"),
    "PVTv2": ("PVTv2-B2", "PVTv2-B3", "PVTv2-B4"),
    "ViT": ("ViT-S",),
    "Swin": ("Swin-T",),
}
DEPTHS = (1, 2, 4)
Curve = list[tuple[float, float]]  # FLOPs and accuracy of each model
Scores = list[tuple[float, Spread]]  # of ours the accuracy has a spread over seeds


def figure1(claim: Claim, options: Options) -> Finding:
    """Figure 1: the paper's accuracies by FLOPs counted here, and accuracies of small PVTs of three depths."""
    # --- the paper's models ---
    values = PAPERS["cached_transformers"].claim("table1").values
    columns = ["", "G", "G cached", "paper top-1", "paper top-1 cached"]
    table = Table("The paper's accuracies by FLOPs counted here", columns)
    theirs: dict[str, tuple[Curve, Curve]] = {family: ([], []) for family in FAMILIES}
    for family, names in FAMILIES.items():
        for name in names:
            plain, cached, _ = costs(name)
            table.add(name, plain.training, cached.training, *values[name][:2])
            theirs[family][0].append((plain.training, values[name][0]))
            theirs[family][1].append((cached.training, values[name][1]))
    # --- small ones: each depth without a cache, then with one ---
    finding, hosts = Finding([table]), (recipe(options, "pvt"), recipe(options, "pvt", PAPER))
    of_host: Any = hosts[0].model
    stages = len(of_host.depths)
    small = [
        altered(one, name=f"{one.name}-depth-{depth}", model={"depths": (depth,) * stages})
        for depth, one in itertools.product(DEPTHS, hosts)
    ]
    trained = compared(finding, options, "depths", {one.name: one for one in small})
    columns = ["", "M multiply-adds", "accuracy", "above the uncached curve", "p"]
    measured = finding.table(f"Test accuracy: {about(options, trained)}", columns)
    scores = {name: (row["flops"] / 2e6, trained.spread(name)) for name, row in trained.rows.items()}
    without, with_cache = list(scores.values())[::2], list(scores.values())[1::2]
    tests = above_curve(without, with_cache)
    gains = itertools.chain.from_iterable([(None, None), points(test)] for test in tests)
    for (name, (flops, _)), gain in zip(scores.items(), gains, strict=True):
        measured.add(name, flops, trained.score(name), *gain)
    finding.notes.append(how_many_are_above(tests))
    ours = _curve(without), _curve(with_cache)
    # --- the picture ---
    paper = ("The paper: ImageNet-1k top-1, %", "10⁹ multiply-adds, counted here")
    here = ("Here: test accuracy, %", "10⁶ multiply-adds")
    with panels(options.out / "figure1.png", paper, here, size=(10.0, 5.0)) as (left, right):
        mine = {hosts[0].name: ours}
        for axes, curves, first in ((left, theirs, 0), (right, mine, len(theirs))):
            for i, (name, (plain_curve, cached_curve)) in enumerate(curves.items(), first):
                axes.plot(*zip(*plain_curve, strict=True), **variant(i), linestyle="--", label=name)
                axes.plot(*zip(*cached_curve, strict=True), **variant(i), label=f"{name}, cached")
    finding.files.append(options.out / "figure1.png")
    return finding


def _curve(scores: Scores) -> Curve:
    return [(flops, 100 * score.mean) for flops, score in scores]


def above_curve(plain: Scores, cached: Scores) -> list[Difference]:
    """Each cached model minus the uncached curve at its own FLOPs, by Welch's test; p corrected by Holm.

    A cached model has more FLOPs than the uncached one of its size. The curve is straight between two models, and
    constant beyond its ends; between them its spread is that of the weighted sum of both.
    """
    flops, scores = zip(*sorted(plain), strict=True)

    def curve(x: float) -> Spread:
        weights = [float(np.interp(x, flops, one)) for one in np.eye(len(flops))]
        std = math.hypot(*(weight * score.std for weight, score in zip(weights, scores, strict=True) if weight))
        mean = sum(weight * score.mean for weight, score in zip(weights, scores, strict=True))
        return Spread(mean, std, scores[0].seeds)

    return welch_holm((score, curve(x)) for x, score in cached)


def how_many_are_above(tests: list[Difference]) -> str:
    """A sentence: how many cached models are above the uncached curve, and of how many the seeds show it."""
    count = sum(test.difference > 0 for test in tests)
    shown = sum(test.finding(higher_is_better=True) == BETTER for test in tests)
    seeds = f"{shown} of them are shown to be (p < .05, Welch, Holm)" if any(t.interval for t in tests) else ONE_SEED
    by = "the uncached curve by FLOPs, which is constant beyond its ends"
    return f"{count} of {len(tests)} cached models are above {by}; {seeds}. The paper: all."


def figure4(claim: Claim, options: Options) -> Finding:
    """Figure 4: o_self and o_mem of a cached ViT for test pictures, and how their maps correlate over seeds."""
    explained = _explained(options, "vit")
    run, explanation = explained[0]
    if (pictures := explanation.pictures) is None:
        raise InputError(
            f"{run}: expected a run with gated caches on images, found none ({explanation.left}); choose another run "
            "with --run"
        )
    # --- the table: means over pictures, then over seeds ---
    layers = explanation.layers
    names = dict(zip((one.name for one in layers), shortened([one.name for one in layers]), strict=True))
    columns = ["layer", "mean σ(λ)", "share by size", "correlation", "correlation, sd"]
    table = Table(f"The two branches for the same test pictures, {plural(len(explained), 'seed')}", columns)
    mapped = [i for i, layer in enumerate(layers) if isinstance(layer.maps, BranchMaps)]
    for i in mapped:
        of_seeds: list[Any] = [one.layers[i] for _, one in explained]
        share = statistics.fmean(gate for one in of_seeds for gate in one.share)
        weight = statistics.fmean(one.maps.weight for one in of_seeds)
        correlations = [statistics.fmean(one.maps.correlation) for one in of_seeds]
        table.add(names[layers[i].name], share, weight, *mean_and_spread(correlations))
    middle = layers[explanation.middle if explanation.middle is not None else mapped[len(mapped) // 2]]
    note = (
        f"{names[middle.name]} is the middle layer; the picture is of the first seed. Correlation: between the two "
        "maps of a picture, mean over pictures. It is negative if the branches complement each other, as the paper "
        "concludes from its figure."
    )
    # --- the picture: a row of test pictures, and the maps of the two branches below ---
    assert middle.self_map is not None
    assert middle.memory_map is not None
    rows: dict[str, Any] = {
        "": pictures.pixels,
        f"{names[middle.name]}\no_self": [gated_caches.grey(one) for one in middle.self_map],
        f"{names[middle.name]}\no_mem": [gated_caches.grey(one) for one in middle.memory_map],
    }
    count = len(pictures.pixels)
    path = options.out / "figure4.png"
    with picture(path, (10.0, 1.0 + 28.0 / count)) as figure:
        grid = figure.subplots(3, count, squeeze=False)
        for line, (name, images) in zip(grid, rows.items(), strict=True):
            for axes, image in zip(line, images, strict=True):
                grey = image[..., 0] if image.shape[-1] == 1 else image
                axes.imshow(grey, cmap="gray", vmin=0, vmax=255, interpolation="none")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            line[0].set_ylabel(name)
        for i, axes in enumerate(grid[0]):
            axes.set_title(gated_caches.classes(pictures, i), loc="center", fontsize=7.5)
    return Finding([table], [note], [path], [one for one, _ in explained])


def figure5(claim: Claim, options: Options) -> Finding:
    """Figure 5: σ(λ) by layer and head of a cached ViT and, of digits and MNIST, a cached PVT, over seeds."""
    hosts = ("vit",) if options.run or task(options)[0] == "cifar" else ("vit", "pvt")
    of_hosts = [_explained(options, host) for host in hosts]
    finding, path = Finding(runs=[run for each in of_hosts for run, _ in each]), options.out / "figure5.png"
    with picture(path) as figure:
        row = figure.subplots(1, len(of_hosts), squeeze=False)[0]
        for explained, axes in zip(of_hosts, row, strict=True):
            # --- the table of a model, over its seeds ---
            run, explanation = explained[0]
            layers, recorded = explanation.layers, read_run(run, run.name).recipe
            name, cache = recorded["name"], recorded["model"].get("cache") or {}
            # Hosts before mix="heads", and without it, have a gate for each group of channels behind the projection.
            by_head = cache.get("mix") == "heads" or "image" not in recorded["model"]
            gated, seeds = "head" if by_head else "group of channels", plural(len(explained), "seed")
            columns = ["layer", "mean", "mean, sd", "minimum", "maximum"]
            table = finding.table(f"σ(λ) of {name}, {seeds}, a gate per {gated}", columns)
            for i, called in enumerate(shortened([layer.name for layer in layers])):
                shares = [one.layers[i].share for _, one in explained]
                means = mean_and_spread([statistics.fmean(share) for share in shares])
                table.add(called, *means, min(map(min, shares)), max(map(max, shares)))
            above = [sum(statistics.fmean(layer.share) > 0.5 for layer in one.layers) for _, one in explained]
            finding.notes.append(
                f"{name}: mean σ(λ) > 0.5 in {', '.join(map(str, above))} of {len(layers)} layers ({seeds}). The "
                "paper: in more than half."
            )
            # --- its panel: a point per gate of the first seed ---
            panel(axes, f"σ(λ), {name}", "cached layer")
            axes.set(ylim=(0, 1), xticks=range(len(layers)), xlim=(-0.5, len(layers) - 0.5))
            axes.axhline(0.5, color=RULE[0])
            for i, layer in enumerate(layers):
                colours = [HEADS[h % len(HEADS)][0] for h in range(len(layer.share))]
                axes.scatter([i] * len(layer.share), layer.share, s=64, c=colours)
    finding.files.append(path)
    return finding


def _explained(options: Options, host: str) -> list[tuple[Path, Explanation]]:
    """The run of --run, or a run for each seed of the host with the paper's cache; each with what its caches do.

    Of CIFAR-10's ViT they are the runs of the claim `experiment`, in its folder.
    """
    if options.run is not None:
        runs = [options.run]
    elif task(options)[0] == "cifar":
        runs = train_variants(Finding(), options, {CACHED: variants(options)[CACHED]}).runs[CACHED]
    else:
        runs = compared(Finding(), options, host, {host: recipe(options, host, PAPER)}).runs[host]
    explained = []
    for run in runs:
        explanation = read_run(run, str(run)).explained
        if explanation is None or not explanation.layers:
            raise InputError(
                f"{run}: expected a run with gated caches, found none in its model; choose another run with --run"
            )
        explained.append((run, explanation))
    return explained
