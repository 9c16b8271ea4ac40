"""What the stored caches hold after training, and whether that means anything.

The [Tm, Dm] matrix of each layer, its singular values and the similarity of its slots; the training patches that are
nearest to some slots.
"""

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mnemos.lab.evaluate.recorded import NO_PICTURES, CachedLayer, Left, SlotContents

from .markup import decimal, escape, figure, listed, missing, paragraph, plural, shortened, table
from .read import Results
from .run_records import RunRecord
from .style import INK, MUTED, NEGATIVE, POSITIVE, RULE, nothing, panel, raster_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 192  # slots or channels drawn; with more, neighbours are averaged
LAYERS = 6  # layers drawn; with more, an even selection
WIDTH, LEFT, MARGINS = 2.6, 0.3, 0.56  # inches: a panel, its labels, the margins above and below
GAP = 0.1  # gap between patches, in patches
CLEARLY = 0.02  # a cosine counts as above chance if it exceeds it by this much


def content_section(results: Results) -> str:
    """For each cached variant, a figure of the first run that stored its caches, or a line that says none did."""
    parts = []
    for index, name in enumerate(results.names):
        stored = [run for run in results.runs_of(name) if any(cache.any() for cache in (run.caches or {}).values())]
        if stored:
            parts.append(_content(index, name, stored))
        elif name in results.cached():
            parts.append(missing(f"{name}: no run stored the content of a cache, so there is none to draw."))
    return "\n".join(parts)


def _content(index: int, name: str, stored: list[RunRecord]) -> str:
    caches = stored[0].caches or {}
    chosen = list(caches)
    if len(chosen) > LAYERS:
        chosen = [chosen[i] for i in np.unique(np.linspace(0, len(chosen) - 1, LAYERS).round().astype(int))]
    called = dict(zip(caches, shortened(list(caches)), strict=True))
    panels, pooled = [], False
    for place, label in enumerate(chosen):
        cache = caches[label]
        pooled = pooled or max(cache.shape) > LARGEST
        kinds = (
            (f"{called[label]}, to ±{_reach(cache):.2g}", draw_values, "channel", "slot"),
            ("Singular values", draw_spectrum, "rank of the value", "share of the largest"),
            ("Similarity of slots", draw_slots, "slot", "slot"),
        )
        for title, draw, x, y in kinds:
            slug = f"cache-{index}-{place}-{draw.__name__}"
            aloud = f"{title}: {called[label]} of {name}"
            panels.append(panel(slug, title, partial(draw, cache=cache), (2.6, 2.2), 0.36, aloud, x, y))
    return figure(
        panels,
        _caption(name, stored, {called[label]: label for label in chosen}, len(caches), pooled),
        kind="small",
        legend=_SCALE,
    )


# Drawn by the style sheet as a gradient.
_SCALE = '<ul class="legend"><li>negative<i class="scale"></i>positive</li></ul>'


def _caption(name: str, stored: list[RunRecord], chosen: dict[str, str], layers: int, pooled: bool) -> str:
    kept = "" if len(chosen) == layers else f" {len(chosen)} of its {layers} layers are drawn."
    shrunk = f" With more than {LARGEST} slots or channels, neighbours are averaged." if pooled else ""
    others = len(stored) - 1
    rest = f" {plural(others, 'other run')} of this variant also stored caches." if others else ""
    first, whole = next(iter(chosen.items()))
    called = f", where {first} is {whole}" if first != whole else ""
    return (
        f"{name}: the stored cache after training, one row of panels per layer ({listed(list(chosen))}). Left: the "
        "matrix "
        "of slots (rows) by channels (columns); the colour saturates at the value in the title, the 99th percentile. "
        "Middle: its singular values divided by the largest, on a logarithmic scale; the steeper the curve, the fewer "
        "directions are in use. Right: cosine similarity between slots; colour off the diagonal means that two slots "
        "hold similar content."
        f"{kept}{shrunk} From {stored[0].label}/caches.safetensors{called}.{rest}"
    )


def _reach(cache: np.ndarray) -> float:
    """The magnitude at which the colour saturates: the 99th percentile, so that one outlier does not fade the rest."""
    finite = np.abs(cache[np.isfinite(cache)])
    return float(np.percentile(finite, 99)) if finite.size else 0.0


def draw_values(axes: "Axes", cache: np.ndarray) -> None:
    """Draw the matrix [Tm, Dm] in diverging colours; zero has the background's colour."""
    _image(axes, pool(cache), _reach(cache))


