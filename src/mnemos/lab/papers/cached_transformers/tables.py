"""Tables 1, 2, 3 and 7 to 10: costs of the paper's models at their real size, and accuracies of small ones.

G is 10⁹ multiply-adds per sample, counted in full and as the paper counts; the paper calls them FLOPs. The small models
are hosts that differ in their cache alone, on digits, MNIST or CIFAR-10.
"""

import copy
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from mnemos import registry
from mnemos.hosts.attach import cache, uncache
from mnemos.lab.compare.significance import Difference
from mnemos.lab.measure.flops import count_flops, flops_by_operation
from mnemos.lab.measure.timing import race, ratio
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.checks import on_meta
from mnemos.lab.run.recipe import Recipe, unwritten
from mnemos.lab.vision.classifiers import ImageConfig
from mnemos.memory.gated_cache import GRC

from ..claims import Claim
from ..experiments import welch_holm
from ..findings import Cell, Finding, Table
from ..reproduce import Options
from ..small_runs import Trained, task, train
from .recipes import PAPER_CACHE

# ---- costs at the real size ----

# The paper's names, and the recipes of the same models at their real size; "-cached" selects the cached variant.
RECIPES = {
    "ViT-S": "imagenet-vit-s",
    "PVT-Tiny": "imagenet-pvt-tiny",
    "PVT-Small": "imagenet-pvt-small",
    "PVT-Medium": "imagenet-pvt-medium",
    "Swin-T": "imagenet-swin-t",
    "PVTv2-B2": "imagenet-pvt-v2-b2",
    "PVTv2-B3": "imagenet-pvt-v2-b3",
    "PVTv2-B4": "imagenet-pvt-v2-b4",
    "Swin-T, 22k": "imagenet-22k-swin-t",
}
AUTO = GRC(preset="paper", mix="heads")  # the cheaper cache: the host's own length, no positional term
_ATTENTION = ("bmm", "baddbmm", "_scaled_dot_product")  # products of two activations
_SIZES = ("params M", "params M cached", "G", "G cached", "+ formula", "G cached, in eval", "G cached, auto")
_COUNTS = (
    'G: 10⁹ multiply-adds per 224² image, with all products. Cached: length="paper" and the positional term, as in the '
    'recipes; auto: length="auto", without it. + formula: the G that a cache adds by the formula in '
    "mnemos/ops/gated_cache/cost.py. As the paper counts: our module in training, without the products of queries with "
    "keys and of weights with values. The paper does not say what else it counts."
)


class Cost(NamedTuple):
    """The cost of one model: parameters, and G of a forward pass in training and in evaluation.

    added: G that a cache adds to a forward pass in training, by the formula of `ops.gated_cache.cost`. papers: G of a
    forward pass in training in the paper's convention, without attention products (of queries with keys, and of weights
    with values). It counts this library's module, so it may differ from the paper's table.
    """

    parameters: int
    training: float
    inference: float
    added: float
    papers: float


def config(name: str) -> ImageConfig:
    """The configuration of one of the paper's models, without a cache."""
    return replace(registry.load("recipe", RECIPES[name])().model, cache=None)


@functools.cache  # several tables and Figure 1 ask for the same models
def costs(name: str, grcs: tuple[GRC, ...] = (PAPER_CACHE, AUTO)) -> tuple[Cost, ...]:
    """The costs of a model without a cache and with each cache in `grcs`. It is built once and runs one image each."""
    model = config(name).build()
    x = torch.zeros(1, model.config.channels, model.config.image, model.config.image)
    measured = []
    for grc in (None, *grcs):  # on one host, because building the large ones takes seconds
        added = 0.0 if grc is None else cache(model.host, grc).flops / 2e9
        with torch.no_grad():
            training = flops_by_operation(lambda: model.train()(x))
            model.eval()(x)  # a frozen cache's keys and values are projected once
            inference = sum(flops_by_operation(lambda: model(x)).values())
        whole = sum(training.values())
        products = sum(n for operation, n in training.items() if operation.startswith(_ATTENTION))
        counts = (whole / 2e9, inference / 2e9, added, (whole - products) / 2e9)
        measured.append(Cost(_parameters(model), *counts))
        if grc is not None:
            uncache(model.host)
    return tuple(measured)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _sizes(plain: Cost, cached: Cost, auto: Cost) -> list[float]:
    sizes = [plain.parameters / 1e6, cached.parameters / 1e6, plain.training, cached.training]
    return [*sizes, cached.added, cached.inference, auto.training]


