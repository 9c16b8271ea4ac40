"""What the stored caches hold after training, and whether that means anything.

The [Tm, Dm] matrix of each layer, its singular values and the similarity of its slots; the training patches that are
nearest to some slots.
"""

import math

import numpy as np

from mnemos.lab.evaluate.recorded import NO_PICTURES, CachedLayer, Left, SlotContents

from .charts import Axis, Chart, Series, still
from .image_grids import img, strips
from .markup import decimal, escape, figure, listed, missing, paragraph, plural, shortened, table
from .read import Results
from .run_records import RunRecord
from .style import NEGATIVE, POSITIVE

LARGEST = 192  # slots or channels drawn; with more, neighbours are averaged
LAYERS = 6  # layers drawn; with more, an even selection
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
        reach, (slots, channels) = _reach(cache), cache.shape
        units = _directions(cache)
        aloud = f"{called[label]} of {name}"
        panels += [
            _matrix(f"{called[label]}, to ±{reach:.2g}", pool(cache), reach, f"{slots} slots by {channels} channels"),
            _spectrum(f"cache-{index}-{place}", cache, f"Singular values of {aloud}"),
            _matrix("Similarity of slots", units @ units.T, 1.0, f"{slots} slots by {slots} slots"),
        ]
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


def _directions(cache: np.ndarray) -> np.ndarray:
    """The slots as unit vectors, or zeros, in at most LARGEST rows.

    The mean of a block of cosines is the product of mean unit vectors, so a long cache is pooled first.
    """
    norms = np.linalg.norm(cache, axis=1, keepdims=True)
    return pool(np.where(norms > 0, cache / np.where(norms > 0, norms, 1), 0), channels=cache.shape[1])


def _matrix(title: str, matrix: np.ndarray, end: float, about: str) -> str:
    """A panel: sign as hue and magnitude as opacity, for light and dark pages; values not finite are drawn as 0."""
    scaled = np.nan_to_num(np.clip(matrix / (end or 1.0), -1, 1))
    hues = [bytes.fromhex(pair[0].removeprefix("#")) for pair in (NEGATIVE, POSITIVE)]
    colours = np.where((scaled < 0)[..., None], *(np.frombuffer(hue, np.uint8) for hue in hues))
    pixels = np.concatenate([colours, (np.abs(scaled) * 255).round().astype(np.uint8)[..., None]], -1)
    image = img(pixels, f"{title}: {about}", "matrix")
    return f'<p class="title">{escape(title)}</p>{image}<p class="about">{escape(about)}</p>'


def _spectrum(slug: str, cache: np.ndarray, label: str) -> str:
    """A panel: the singular values divided by the largest, with the effective rank."""
    values = np.linalg.svd(cache, compute_uv=False) if np.isfinite(cache).all() else np.array([])
    if not values.size or values[0] == 0:
        return missing("The cache is zero everywhere." if values.size else "The cache has values that are not finite.")
    title = f"Singular values, effective rank {effective_rank(values):.1f}"
    axes = [Axis("rank of the value", ",.0f")]
    chart = Chart(slug, title, "share of the largest", [Series("", "ink")], [""], axes, label=label)
    chart.limits, chart.falls = (1e-4, 1.6), True
    for rank, share in enumerate(values / values[0], 1):
        chart.add(0, 0, max(float(share), 1e-4), rank)
    return still(chart, 320)


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


def slot_section(results: Results) -> str:
    """For each cached variant, patches and numbers of the first run with a slot comparison, or why there are none."""
    parts, whys = [], []
    for name in results.names:
        runs = [run for run in results.runs_of(name) if run.explained]
        found = [run for run in runs if _compared(run)]
        if found:
            parts.append(_slots(name, found[0]))
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


def _slots(name: str, run: RunRecord) -> str:
    assert run.explained is not None
    every = [layer.name for layer in run.explained.layers]
    called = dict(zip(every, shortened(every), strict=True))
    compared = _compared(run)
    chosen = [compared[i] for i in sorted({0, (len(compared) - 1) // 2, len(compared) - 1})]
    panels = [f'<p class="title">{escape(called[layer.name])}</p>{_patches(layer)}' for layer in chosen]
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


def _patches(layer: CachedLayer) -> str:
    """A row of patches for each slot, with faded surroundings; the cosine of the nearest behind it."""
    assert layer.patches is not None
    contents = _contents(layer)
    rows = []
    for i, (slot, patches) in enumerate(zip(contents.shown, layer.patches, strict=True)):
        rows.append((str(slot), [img(spotlit(one)) for one in patches], decimal(contents.nearest[i][0])[:-1]))
    return strips(rows)


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
