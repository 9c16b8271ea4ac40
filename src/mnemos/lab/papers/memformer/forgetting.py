"""Figure 4: a slot without input drifts to its terminal state, measured with the library's biased memory norm."""

import math
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from mnemos.lab.report.style import INK, MUTED, RULE
from mnemos.ops.slot_memory import biased_memory_norm

from ..claim import Claim
from ..drawing import png, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 128  # D
STEPS = 1024  # writes without input
NOISE = 2**-23  # the precision of float32, as a distance in units of ρ
CIRCLE = 0.3  # ‖v_bias‖/ρ in the drawing of the circle
TURNS = 16  # writes in the drawing of the circle


class Setting(NamedTuple):
    """A radius ρ (None: √D), and ‖v_bias‖."""

    name: str
    radius: float | None
    length: float


_DEFAULT = math.sqrt(WIDTH)
SETTINGS = (
    Setting("ρ = √D, ‖v‖ = .03 ρ (our start)", None, 0.03 * _DEFAULT),
    Setting("ρ = √D, ‖v‖ = ρ", None, _DEFAULT),
    Setting("ρ = 1, ‖v‖ = 1.15 (the paper's)", 1.0, 1.15),
    Setting("ρ = 1, ‖v‖ = 3.20 (the paper's)", 1.0, 3.20),
)
STARTS = {
    "near": math.radians(30),
    "across": math.radians(90),
    "opposite": math.radians(175),
}  # from the terminal state
_LINES: dict[str, Literal[":", "--", "-"]] = {"near": ":", "across": "--", "opposite": "-"}


def figure4(claim: Claim, options: Options) -> Finding:
    """Figure 4: the drift on a circle, as in the paper, and the remaining distance by write, for several ‖v_bias‖."""
    if options.recipes_only:
        return Finding([], [_ABOUT])
    table = Table(
        f"Remaining distance to the terminal state after writes without input (D = {WIDTH})",
        ["", "start", "after 1", "after 8", "after 32", "writes to half of it", "writes to float32 precision"],
    )
    found: dict[tuple[str, str], list[float]] = {}
    for setting in SETTINGS:
        for start, angle in STARTS.items():
            radius = setting.radius or _DEFAULT
            left = distances(drift(WIDTH, radius, setting.length, angle, STEPS), radius)
            found[setting.name, start] = left
            kept = [f"{100 * left[n] / left[0]:.3g}%" if left[n] > NOISE else "nothing" for n in (1, 8, 32)]
            table.add(setting.name, start, *kept, _first(left, left[0] / 2), _first(left, NOISE))
    path = png(options.out / "figure4.png", (10.0, 4.4), partial(_lay_out, found=found))
    return Finding([table], [_ABOUT], [path])


_ABOUT = (
    "Each slot starts on the sphere of radius ρ at 30°, 90° or 175° from its terminal state T. Each write applies "
    "biased_memory_norm only, in float64. Near T, each write multiplies the distance by 1/(1 + ‖v‖/ρ). Opposite to T, "
    "the slot hardly moves at first, unless ‖v‖ > ρ: then it jumps across the centre. Distances are Euclidean; "
    f"{NOISE:.1e} ρ is the precision of float32. A dash: not reached within {STEPS} writes."
)


def drift(width: int, radius: float, length: float, angle: float, steps: int) -> Tensor:
    """The positions [steps + 1, width] of a slot that starts at `angle` (radians) from its terminal state, axis 0."""
    bias = torch.zeros(1, width, dtype=torch.float64)
    bias[0, 0] = length
    slot = torch.zeros(1, 1, width, dtype=torch.float64)
    slot[0, 0, :2] = radius * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    found = [slot]
    for _ in range(steps):
        found.append(biased_memory_norm(found[-1], bias, radius))
    return torch.cat(found)[:, 0]


def distances(slots: Tensor, radius: float) -> list[float]:
    """The distance of each position of a drift to the terminal state, in units of the radius."""
    end = torch.zeros_like(slots[0])
    end[0] = radius
    return ((slots - end).norm(dim=-1) / radius).tolist()


def _first(values: list[float], bound: float) -> float | None:
    """The first write after which the distance is at most `bound`; None if there is none."""
    return next((n for n, value in enumerate(values) if value <= bound), None)


def _lay_out(figure: "Figure", found: dict[tuple[str, str], list[float]]) -> None:
    figure.text(0.02, 0.93, "On a circle", fontsize=15)
    _circle(figure.add_axes((0.02, 0.03, 0.36, 0.87)))
    axes = figure.add_axes((0.47, 0.13, 0.5, 0.6))
    for i, setting in enumerate(SETTINGS):
        for start in STARTS:
            left = found[setting.name, start]
            axes.plot(
                range(len(left)), [max(x, NOISE / 4) for x in left], color=variant_colour(i), linestyle=_LINES[start]
            )
    axes.set_yscale("log")
    axes.set_ylim(NOISE / 2, 3)
    axes.set_xlim(0, 40)
    axes.axhline(NOISE, color=MUTED[0], linewidth=0.8)
    axes.text(39.7, NOISE * 1.3, "float32 precision", ha="right", fontsize=9, color=MUTED[0])
    axes.grid(axis="y", color=RULE[0])
    figure.text(0.47, 0.93, "Distance to the terminal state, in ρ", fontsize=15)
    axes.set_xlabel("writes without input")
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], color=variant_colour(i), label=setting.name) for i, setting in enumerate(SETTINGS)]
    keys += [Line2D([], [], color=INK[0], linestyle=line, label=f"from {start}") for start, line in _LINES.items()]
    figure.legend(handles=keys[:4], loc="lower left", bbox_to_anchor=(0.46, 0.75), ncol=2, frameon=False, fontsize=9)
    axes.legend(handles=keys[4:], loc="upper right", frameon=False, fontsize=9, bbox_to_anchor=(1.0, 0.78))


def _circle(axes: "Axes") -> None:
    """Draw slots a and b as in the paper: the same writes turn b less than a."""
    from matplotlib.patches import Circle

    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.set_xlim(-1.5, 1.5)
    axes.set_ylim(-1.45, 1.45)
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=MUTED[0], linewidth=0.8))
    for i, (name, angle) in enumerate((("$m_a$", math.radians(75)), ("$m_b$", math.radians(-172)))):
        slots = drift(2, 1.0, CIRCLE, abs(angle), TURNS)
        slots[:, 1] *= math.copysign(1, angle)
        x, y = slots.T.tolist()
        axes.plot(x, y, color=variant_colour(i + 1), marker="o", markersize=5, linewidth=0)
        axes.annotate(
            "",
            (x[0] + CIRCLE, y[0]),
            (x[0], y[0]),
            arrowprops={"arrowstyle": "->", "color": variant_colour(i + 1), "linewidth": 1.4},
        )
        axes.text(1.2 * x[0], 1.2 * y[0], name, ha="center", va="center", color=variant_colour(i + 1), fontsize=14)
    axes.plot([1], [0], marker="*", markersize=14, color=INK[0], linewidth=0)
    axes.text(1.14, 0, "T", va="center", fontsize=14)
    axes.text(0, -1.32, f"{TURNS} writes without input, ‖v‖ = {CIRCLE:g} ρ", ha="center", fontsize=11, color=MUTED[0])