# ---- small models ----

STEPS = 500  # updates per run, unless the options give a number
# The endings of recipe names, by cache. PAPER has the settings of the paper but for the positional term, and a slot per
# token of the host's own keys. ROWS: the same, but each row reads its own cache, at inference as in training.
PLAIN, ATTENTION, PAPER, ROWS, CACHED = "", "-attention-cache", "-paper", "-paper-rows", "-cached"
# The never-written baselines of the gated caches. PAPER is read as it is stored, so a learned constant takes its place;
# the others start every update from zeros.
CONTROLS = {PAPER: "-paper-constant", ROWS: "-paper-rows-unwritten", CACHED: "-cached-unwritten"}
NAMES = {
    PLAIN: "none",
    ATTENTION: "attention-based",
    PAPER: "GRC, paper",
    CONTROLS[PAPER]: "GRC, paper, constant cache",
    ROWS: "GRC, paper, per row",
    CONTROLS[ROWS]: "GRC, paper, per row, never written",
    CACHED: "GRC, mnemos",
    CONTROLS[CACHED]: "GRC, mnemos, never written",
}
TABLE1 = tuple(ending for ending in NAMES if ending != ATTENTION)
TABLE2 = (PLAIN, ATTENTION, PAPER, CONTROLS[PAPER])
_CONTROLS = (
    "Control: the never-written baseline. GRC, paper reads the batch mean and is frozen at inference; its baseline "
    "has a learned constant in the cache's place. The others read per row, and their baselines start every update from "
    "zeros. Intervals are Welch's; p is Holm's over the rows of the table. "
    "Caches have the host's own length and no positional term; at the paper's size they have the paper's."
)


def recipe(options: Options, host: str, ending: str = PLAIN) -> Recipe:
    """The small recipe of a host ("vit", "pvt", "swin") and a cache, with the data and steps of the options."""
    for written, control in CONTROLS.items():
        if ending == control and (baseline := unwritten(recipe(options, host, written))) is not None:
            return baseline
    name, fields = task(options)
    small: Recipe = registry.load("recipe", f"{name}-{host}{PAPER if ending == ROWS else ending}")()
    if ending == ROWS:
        about = f"{small.name}, but each row reads its own cache, at inference as in training"
        rows = {"cache": {"read": "sample", "inference": "transient"}}
        small = altered(small, name=f"{name}-{host}{ROWS}", about=about, model=rows)
    return altered(small, data=fields, train={"steps": options.steps or STEPS})


def compared(finding: Finding, options: Options, name: str, recipes: Mapping[str, Recipe]) -> Trained:
    """The recipes, trained on the data of the options."""
    return train(finding, options, f"{name}-{task(options)[0]}", recipes)


def about(options: Options, trained: Trained) -> str:
    """A line for titles: data, number of updates and seeds, and the accuracy of the majority class."""
    seeds, majority = next(iter(trained.rows.values()))["seeds"], trained.comparison["majority"]
    chance = "" if majority is None else f"; majority class: {100 * majority:.1f} %"
    text = f"small models on {task(options)[0]} (PVT: version 2), {options.steps or STEPS:,} updates"
    return f"{text}, {seeds} seed{'s' * (seeds > 1)}{chance}"


