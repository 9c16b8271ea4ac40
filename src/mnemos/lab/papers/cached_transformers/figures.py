"""Figures 1, 4 and 5: accuracy by FLOPs, the two branches as images, and σ(λ) by layer and head."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemos.lab.evaluate.explain import explain
from mnemos.lab.evaluate.recorded import BranchMaps, CachedLayer, Explanation, Pictures
from mnemos.lab.report import gated_caches, report
from mnemos.lab.report.markup import shortened
from mnemos.lab.report.read import read_run
from mnemos.lab.report.style import HEADS, INK, MUTED, RULE
from mnemos.lab.run.trained import open_run
from mnemos.types import InputError

from ..claim import Claim
from ..drawing import png, raster_image, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, runs
from . import comparisons
from .claims import CACHED_TRANSFORMERS
from .image_tables import commands, costs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The families of Figure 1 (one size of ViT and Swin is in Table 1), and the depths of the small PVTs of our curve.
FAMILIES = {
    "PVT": ("PVT-Tiny", "PVT-Small", "PVT-Medium"),
    "PVTv2": ("PVTv2-B2", "PVTv2-B3", "PVTv2-B4"),
    "ViT": ("ViT-S",),
    "Swin": ("Swin-T",),
}
DEPTHS = (1, 2, 4)
# In units of one image: the class names above the pictures, the gap between columns, between the two maps of a layer,
# and before each layer.
TOP, GAP, BETWEEN, BEFORE = 0.36, 0.12, 0.06, 0.26
_BOX = (0.11, 0.02, 0.88, 0.96)  # the area of the images in figure4.png, as shares of the figure


def figure1(claim: Claim, options: Options) -> Finding:
    """Figure 1: the paper's accuracies by FLOPs counted here, and accuracies of small PVTs of three depths."""
    about = commands([name for names in FAMILIES.values() for name in names])
    if options.recipes_only:
        return Finding([], [about])
    values = CACHED_TRANSFORMERS.claim("table1").values
    table = Table(
        "The paper's accuracies by FLOPs counted here", ["", "G", "G cached", "paper top-1", "paper top-1 cached"]
    )
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for family, names in FAMILIES.items():
        curves[family] = [[], []]
        for name in names:
            plain, cached, _ = costs(name)
            table.add(name, plain.training, cached.training, *values[name][:2])
            for curve, one, accuracy in zip(curves[family], (plain, cached), values[name], strict=False):
                curve.append((one.training, accuracy))
    comparison = comparisons.trained(options, "depths", _depths(options))
    measured = Table(f"Test accuracy: {comparisons.about(options, comparison)}", ["", "M multiply-adds", "accuracy"])
    ours: list[list[tuple[float, float]]] = [[], []]
    for i, row in enumerate(comparison["rows"]):
        measured.add(row["name"], row["flops"] / 2e6, comparisons.accuracy(comparison, i))
        ours[i % 2].append((row["flops"] / 2e6, 100 * row["mean"]))
    panels = [curves, {comparisons.recipe(options, "pvt").name: ours}]
    path = png(options.out / "figure1.png", (10.0, 4.2), partial(_lay_out, panels))
    return Finding([table, measured], [about, _above(ours), caution(options)], [path], runs(comparison))


