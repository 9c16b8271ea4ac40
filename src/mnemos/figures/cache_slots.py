"""What the slots of the stored caches hold: the training patches nearest to them, and what the nearest are worth."""

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .markup import decimal, escape, figure, listed, missing, paragraph, table
from .names import shortened
from .results import Cached, Comparison, RunRecord
from .style import MUTED, panel, raster_image

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, LEFT, MARGINS = 2.6, 0.3, 0.56  # inches: a panel, its labels, above and below
GAP = 0.1  # between patches, in patches
CLEARLY = 0.02  # a cosine this much above chance's counts as above
MOSTLY = 0.8  # where its place explains more than this of a slot, the slot is its average


def section(comparison: Comparison) -> str:
    """Patches and numbers for the first run of each cached arm that compared its slots, or why there are none."""
    parts, whys = [], []
    for index, name in enumerate(comparison.arms):
        runs = [run for run in comparison.runs.get(name, ()) if run.explained]
        found = [run for run in runs if _compared(run)]
        if found:
            parts.append(_arm(index, name, found[0]))
        elif name in comparison.with_memory():
            whys.append(f"{name}: {_why(runs)}, so it is not known what its slots hold.")
    return "\n".join(parts + [missing(why) for why in whys])


def _compared(run: RunRecord) -> list[Cached]:
    return [layer for layer in run.explained.layers if layer.patches is not None] if run.explained else []


def _why(runs: list[RunRecord]) -> str:
    if not runs or runs[0].explained is None:
        return "no run recorded what its slots are near to (explain.json)"
    lefts = [layer.slots["left"] for layer in runs[0].explained.layers if layer.slots and "left" in layer.slots]
    return str(runs[0].explained.left or (lefts[0] if lefts else "its slots were not compared with anything"))


def _arm(index: int, name: str, run: RunRecord) -> str:
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
            panel(f"slots-{index}-{place}", called[layer.name], partial(draw, layer=layer), size, LEFT, aloud)
        )
    first = compared[0].slots or {}
    caption = (
        f"{name}: some slots of {listed([called[layer.name] for layer in chosen])}, a row a slot with its number, and "
        f"the patches of {first.get('images', 0):,.0f} training pictures whose tokens come nearest, one a picture, "
        "nearest first; the patch is the bright middle, and the cosine of the first stands at the right. A token is "
        "near by what it would write: the candidate of eq. 5 for that slot, with its gate wide open, against the slot, "
        "both less the mean candidate. The nearest are always something: the next table says whether they mean "
        f"anything. From {run.label}/explain.safetensors."
    )
    return "\n".join(
        [
            paragraph(_summary(name, compared, run)),
            figure(panels, caption, kind="small"),
            _table(name, run.label, compared, called),
        ]
    )


def _steps(count: int) -> float:
    return count * (1 + GAP) - GAP


def draw(axes: "Axes", layer: Cached) -> None:
    """A row of patches a slot, their surroundings faded."""
    assert layer.patches is not None
    assert layer.slots is not None
    axes.set_axis_off()
    rows, columns = layer.patches.shape[:2]
    for i, (slot, row) in enumerate(zip(layer.slots["shown"], layer.patches, strict=True)):
        down = i * (1 + GAP)
        axes.text(-0.15, down + 0.5, str(slot), ha="right", va="center", fontsize=8, color=MUTED[0])
        for j, patch in enumerate(row):
            raster_image(axes, spotlit(patch), (j * (1 + GAP), down))
        cosine = decimal(layer.slots["nearest"][i][0])[:-1]
        axes.text(_steps(columns) + 0.12, down + 0.5, cosine, va="center", fontsize=8, color=MUTED[0])
    axes.set_xlim(0, _steps(columns) + 1)
    axes.set_ylim(_steps(rows), 0)