def gains(hosts: Sequence[Trained], endings: Sequence[str]) -> Table:
    """What each cache adds, in points of accuracy: to the host without it, and to its control.

    Each difference has its 95 % interval (Welch), and its p is corrected over the rows of its column (Holm).
    """
    # Two families of tests, each corrected by itself: a cache is compared with none, and with its own control.
    caches = [(one, ending) for one in hosts for ending in endings if ending == ATTENTION or ending in CONTROLS]
    to_none = welch_holm((one.spread(ending), one.spread(PLAIN)) for one, ending in caches)
    gated = [(one, ending) for one, ending in caches if ending in CONTROLS]
    to_control = iter(welch_holm((one.spread(ending), one.spread(CONTROLS[ending])) for one, ending in gated))
    table = Table("What a cache adds, in points", ["", "to none", "p, none", "control", "to its control", "p, control"])
    for (one, ending), gain in zip(caches, to_none, strict=True):
        own = (NAMES[CONTROLS[ending]], *points(next(to_control))) if ending in CONTROLS else (None, None, None)
        table.add(one.rows[ending]["name"], *points(gain), *own)
    return table


def points(tested: Difference) -> tuple[Cell, Cell]:
    """A difference of accuracies in points with its interval, and its corrected p; None where one seed has none."""
    ends = (tested.difference, *(tested.interval or ()))
    first, *others = (f"{round(100 * end, 1) + 0.0:+.1f}".replace("-", "−") for end in ends)  # no −0.0
    text = f"{first} ({' to '.join(others)})" if others else first
    return text, None if math.isnan(tested.p_holm) else tested.p_holm


def _add_accuracies(finding: Finding, options: Options, hosts: Sequence[str], endings: Sequence[str]) -> None:
    """Tables of small hosts with each cache: accuracies, and what each cache adds."""
    gated = [ending for ending in endings if ending in CONTROLS]
    trained = [
        compared(finding, options, host, {ending: recipe(options, host, ending) for ending in endings})
        for host in hosts
    ]
    columns = [NAMES[ending] for ending in endings] + [f"{NAMES[ending]}, emptied" for ending in gated]
    table = Table(f"Test accuracy: {about(options, trained[0])}", ["", *columns])
    for one in trained:
        scores = [one.score(ending) for ending in endings]
        table.add(one.rows[PLAIN]["name"], *scores, *(one.emptied(ending) for ending in gated))
    finding.tables += [table, gains(trained, endings)]
    finding.notes.append(_CONTROLS)


# ---- Tables 1, 2 and 8: accuracy ----


def classification(claim: Claim, options: Options) -> Finding:
    """Tables 1 and 8: costs of the paper's models at their real size, and accuracies of small hosts of their kinds."""
    table = Table("Parameters and FLOPs at 224², and the paper's accuracies", ["", *_SIZES, *claim.paper_columns])
    for name, values in claim.values.items():
        table.add(name, *_sizes(*costs(name)), *values)
    finding = Finding([table], [_COUNTS])
    _add_accuracies(finding, options, ("swin",) if claim.name == "table8" else ("vit", "pvt", "swin"), TABLE1)
    return finding


def table2(claim: Claim, options: Options) -> Finding:
    """Table 2: no cache, a cache of keys and values, a gated cache."""
    table = Table("Top-1 accuracy on ImageNet-1k", ["", *claim.paper_columns])
    for name, values in claim.values.items():
        table.add(name, *values)
    finding = Finding([table])
    _add_accuracies(finding, options, ("vit", "pvt"), TABLE2)
    return finding


# ---- Tables 9 and 10: cost ----

# What a cache adds to: a field of Cost, its unit, and the title of its table.
_ADDED = (
    ("parameters", 1e6, "Parameters, millions"),
    ("training", 1.0, "G of a training forward, all products"),
    ("inference", 1.0, "G of an eval() forward, all products"),
    ("papers", 1.0, "G of a training forward, as the paper counts"),
)


def added_costs(claim: Claim, options: Options) -> Finding:
    """What a cache adds to each of the paper's models, in percent: parameters and FLOPs, with both lengths."""
    finding = Finding([], [_COUNTS])
    for field, unit, title in _ADDED:
        table = finding.table(title, ["", "without", "+ %", "+ %, auto"])
        for name in RECIPES:
            plain, *cached = (getattr(one, field) for one in costs(name))
            table.add(name, plain / unit, *(100 * (one / plain - 1) for one in cached))
    return finding


