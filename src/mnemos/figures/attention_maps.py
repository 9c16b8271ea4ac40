"""o_self and o_mem as images, on pictures of the test split: the view of Cached Transformers' Figure 4."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .markup import decimal, escape, figure, listed, missing, paragraph, plural, short, table
from .names import shortened
from .results import Cached, Comparison, Explained
from .style import INK, MUTED, panel, raster_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LABELS = 7.3, 0.95  # inches: the drawing, and at its left the names of its rows
MARGINS = 0.34  # inches above and below in a panel without a title
# In images: above the pictures for their classes, between columns, between two maps of a layer and before a layer.
TOP, GAP, BETWEEN, BEFORE = 0.36, 0.12, 0.06, 0.26


def section(comparison: Comparison) -> str:
    """A figure and a table for the first run of each cached arm that looked at pictures, or why there are none."""
    parts, whys = [], []
    for index, name in enumerate(comparison.arms):
        found = [(run.label, run.explained) for run in comparison.runs.get(name, ()) if run.explained]
        drawn = [one for one in found if one[1].pictures is not None]
        if drawn:
            parts.append(_arm(index, name, *drawn[0]))
        elif name in comparison.with_memory():
            why = found[0][1].left if found else "no run recorded what its branches do (explain.json)"
            whys.append(f"{name}: {why}, so there are no images of its branches.")
    return "\n".join(parts + [missing(why) for why in whys])


def _arm(index: int, name: str, label: str, found: Explained) -> str:
    mapped = [layer for layer in found.layers if layer.self_map is not None]
    middle = found.layers[found.middle] if found.middle is not None else mapped[len(mapped) // 2]
    chosen = [layer for layer in mapped if layer in (mapped[0], middle, mapped[-1])]
    called = dict(zip((one.name for one in found.layers), shortened([one.name for one in found.layers]), strict=True))
    rows = listed([called[layer.name] for layer in chosen])
    assert found.pictures is not None
    count = len(found.pictures)
    image = (WIDTH - LABELS - 0.1) / (count * (1 + GAP) - GAP)
    drawing = panel(
        f"maps-{index}",
        "",
        partial(draw, found=found, chosen=chosen, called=called),
        (WIDTH, _down(len(chosen)) * image + MARGINS),
        LABELS,
        f"Pictures and their maps of o_self and o_mem in {rows} of {name}",
    )
    which = "the first, a middle and the last cached layer" if len(chosen) == 3 else "its cached layers"
    caption = (
        f"{name}: what the two branches make of {plural(count, 'test picture')}, of as many classes as there are. "
        f"Below each, for {rows} ({which}): the mean over heads and channels of self-attention's output and of the "
        "cached branch's, at every token. Each is scaled to [0, 1] by itself, so that patterns compare and sizes do "
        "not; dark is small. Figure 4 of Cached Transformers shows the same of middle layers. An arrow names the class "
        f"that the model took a picture for, where it is another. From {label}/explain.safetensors."
    )
    left = [f"{called[one.name]}: {one.maps['left']}" for one in found.layers if one.maps and "left" in one.maps]
    notes = [missing(f"Left out: {'; '.join(left)}.")] if left else []
    text = paragraph(_summary(name, mapped, middle, called))
    return "\n".join([text, figure([drawing], caption, kind="full"), _table(name, label, mapped, called), *notes])


def _numbers(layer: Cached, key: str) -> float:
    return float(layer.maps[key]) if layer.maps else np.nan


def _correlations(layer: Cached) -> np.ndarray:
    return np.array(layer.maps["correlation"] if layer.maps else [], float)


def _summary(name: str, mapped: list[Cached], middle: Cached, called: dict[str, str]) -> str:
    """What the numbers say of the paper's reading, that the two branches are complementary."""
    found = _correlations(middle)
    parts = [
        f"{name}: in the middle layer ({called[middle.name]}) the two maps of a picture correlate by "
        f"{decimal(found.mean(), signed=True)} on average, from {decimal(found.min(), signed=True)} to "
        f"{decimal(found.max(), signed=True)}."
    ]
    everywhere = np.concatenate([_correlations(layer) for layer in mapped])
    parts.append(
        f"Over all layers and pictures they run against each other (below −0.5) in {(everywhere < -0.5).mean():.0%} "
        f"and alike (above 0.5) in {(everywhere > 0.5).mean():.0%}."
    )
    weights = np.array([_numbers(layer, "weight") for layer in mapped])
    low, high = f"{weights.min():.0%}", f"{weights.max():.0%}"
    span = low if low == high else f"{low} to {high}"
    parts.append(f"By size the cache gives {span} of what a layer passes on.")
    same = [called[layer.name] for layer in mapped if _numbers(layer, "memory_own") < 0.25]
    if same:
        parts.append(f"In {listed(same)} o_mem is nearly one image, whatever the picture.")
    return " ".join(parts)