def spotlit(patch: np.ndarray) -> np.ndarray:
    """A crop [h, w, C] uint8 whose middle half stays and whose rest fades into grey."""
    shown = (0.4 * patch + 0.6 * 128).round().astype(np.uint8)
    inside = tuple(slice(n // 4, n - n // 4) for n in patch.shape[:2])
    shown[inside] = patch[inside]
    return shown


def _number(layer: Cached, key: str) -> float:
    return float(layer.slots[key]) if layer.slots else math.nan


def _span(values: list[float], percent: bool = False) -> str:
    texts = [f"{v:.0%}" if percent else decimal(v) for v in (min(values), max(values))]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def _summary(name: str, compared: list[Cached], run: RunRecord) -> str:
    """Whether slots hold single patches, or averages and of what, in sentences that follow from the numbers."""
    above = [layer for layer in compared if _number(layer, "cosine") > _number(layer, "chance") + CLEARLY]
    places = [max(0.0, place) for layer in compared if math.isfinite(place := _number(layer, "place"))]
    averages = bool(places) and float(np.median(places)) > MOSTLY
    distance = _span([_number(layer, "distance") for layer in compared])
    if averages:
        parts = [f"{name}: a slot holds the average of the place in the picture that it is written from."]
    elif len(above) > len(compared) / 2:
        parts = [f"{name}: some slots hold something of single patches."]
    else:
        parts = [
            f"{name}: a slot holds an average, and the patches below are the nearest there are, not what it holds."
        ]
    parts.append(f"From the mean candidate slots lie {distance} times as far as a token's own candidate does.")
    if places:
        parts.append(
            f"Of that distance, squared, the average of a slot's place explains {_span(places, percent=True)}."
        )
    where = f"{len(above)} of {len(compared)} layers" if above else "no layer"
    parts.append(f"Slots are clearly nearer to single training tokens than random mixtures of tokens are in {where}.")
    distinct = [_number(layer, "distinct") / _number(layer, "compared") for layer in compared]
    if min(distinct) < 0.5:
        parts.append(
            f"Slots do not all differ: the nearest token is another in {_span(distinct, percent=True)} of them."
        )
    if any(layer.inference == "transient" for layer in compared):
        parts.append(
            "Evaluation does not read the slots as they are stored, but as each picture's tokens rewrite them."
        )
    return " ".join([*parts, _lifetime(run)]).strip()


def _lifetime(run: RunRecord) -> str:
    """How long a slot remembers, from the update gate at the last record."""
    if run.gates is None or not len(run.gates.step):
        return ""
    gates = run.gates.values["update.mean"][-1]
    gates = gates[(gates > 0) & (gates < 1)]
    if not gates.size:
        return ""
    halves = np.log(0.5) / np.log1p(-gates)
    span = " to ".join(dict.fromkeys(f"{n:.2g}" for n in (halves.min(), halves.max())))
    return f"By the update gate's mean at the last record, half of what a slot holds is from its last {span} updates."


def _table(name: str, label: str, compared: list[Cached], called: dict[str, str]) -> str:
    rows = [
        [
            f"<code>{escape(called[layer.name])}</code>",
            f"{_number(layer, 'compared'):.0f}",
            decimal(_number(layer, "cosine")),
            decimal(_number(layer, "chance")),
            decimal(_number(layer, "raw_cosine")),
            decimal(_number(layer, "distance")),
            decimal(_number(layer, "place")),
            f"{_number(layer, 'distinct'):.1f}",
        ]
        for layer in compared
    ]
    caption = (
        f"{name}: slots against {_number(compared[0], 'tokens'):,.0f} training tokens a layer, means over the slots "
        "compared. Nearest: cosine with the nearest candidate. Chance: the same for random mixtures of the candidates. "
        "As tokens: with the summary tokens themselves, in whose space slots do not lie. Distance: from the mean "
        "candidate, a token's own being 1. Place: how much of its square the mean over the place that the slot is "
        "written from explains (1: all; below 0: none). Different: effective number of tokens that are the nearest of "
        f"some slot. From {label}/explain.json."
    )
    head = ["layer", "slots", "nearest", "chance", "as tokens", "distance", "place", "different"]
    return table(caption, head, rows)