def figure4(claim: Claim, options: Options) -> Finding:
    """Figure 4: o_self and o_mem of a cached ViT for test pictures."""
    if options.recipes_only:
        return Finding([], [commands(["ViT-S"])])
    run = _run(options, "vit")
    found = _explained(run)
    if (pictures := found.pictures) is None:
        raise InputError(
            f"{run}: expected a run with gated caches on images, found none ({found.left}); choose another run with "
            "--run"
        )
    mapped = [layer for layer in found.layers if layer.self_map is not None]
    middle = found.layers[found.middle] if found.middle is not None else mapped[len(mapped) // 2]
    table = Table("The two branches for the same test pictures", ["layer", "mean σ(λ)", "share by size", "correlation"])
    names = [layer.name for layer in found.layers]
    called = dict(zip(names, shortened(names), strict=True))
    for layer in mapped:
        assert isinstance(layer.maps, BranchMaps)
        correlation = sum(layer.maps.correlation) / len(layer.maps.correlation)
        table.add(called[layer.name], sum(layer.share) / len(layer.share), layer.maps.weight, correlation)
    notes = [
        f"{called[middle.name]} is the middle layer. Correlation: between the two maps of a picture, mean over "
        "pictures. It is negative if the branches complement each other, as the paper concludes from its figure."
    ]
    path = png(
        options.out / "figure4.png",
        _size(pictures),
        partial(_maps, pictures=pictures, layer=middle, name=called[middle.name]),
    )
    page = report([run], options.out / "figure4.html")
    return Finding([table], notes, [path, page], [run])


def figure5(claim: Claim, options: Options) -> Finding:
    """Figure 5: σ(λ) by layer and head of a cached ViT and a cached PVT."""
    if options.recipes_only:
        return Finding([], [commands(["ViT-S", "PVT-Tiny", "PVT-Small"])])
    runs = [options.run] if options.run else [_run(options, host) for host in ("vit", "pvt")]
    found = Finding()
    drawn: list[tuple[str, Explanation]] = []
    for run in runs:
        one = _explained(run)
        recipe = read_run(run, run.name).recipe
        name, cache = recipe["name"], recipe["model"].get("cache") or {}
        drawn.append((name, one))
        # Hosts before mix="heads", and without it, have a gate for each group of channels behind the projection.
        by_head = cache.get("mix") == "heads" or "image" not in recipe["model"]
        gated = "head" if by_head else "group of channels"
        table = Table(f"σ(λ) of {name}, a gate per {gated}", ["layer", "mean", "minimum", "maximum"])
        names = shortened([layer.name for layer in one.layers])
        for called, layer in zip(names, one.layers, strict=True):
            table.add(called, sum(layer.share) / len(layer.share), min(layer.share), max(layer.share))
        found.tables.append(table)
        above = sum(sum(layer.share) / len(layer.share) > 0.5 for layer in one.layers)
        found.notes.append(f"{name}: σ(λ) > 0.5 in {above} of {len(one.layers)} layers. The paper: in more than half.")
    found.files.append(png(options.out / "figure5.png", (10.0, 4.2), partial(_shares, drawn)))
    found.files.append(report(runs[:1], options.out / "figure5.html"))
    found.runs += runs
    return found


def _run(options: Options, host: str) -> Path:
    """The run given by --run, or a run of the host with the paper's cache, which is trained unless it exists."""
    if options.run is not None:
        return options.run
    return runs(comparisons.variants(options, host, (comparisons.PAPER,)))[0]


def _explained(run: Path) -> Explanation:
    """The recorded branches of a run's caches. They are recorded now if the run has no explain.json."""
    if not (run / "explain.json").is_file():
        _, task, model = open_run(run)
        explain(model, task, run)
    found = read_run(run, str(run)).explained
    if found is None or not found.layers:
        raise InputError(
            f"{run}: expected a run with gated caches, found none in its model; choose another run with --run"
        )
    return found


def _depths(options: Options) -> list[Any]:
    """Recipes of a small PVT for each depth: without a cache, then with one."""
    found = []
    for depth in DEPTHS:
        for kind in (comparisons.PLAIN, comparisons.PAPER):
            recipe = comparisons.recipe(options, "pvt", kind)
            model: Any = recipe.model
            model = replace(model, depths=(depth,) * len(model.depths))
            found.append(replace(recipe, name=f"{recipe.name}-depth-{depth}", model=model))
    return found


def _above(curves: Sequence[Sequence[tuple[float, float]]]) -> str:
    """A sentence: how many cached models are above the uncached curve by FLOPs."""
    plain, cached = (sorted(curve) for curve in curves)
    count = sum(accuracy > _at(plain, flops) for flops, accuracy in cached)
    by = "the uncached curve by FLOPs, which is constant beyond its ends"
    return f"{count} of {len(cached)} cached models are above {by}. The paper: all."


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    if x <= curve[0][0]:
        return curve[0][1]
    for (a, y), (b, z) in itertools.pairwise(curve):
        if x <= b:
            return y + (z - y) * (x - a) / (b - a)
    return curve[-1][1]


def _lay_out(panels: Sequence[dict[str, list[list[tuple[float, float]]]]], figure: "Figure") -> None:
    titles = ("The paper: ImageNet-1k top-1, %", "Here: test accuracy, %")
    units = ("10⁹ multiply-adds, counted here", "10⁶ multiply-adds")
    for i, (curves, title, unit) in enumerate(zip(panels, titles, units, strict=True)):
        axes = figure.add_axes((0.06 + 0.5 * i, 0.14, 0.42, 0.74))
        axes.set_title(title, loc="left")
        axes.set_xlabel(unit)
        axes.grid(axis="y", color=RULE[0])
        for index, (name, (plain, cached)) in enumerate(curves.items()):
            axes.plot(*zip(*plain, strict=True), color=variant_colour(index), marker="o", linestyle="--", label=name)
            axes.plot(*zip(*cached, strict=True), color=variant_colour(index), marker="s", label=f"{name}, cached")
        axes.legend(frameon=False, fontsize=9)


def _size(pictures: Pictures) -> tuple[float, float]:
    """The size of figure 4 in inches at which every image is square: one row of pictures and two rows of maps."""
    across, down = len(pictures.pixels) * (1 + GAP) - GAP, TOP + 1 + BEFORE + 2 + BETWEEN
    return 10.0, 10.0 * _BOX[2] / across * down / _BOX[3]


def _maps(figure: "Figure", pictures: Pictures, layer: CachedLayer, name: str) -> None:
    """Draw the pictures in a row and, below them, the maps of o_self and o_mem of a layer."""
    axes, first = figure.add_axes(_BOX), TOP + 1 + BEFORE
    axes.set_axis_off()
    for i, picture in enumerate(pictures.pixels):
        at = i * (1 + GAP)
        raster_image(axes, picture, (at, TOP))
        text = gated_caches.classes(pictures, i)
        axes.text(at + 0.5, TOP - 0.07, text, ha="center", va="bottom", fontsize=7.5, color=MUTED[0], linespacing=1.15)
    axes.text(-0.12, first + 1 + BETWEEN / 2, name, ha="right", va="center", color=INK[0])
    for down, what, maps in ((first, "self", layer.self_map), (first + 1 + BETWEEN, "mem", layer.memory_map)):
        assert maps is not None
        axes.text(-0.12, down + 0.5, f"o_{what}", ha="right", va="center", color=MUTED[0])
        for i, one in enumerate(maps):
            raster_image(axes, gated_caches.grey(one), (i * (1 + GAP), down))
    axes.set_xlim(0, len(pictures.pixels) * (1 + GAP) - GAP)
    axes.set_ylim(first + 2 + BETWEEN, 0)


def _shares(drawn: Sequence[tuple[str, Explanation]], figure: "Figure") -> None:
    width = 0.92 / len(drawn)
    for i, (name, found) in enumerate(drawn):
        axes: Axes = figure.add_axes((0.06 + i * width, 0.14, width - 0.05, 0.74))
        axes.set_title(f"σ(λ), {name}", loc="left")
        axes.set_xlabel("cached layer")
        axes.set_ylim(0, 1)
        axes.axhline(0.5, color=RULE[0])
        axes.set_xticks(range(len(found.layers)))
        axes.set_xlim(-0.5, len(found.layers) - 0.5)
        for place, layer in enumerate(found.layers):
            for h, share in enumerate(layer.share):
                colour, solid = HEADS[h % len(HEADS)][0], h < len(HEADS)  # further heads are rings
                axes.plot(
                    [place],
                    [share],
                    marker="o",
                    markersize=8,
                    linestyle="none",
                    color=colour,
                    markerfacecolor=colour if solid else "none",
                )
