"""The stored cache after training: the [Tm, Dm] matrix of each layer, its singular values, and slot similarity."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .markup import figure, listed, missing, plural
from .names import shortened
from .results import Comparison, RunRecord
from .roles import writable
from .style import INK, NEGATIVE, POSITIVE, RULE, nothing, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 192  # slots or channels drawn; with more, neighbours are averaged
LAYERS = 6  # layers drawn; with more, an even selection


def section(comparison: Comparison) -> str:
    """For each cached variant, a figure of the first run that stored its caches, or a line that says none did."""
    parts = []
    for index, name in enumerate(comparison.variants):
        runs = comparison.runs.get(name, ())
        stored = [run for run in runs if run.caches]
        if why := _not_stored(runs):
            parts.append(missing(f"{name}: {why}."))
        elif stored:
            parts.append(_variant(index, name, stored))
        elif name in comparison.with_memory():
            parts.append(missing(f"{name}: no run has a caches.safetensors, so no cache can be drawn."))
    return "\n".join(parts)


def _not_stored(runs: Sequence[RunRecord]) -> str:
    """Why a variant's model stores no content of a cache; "" if it stores one, or has no gated cache."""
    grcs = [one for run in runs[:1] for one in writable(run.recipe.get("model")) if "preset" in one]
    if grcs and all(one.get("scope") == "stream" for one in grcs):
        return (
            "each stream has a cache of its own, which is part of the state that a stream carries; the model stores "
            "none, so there is none to draw. The controls of the state say whether it was used"
        )
    if grcs and not any(one.get("write", True) for one in grcs):
        return "its cache is never written, so it holds nothing that could be drawn"
    return ""


def _variant(index: int, name: str, stored: list[RunRecord]) -> str:
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
