"""Tables 1, 2, 8, 9 and 10, and a cache's costs: real sizes, this machine's throughput, accuracies of small models.

G is 10⁹ multiply-adds per sample, counted in full and as the paper counts; the paper calls them FLOPs.
"""

import copy
import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mnemos import registry
from mnemos.hosts.attach import cache, uncache
from mnemos.lab.measure.flops import flops_by_operation
from mnemos.lab.measure.timing import race, ratio
from mnemos.lab.vision.classifiers import ImageConfig
from mnemos.memory.gated_cache import GRC

from ..claim import Claim
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, runs
from . import comparisons
from .image_recipes import PAPER_CACHE

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
RATIOS = (0.125, 0.25, 0.5, 1.0)
ROUNDS = 3  # per throughput measurement
BATCH = 4

_SIZES = ("params M", "params M cached", "G", "G cached", "+ formula", "G cached, in eval", "G cached, auto")
_COUNTS = (
    'G: 10⁹ multiply-adds per 224² image, with all products. Cached: length="paper" and the positional term, as in the '
    'recipes; auto: length="auto", without it. + formula: the G that a cache adds by the formula in '
    "mnemos/ops/gated_cache/cost.py. As the paper counts: our module in training, without the products of queries with "
    "keys and of weights with values. The paper does not say what else it counts."
)
_CONTROLS = (
    "Control: the never-written baseline. GRC, paper reads the batch mean and is frozen at inference; its baseline "
    "has a learned constant in the cache's place. The others read per row, and their baselines start every update from "
    "zeros. Intervals are Welch's; p is Holm's over the rows of the table. "
    "Caches have the host's own length and no positional term; at the paper's size they have the paper's."
)

_ATTENTION = ("bmm", "baddbmm", "_scaled_dot_product")  # products of two activations


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


@functools.cache
def costs(name: str, grcs: tuple[GRC, ...] = (PAPER_CACHE, AUTO)) -> tuple[Cost, ...]:
    """The costs of a model without a cache and with each cache in `grcs`. It is built once and runs one image each."""
    made = config(name)
    model, x = made.build(), torch.zeros(1, made.channels, made.image, made.image)
    found = [_measure(model, x, 0.0)]
    for grc in grcs:
        added = cache(model.host, grc).flops / 2e9
        found.append(_measure(model, x, added))
        uncache(model.host)
    return tuple(found)


@torch.no_grad()
def _measure(model: nn.Module, x: Tensor, added: float) -> Cost:
    training = flops_by_operation(lambda: model.train()(x))
    model.eval()(x)  # a frozen cache's keys and values are projected once
    inference = flops_by_operation(lambda: model(x))
    whole = sum(training.values())
    apart = sum(n for operation, n in training.items() if operation.startswith(_ATTENTION))
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(parameters, whole / 2e9, sum(inference.values()) / 2e9, added, (whole - apart) / 2e9)


def classification(claim: Claim, options: Options) -> Finding:
    """Tables 1 and 8: costs of the paper's models at their real size, and accuracies of small hosts of their kinds."""
    found = Finding([], [commands(list(claim.values))])
    if not options.recipes_only:
        found.tables.append(_costs_table(claim))
        found.notes.insert(0, _COUNTS)
        hosts = ("swin",) if claim.name == "table8" else ("vit", "pvt", "swin")
        _accuracies(found, options, hosts, comparisons.TABLE1)
    return found


def table2(claim: Claim, options: Options) -> Finding:
    """Table 2: no cache, a cache of keys and values, a gated cache."""
    table = Table("Top-1 accuracy on ImageNet-1k", ["", *(f"paper {column}" for column in claim.columns)])
    for name, values in claim.values.items():
        table.add(name, *values)
    found = Finding([table], [commands(list(claim.values), ("", "-attention-cache", "-cached"))])
    if not options.recipes_only:
        _accuracies(found, options, ("vit", "pvt"), comparisons.TABLE2)
    return found


# What a cache adds to: a field of Cost, its unit, and the title of its table.
_ADDED = (
    ("parameters", 1e6, "Parameters, millions"),
    ("training", 1.0, "G of a training forward, all products"),
    ("inference", 1.0, "G of an eval() forward, all products"),
    ("papers", 1.0, "G of a training forward, as the paper counts"),
)


def added_costs(claim: Claim, options: Options) -> Finding:
    """What a cache adds to each of the paper's models, in percent: parameters and FLOPs, with both lengths."""
    if options.recipes_only:
        return Finding([], [commands(list(RECIPES))])
    found = Finding([], [_COUNTS])
    for field, unit, title in _ADDED:
        table = Table(title, ["", "without", "+ %", "+ %, auto"])
        for name in RECIPES:
            plain, *cached = (getattr(one, field) for one in costs(name))
            table.add(name, plain / unit, *(100 * (one / plain - 1) for one in cached))
        found.tables.append(table)
    return found


def table9(claim: Claim, options: Options) -> Finding:
    """Table 9: parameters, FLOPs and throughput of PVT, with and without a cache."""
    if options.recipes_only:
        return Finding([], [commands(list(claim.values))])
    ours = [f"as the paper counts{kind}" for kind in ("", " cached", " cached, auto")]
    flops = Table("Parameters and FLOPs", ["", *_SIZES, *ours, "paper G", "paper G cached"])
    for name, values in claim.values.items():
        all_three = costs(name)
        flops.add(name, *_sizes(*all_three), *(one.papers for one in all_three), *values[4:])
    found = Finding([flops], [_COUNTS])
    speed = Table(
        f"Images per second here, batch {BATCH} on {torch.get_num_threads()} threads; ratio: with a cache / without",
        ["", "train", "train cached", "ratio", "paper ratio", "test", "test cached", "test ratio", "paper test ratio"],
    )
    for name, values in claim.values.items():
        train = [*throughput(name, training=True), values[1] / values[0]]
        speed.add(name, *train, *throughput(name, training=False), values[3] / values[2])
    found.tables.append(speed)
    found.notes.append(
        f"Ratios are medians over {ROUNDS} interleaved rounds. The paper measured on a V100 "
        f"({', '.join(f'{name} {v[0]:g} and {v[2]:g}' for name, v in claim.values.items())} images per second "
        "without a cache)."
    )
    return found