def _table(name: str, label: str, mapped: list[Cached], called: dict[str, str]) -> str:
    rows = []
    for layer in mapped:
        found = _correlations(layer)
        rows.append(
            [
                f"<code>{escape(called[layer.name])}</code>",
                " × ".join(str(n) for n in (layer.maps or {})["grid"]),
                decimal(float(np.mean(layer.share))),
                decimal(_numbers(layer, "weight")),
                decimal(found.mean(), signed=True),
                f"{decimal(found.min(), signed=True)} to {decimal(found.max(), signed=True)}",
                decimal(_numbers(layer, "self_own")),
                decimal(_numbers(layer, "memory_own")),
            ]
        )
    caption = (
        f"{name}: both branches in numbers, over the same pictures. Share by size: the root mean square of σ(λ)·o_mem, "
        "as a part of it and that of (1 − σ(λ))·o_self. Correlation of the two maps of a picture, mean and range over "
        "pictures: branches that complement each other would keep it well below zero. Own: how much of a map's "
        f"variance differs between pictures at one place; the rest is one image that all of them get. From "
        f"{label}/explain.json."
    )
    head = ["layer", "grid", "mean σ(λ)", "share by size", "correlation", "range", "own, o_self", "own, o_mem"]
    return table(caption, head, rows)


def _down(layers: int) -> float:
    """Height of the drawing, in images."""
    return TOP + 1 + layers * (BEFORE + 2 + BETWEEN)


def draw(axes: "Axes", found: Explained, chosen: list[Cached], called: dict[str, str]) -> None:
    """The pictures in a row, and below them for each layer the maps of o_self and of o_mem."""
    assert found.pictures is not None
    step = 1 + GAP
    axes.set_axis_off()
    labels, guesses, names = (found.about[key] for key in ("label", "guess", "names"))
    for i, picture in enumerate(found.pictures):
        raster_image(axes, picture, (i * step, TOP))
        _above(axes, i * step + 0.5, _class(names, labels[i]), _class(names, guesses[i]))
    down = TOP + 1
    for layer in chosen:
        down += BEFORE
        axes.text(-0.12, down + 1 + BETWEEN / 2, called[layer.name], ha="right", va="center", color=INK[0])
        for what, maps in (("self", layer.self_map), ("mem", layer.memory_map)):
            assert maps is not None
            axes.text(-0.12, down + 0.5, f"o_{what}", ha="right", va="center", color=MUTED[0])
            for i, one in enumerate(maps):
                raster_image(axes, grey(one), (i * step, down))
            down += 1 + BETWEEN
        down -= BETWEEN
    axes.set_xlim(0, len(found.pictures) * step - GAP)
    axes.set_ylim(_down(len(chosen)), 0)


def grey(one: np.ndarray) -> np.ndarray:
    """A map [h, w] scaled to [0, 1] by itself, as bytes [h, w, 1]; a constant or not finite one is middle grey."""
    low, high = float(one.min()), float(one.max())
    if not np.isfinite([low, high]).all() or high <= low:
        return np.full((*one.shape, 1), 128, np.uint8)
    return ((one - low) / (high - low) * 255).round().astype(np.uint8)[..., None]


def _class(names: list[str], label: int) -> str:
    return str(names[label]) if 0 <= label < len(names) else str(label)


def _above(axes: "Axes", x: float, label: str, guess: str) -> None:
    text = short(label, 12) if label == guess else f"{short(label, 12)}\n→ {short(guess, 12)}"
    axes.text(x, TOP - 0.07, text, ha="center", va="bottom", fontsize=7.5, color=MUTED[0], linespacing=1.15)