ROUNDS, BATCH = 3, 4  # per throughput measurement


def table9(claim: Claim, options: Options) -> Finding:
    """Table 9: parameters, FLOPs and throughput of PVT, with and without a cache."""
    counted = [f"as the paper counts{variant}" for variant in ("", " cached", " cached, auto")]
    flops = Table("Parameters and FLOPs", ["", *_SIZES, *counted, "paper G", "paper G cached"])
    speed = Table(
        f"Images per second here, batch {BATCH} on {torch.get_num_threads()} threads; ratio: with a cache / without",
        ["", "train", "train cached", "ratio", "paper ratio", "test", "test cached", "test ratio", "paper test ratio"],
    )
    for name, values in claim.values.items():
        all_three = costs(name)
        flops.add(name, *_sizes(*all_three), *(one.papers for one in all_three), *values[4:])
        train, test = throughput(name, training=True), throughput(name, training=False)
        speed.add(name, *train, values[1] / values[0], *test, values[3] / values[2])
    note = (
        f"Ratios are medians over {ROUNDS} interleaved rounds. The paper measured on a V100 "
        f"({', '.join(f'{name} {v[0]:g} and {v[2]:g}' for name, v in claim.values.items())} images per second "
        "without a cache)."
    )
    return Finding([flops, speed], [_COUNTS, note])