def table10(claim: Claim, options: Options) -> Finding:
    """Table 10: FLOPs and parameters of PVT-Tiny by caching ratio, and accuracies of a small PVT."""
    if options.recipes_only:
        return Finding([], [commands(["PVT-Tiny"])])
    columns = ["ratio", "params M", "G", "+ formula", "G in eval", "G, auto"]
    columns += ["as the paper counts", "as the paper counts, auto", *_papers(claim)]
    table = Table("PVT-Tiny", columns)
    plain, *cached = costs("PVT-Tiny", tuple(replace(grc, ratio=r) for grc in (PAPER_CACHE, AUTO) for r in RATIOS))
    both = [(plain, plain), *zip(cached[: len(RATIOS)], cached[len(RATIOS) :], strict=True)]
    for (name, values), (one, auto) in zip(claim.values.items(), both, strict=True):
        sizes = one.parameters / 1e6, one.training, one.added or None, one.inference, auto.training
        table.add(name, *sizes, one.papers, auto.papers, *values)
    found = Finding([table], [_COUNTS, _whole_width(claim, *both[-1])])
    comparison = comparisons.trained(options, "ratios", comparisons.ratios(options, "pvt", RATIOS))
    ours = Table(
        f"Test accuracy: {comparisons.about(options, comparison)}",
        ["ratio", "accuracy", "cache emptied", "paper top-1"],
    )
    for i, (name, values) in enumerate(claim.values.items()):
        ours.add(name, comparisons.accuracy(comparison, i), comparisons.emptied(comparison, i), values[1])
    found.tables.append(ours)
    found.runs += runs(comparison)
    found.notes.append(caution(options))
    return found


def throughput(name: str, training: bool) -> tuple[float, float, float]:
    """Images per second of one of the paper's models without a cache and with one, and the ratio with / without."""
    torch.manual_seed(0)
    plain = config(name).build()
    with_cache = copy.deepcopy(plain)
    cache(with_cache.host, PAPER_CACHE)
    x = torch.randn(BATCH, plain.config.channels, plain.config.image, plain.config.image)
    times = race({"plain": _work(plain, x, training), "cached": _work(with_cache, x, training)}, ROUNDS)
    each = [BATCH / statistics.median(times[which]) for which in ("plain", "cached")]
    return each[0], each[1], 1 / ratio(times, "cached", "plain").median


def _work(model: nn.Module, x: Tensor, training: bool) -> Callable[[], None]:
    model.train(training)
    if not training:

        def infer() -> None:
            with torch.no_grad():
                model(x)

        return infer
    y = torch.zeros(len(x), dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

    def step() -> None:
        nn.functional.cross_entropy(model(x)[0], y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _costs_table(claim: Claim) -> Table:
    """A table of parameters and FLOPs next to the paper's accuracies."""
    table = Table("Parameters and FLOPs at 224², and the paper's accuracies", ["", *_SIZES, *_papers(claim)])
    for name, values in claim.values.items():
        table.add(name, *_sizes(*costs(name)), *values)
    return table


def _sizes(plain: Cost, cached: Cost, auto: Cost) -> list[float]:
    found = [plain.parameters / 1e6, cached.parameters / 1e6, plain.training, cached.training]
    return [*found, cached.added, cached.inference, auto.training]


def _whole_width(claim: Claim, cached: Cost, auto: Cost) -> str:
    """A note on the largest ratio, where our module and the paper's differ most."""
    return (
        f"At ratio 1 our module has {cached.training:.2f} G with all products and {cached.papers:.2f} G as the paper "
        f"counts ({auto.training:.2f} and {auto.papers:.2f} with the auto length). The paper has "
        f"{claim.values['1'][0]:.2f} G, and does not say of which products; the difference is open."
    )


def _papers(claim: Claim) -> list[str]:
    return [f"paper {column}" for column in claim.columns]


def _accuracies(found: Finding, options: Options, hosts: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    """Tables of small hosts with each kind of cache: accuracies, and what each cache adds."""
    emptied = [kind for kind in kinds if kind in comparisons.CONTROLS]
    columns = [comparisons.NAMES[kind] for kind in kinds] + [f"{comparisons.NAMES[kind]}, emptied" for kind in emptied]
    trained = [comparisons.variants(options, host, kinds) for host in hosts]
    ours = Table(f"Test accuracy: {comparisons.about(options, trained[0])}", ["", *columns])
    for comparison in trained:
        cells = [comparisons.accuracy(comparison, i) for i in range(len(kinds))]
        cells += [comparisons.emptied(comparison, kinds.index(kind)) for kind in emptied]
        ours.add(comparison["rows"][0]["name"], *cells)
        found.runs += runs(comparison)
    found.tables += [ours, comparisons.gains(trained, kinds)]
    found.notes += [_CONTROLS, caution(options)]


def commands(names: list[str], kinds: tuple[str, ...] = ("", "-cached")) -> str:
    """A note: the commands that train the paper's models at their real size."""
    recipes = ", ".join(RECIPES[name] for name in names)
    endings = " or ".join(f'"{kind}"' for kind in kinds if kind)
    return (
        f"At the real size: mnemos train RECIPE --data.folder IMAGENET. Recipes: {recipes}; append {endings} to a "
        "name for its cached variant."
    )