def draw_slots(axes: "Axes", cache: np.ndarray) -> None:
    """Draw the cosine similarity between slots [Tm, Tm]; a slot of zeros has similarity 0 to all."""
    norms = np.linalg.norm(cache, axis=1, keepdims=True)
    units = np.where(norms > 0, cache / np.where(norms > 0, norms, 1), 0)
    # The mean of a block of cosines is the product of mean unit vectors, so a long cache is pooled first.
    units = pool(units, channels=units.shape[1])
    _image(axes, units @ units.T, 1.0)


def draw_spectrum(axes: "Axes", cache: np.ndarray) -> None:
    """Draw the singular values divided by the largest, with the effective rank."""
    if not np.isfinite(cache).all():
        nothing(axes, "not finite")
        return
    values = np.linalg.svd(cache, compute_uv=False)
    if not values.size or values[0] == 0:
        nothing(axes, "all zero")
        return
    shares = values / values[0]
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.6)
    axes.plot(np.arange(1, len(shares) + 1), np.maximum(shares, 1e-4), color=INK[0], linewidth=1.2)
    axes.grid(axis="y", color=RULE[0])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.text(1, 1, f"effective rank {effective_rank(values):.1f}", transform=axes.transAxes, ha="right", va="top")


def effective_rank(values: np.ndarray) -> float:
    """exp of the entropy of σ/Σσ over the singular values σ: the effective number of directions that the slots span."""
    shares = values / values.sum()
    return float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))


def pool(matrix: np.ndarray, channels: int = LARGEST) -> np.ndarray:
    """At most LARGEST rows and `channels` columns, each the mean of its neighbours."""
    rows = np.array_split(np.arange(matrix.shape[0]), min(LARGEST, matrix.shape[0]))
    columns = np.array_split(np.arange(matrix.shape[1]), min(channels, matrix.shape[1]))
    matrix = np.stack([matrix[r].mean(0) for r in rows]) if len(rows) < matrix.shape[0] else matrix
    return np.stack([matrix[:, c].mean(1) for c in columns], 1) if len(columns) < matrix.shape[1] else matrix


def _image(axes: "Axes", matrix: np.ndarray, end: float) -> None:
    """Draw sign as hue and magnitude as opacity, for light and dark pages; values not finite are drawn as 0."""
    from matplotlib.colors import to_rgb

    scaled = np.nan_to_num(np.clip(matrix / (end or 1.0), -1, 1))
    colours = np.where((scaled < 0)[..., None], to_rgb(NEGATIVE[0]), to_rgb(POSITIVE[0]))
    rgba = np.concatenate([colours, np.abs(scaled)[..., None]], -1)
    axes.imshow((rgba * 255).round().astype(np.uint8), aspect="auto", interpolation="none")
    axes.spines[["top", "right"]].set_visible(True)
    axes.spines[:].set_color(RULE[0])
    axes.tick_params(length=0)


def slot_section(results: Results) -> str:
    """For each cached variant, patches and numbers of the first run with a slot comparison, or why there are none."""
    parts, whys = [], []
    for index, name in enumerate(results.names):
        runs = [run for run in results.runs_of(name) if run.explained]
        found = [run for run in runs if _compared(run)]
        if found:
            parts.append(_slots(index, name, found[0]))
        elif name in results.cached():
            why = _why(runs)
            whys += [f"{name}: {why}, so the report cannot show what its slots hold."] * (why != NO_PICTURES)
    return "\n".join(parts + [missing(why) for why in whys])


def _compared(run: RunRecord) -> list[CachedLayer]:
    return [layer for layer in run.explained.layers if layer.patches is not None] if run.explained else []


def _why(runs: list[RunRecord]) -> str:
    if not runs or runs[0].explained is None:
        return "no run has an explain.json"
    lefts = [layer.slots.left for layer in runs[0].explained.layers if isinstance(layer.slots, Left)]
    return str(runs[0].explained.left or (lefts[0] if lefts else "its slots were not compared with training patches"))