def throughput(name: str, training: bool) -> tuple[float, float, float]:
    """Images per second of one of the paper's models without a cache and with one, and the ratio with / without."""
    torch.manual_seed(0)
    plain = config(name).build()
    with_cache = copy.deepcopy(plain)
    cache(with_cache.host, PAPER_CACHE)
    x = torch.randn(BATCH, plain.config.channels, plain.config.image, plain.config.image)
    y = torch.zeros(BATCH, dtype=torch.int64)

    def work(model: nn.Module) -> Callable[[], object]:
        if not training:
            model.eval()
            return torch.no_grad()(lambda: model(x))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

        def step() -> None:
            nn.functional.cross_entropy(model(x)[0], y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    times = race({"plain": work(plain), "cached": work(with_cache)}, ROUNDS)
    speeds = [BATCH / statistics.median(times[which]) for which in ("plain", "cached")]
    return speeds[0], speeds[1], 1 / ratio(times, "cached", "plain").median


RATIOS = (0.125, 0.25, 0.5, 1.0)


def table10(claim: Claim, options: Options) -> Finding:
    """Table 10: FLOPs and parameters of PVT-Tiny by caching ratio, and accuracies of a small PVT."""
    # --- the paper's model: no cache, then each ratio with the paper's length and with the host's own ---
    columns = ["ratio", "params M", "G", "+ formula", "G in eval", "G, auto"]
    columns += ["as the paper counts", "as the paper counts, auto", *claim.paper_columns]
    table = Table("PVT-Tiny", columns)
    plain, *cached = costs("PVT-Tiny", tuple(replace(grc, ratio=r) for grc in (PAPER_CACHE, AUTO) for r in RATIOS))
    both = [(plain, plain), *zip(cached[: len(RATIOS)], cached[len(RATIOS) :], strict=True)]
    for (name, values), (one, auto) in zip(claim.values.items(), both, strict=True):
        sizes = one.parameters / 1e6, one.training, one.added or None, one.inference, auto.training
        table.add(name, *sizes, one.papers, auto.papers, *values)
    whole, auto = both[-1]
    open_question = (
        f"At ratio 1 our module has {whole.training:.2f} G with all products and {whole.papers:.2f} G as the paper "
        f"counts ({auto.training:.2f} and {auto.papers:.2f} with the auto length). The paper has "
        f"{claim.values['1'][0]:.2f} G, and does not say of which products; the difference is open."
    )
    finding = Finding([table], [_COUNTS, open_question])
    # --- small models ---
    trained = compared(finding, options, "ratios", ratios(options, "pvt", RATIOS))
    ours = finding.table(
        f"Test accuracy: {about(options, trained)}", ["ratio", "accuracy", "cache emptied", "paper top-1"]
    )
    for (name, values), row in zip(claim.values.items(), trained.rows, strict=True):
        ours.add(name, trained.score(row), trained.emptied(row), values[1])
    return finding


def ratios(options: Options, host: str, wanted: Sequence[float]) -> dict[str, Recipe]:
    """Recipes of a host without a cache (ratio 0) and with a cache of each ratio in `wanted`."""
    plain, cached = recipe(options, host), recipe(options, host, PAPER)
    names = {share: f"{plain.name}-ratio-{share:g}" for share in wanted}
    changed = {f"{r:g}": altered(cached, name=name, model={"cache": {"ratio": r}}) for r, name in names.items()}
    return {"0": plain, **changed}


# ---- Tables 3 and 7: detection ----

HEIGHT, WIDTH, CLASSES = 800, 1344, 80  # 800 × 1333, padded to a multiple of 32
_DETECTORS = {"table3": "mask-rcnn", "table7": "retinanet"}
_PARTS = ("backbone", "pyramid", "heads")
_DETECTION = (
    "G: 10⁹ multiply-adds of products, convolutions and attention; sampling boxes from the maps and non-maximum "
    "suppression are not counted. AP is not measured: the recipes need COCO, a classifier of ImageNet, and GPUs."
)


def detection(claim: Claim, options: Options) -> Finding:
    """Table 3 (Mask R-CNN) or 7 (RetinaNet). The costs are counted, nothing is trained."""
    recipes = {row: recipe_of(claim.name, row) for row in claim.values}
    scores = Table(claim.about, ["", "recipe", *claim.paper_columns, "ours"])
    for row, values in claim.values.items():
        scores.add(row, recipes[row], *values, "not run")
    costs = Table(
        f"Million parameters (M), and G of a picture of {HEIGHT} × {WIDTH} pixels in evaluation",
        ["recipe", *(f"{part} {unit}" for part in _PARTS for unit in ("M", "G"))],
    )
    for name in recipes.values():
        costs.add(name, *(number for m, g in detector_cost(name) for number in (m / 1e6, g / 1e9)))
    return Finding([scores, costs], [_DETECTION])


def recipe_of(table: str, row: str) -> str:
    """The recipe of a row, such as coco-retinanet-pvt-tiny-cached for "PVT-Tiny, cached" of Table 7."""
    host, _, cached = row.lower().partition(", ")
    return "-".join(filter(None, ("coco", _DETECTORS[table], host, cached)))


def detector_cost(recipe: str) -> list[tuple[int, float]]:
    """Parameters, and multiply-adds of a picture of 800 × 1344 pixels in evaluation: backbone, pyramid and heads.

    Of R-CNN detectors the heads read all proposals, and the mask branch as many boxes as a picture's detections. The
    detector is built without memory for its weights. Cost: about a second.
    """
    model = replace(registry.load("recipe", recipe)().model, classes=CLASSES)
    detector: Any = on_meta(model).eval().host
    pyramid = detector.backbone

    def run_heads() -> None:
        """Of the boxes of R-CNN's second stage only the number matters."""
        if not hasattr(detector, "rpn"):
            detector.head(maps)
            return
        detector.rpn.head(maps)
        regions, channels = detector.roi_heads, maps[0].shape[1]
        proposals = detector.rpn._post_nms_top_n["testing"]
        regions.box_predictor(regions.box_head(torch.zeros(proposals, channels, 7, 7)))
        if regions.has_mask():
            regions.mask_predictor(regions.mask_head(torch.zeros(regions.detections_per_img, channels, 14, 14)))

    with torch.no_grad(), torch.device("meta"):
        picture = torch.zeros(1, 3, HEIGHT, WIDTH)
        maps = list(pyramid(picture).values())
        backbone = count_flops(lambda: pyramid.backbone(picture)) / 2
        both = count_flops(lambda: pyramid(picture)) / 2
        heads = count_flops(run_heads) / 2
    first, second, third = (_parameters(part) for part in (pyramid.backbone, pyramid, detector))
    return [(first, backbone), (second - first, both - backbone), (third - second, heads)]