def _slots(index: int, name: str, run: RunRecord) -> str:
    assert run.explained is not None
    every = [layer.name for layer in run.explained.layers]
    called = dict(zip(every, shortened(every), strict=True))
    compared = _compared(run)
    chosen = [compared[i] for i in sorted({0, (len(compared) - 1) // 2, len(compared) - 1})]
    panels = []
    for place, layer in enumerate(chosen):
        assert layer.patches is not None
        rows, columns = layer.patches.shape[:2]
        side = (WIDTH - LEFT - 0.1) / (_steps(columns) + 1)
        size = (WIDTH, _steps(rows) * side + MARGINS)
        aloud = f"Training patches nearest to slots of {called[layer.name]} of {name}"
        panels.append(
            panel(f"slots-{index}-{place}", called[layer.name], partial(draw_patches, layer=layer), size, LEFT, aloud)
        )
    caption = (
        f"{name}: some slots of {listed([called[layer.name] for layer in chosen])}, one row per slot (number on the "
        "left). The row shows the patches whose tokens are nearest to the slot among "
        f"{_contents(compared[0]).images:,} training pictures, at most one per picture, nearest first. The bright "
        "middle is the patch; the number on the right is the cosine of the nearest. The distance compares what a token "
        "would write (the candidate of eq. 5 for that slot, with the update gate at 1) with the slot, both minus the "
        "mean candidate. Some patch is always the nearest: the table below says whether it is nearer than chance. From "
        f"{run.label}/explain.safetensors."
    )
    return "\n".join(
        [
            paragraph(_summary(name, compared)),
            figure(panels, caption, kind="small"),
            _table(name, run.label, compared, called),
        ]
    )


def _steps(count: int) -> float:
    return count * (1 + GAP) - GAP


def draw_patches(axes: "Axes", layer: CachedLayer) -> None:
    """Draw one row of patches per slot, with faded surroundings."""
    assert layer.patches is not None
    contents = _contents(layer)
    axes.set_axis_off()
    rows, columns = layer.patches.shape[:2]
    for i, (slot, row) in enumerate(zip(contents.shown, layer.patches, strict=True)):
        down = i * (1 + GAP)
        axes.text(-0.15, down + 0.5, str(slot), ha="right", va="center", fontsize=8, color=MUTED[0])
        for j, patch in enumerate(row):
            raster_image(axes, spotlit(patch), (j * (1 + GAP), down))
        cosine = decimal(contents.nearest[i][0])[:-1]
        axes.text(_steps(columns) + 0.12, down + 0.5, cosine, va="center", fontsize=8, color=MUTED[0])
    axes.set_xlim(0, _steps(columns) + 1)
    axes.set_ylim(_steps(rows), 0)


def spotlit(patch: np.ndarray) -> np.ndarray:
    """A crop [h, w, C] uint8 with its middle half unchanged and the rest faded towards grey."""
    shown = (0.4 * patch + 0.6 * 128).round().astype(np.uint8)
    inside = tuple(slice(n // 4, n - n // 4) for n in patch.shape[:2])
    shown[inside] = patch[inside]
    return shown


def _contents(layer: CachedLayer) -> SlotContents:
    assert isinstance(layer.slots, SlotContents)
    return layer.slots


def _span(values: list[float], form: str = ".3f") -> str:
    return " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def _summary(name: str, compared: list[CachedLayer]) -> str:
    """What the numbers of all layers say, from the least to the greatest."""
    found = [_contents(layer) for layer in compared]
    nearer = sum(one.cosine > one.chance + CLEARLY for one in found)
    places = [max(0.0, one.place) for one in found if math.isfinite(one.place)]
    explained = f"; the average of a slot's position explains {_span(places, '.0%')} of its square" if places else ""
    distance, distinct = [one.distance for one in found], [one.distinct / one.compared for one in found]
    read = "as each picture's own tokens have updated them" if compared[0].inference == "transient" else "as stored"
    return (
        f"{name}: slots are clearly nearer to single training tokens than random mixtures of tokens are in {nearer} of "
        f"{len(found)} layers. Their distance from the mean candidate is {_span(distance)} times that of a single "
        f"token's candidate{explained}. {_span(distinct, '.0%')} of the slots have different nearest tokens. "
        f"Evaluation reads the slots {read}."
    )


def _table(name: str, label: str, compared: list[CachedLayer], called: dict[str, str]) -> str:
    rows = [
        [
            f"<code>{escape(called[layer.name])}</code>",
            f"{_contents(layer).compared:.0f}",
            decimal(_contents(layer).cosine),
            decimal(_contents(layer).chance),
            decimal(_contents(layer).raw_cosine),
            decimal(_contents(layer).distance),
            decimal(_contents(layer).place),
            f"{_contents(layer).distinct:.1f}",
        ]
        for layer in compared
    ]
    caption = (
        f"{name}: slots compared with {_contents(compared[0]).tokens:,.0f} training tokens per layer, means over "
        "slots. "
        "Nearest: cosine with the nearest candidate. Chance: the same for random mixtures of candidates. As tokens: "
        "cosine with the summary tokens themselves, which lie in another space. Distance: from the mean candidate, in "
        "units of a single token's distance. Position: share of the squared distance that the mean over the slot's "
        "position explains (1: all; below 0: none). Different: effective number of distinct tokens that are nearest to "
        f"some slot. From {label}/explain.json."
    )
    head = ["layer", "slots", "nearest", "chance", "as tokens", "distance", "position", "different"]
    return table(caption, head, rows)
