"""Names of points in a figure, placed so that none covers another name, a point, its bar or a line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mnemos.lab.report.style import MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 7.0  # of the letters, in points
_WIDTH = 0.56 * SIZE  # of a letter on average, with a margin, because the page sets names in a font of its own
_GAP = 4.0  # between a point and its name
_NEAR = 1.5 * SIZE  # a name that is moved up or down by more has a line to its point


class Point(NamedTuple):
    """A point with a name, in data coordinates. spread: half the height of its bar."""

    name: str
    x: float
    y: float
    spread: float = 0.0


class Box(NamedTuple):
    """A rectangle, in points from the lower left of the figure."""

    left: float
    low: float
    right: float
    high: float

    def meets(self, other: "Box") -> bool:
        """Whether the two have a part in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.low < other.high and other.low < self.high

    def inside(self, other: "Box") -> bool:
        """Whether this one lies in the other."""
        across = other.left <= self.left and self.right <= other.right
        return across and other.low <= self.low and self.high <= other.high


def label(axes: "Axes", points: Sequence[Point], lines: Sequence[float] = ()) -> list[Box]:
    """Write the names beside their points, and not over horizontal lines at `lines`; returns the boxes of the names.

    Call it when the limits of the axes are final. Points are taken from top to bottom. A name goes to the right or the
    left of its point, as near to its height as there is room, and a line leads to a distant one. A name without room
    is left out, because the legend has it too. Cost: O(points² · places).
    """
    scale = 72 / axes.figure.dpi
    frame = Box(*(axes.transAxes.transform([(0, 0), (1, 1)]) * scale).ravel())
    placed = [(point, _around(axes, point, scale)) for point in sorted(points, key=lambda point: -point.y)]
    taken, written = [box for _, box in placed], []
    for line in lines:
        y = _height(axes, line, scale)
        taken.append(Box(frame.left, y - 0.5, frame.right, y + 0.5))
    for point, around in placed:
        box = _free(point.name, around, frame, taken)
        if box is None:
            continue
        taken.append(box)
        written.append(box)
        x, y = (around.left + around.right) / 2, _height(axes, point.y, scale)
        offset = (box.left - x, (box.low + box.high) / 2 - y)
        side = (0.0 if box.left > x else 1.0, 0.5)  # where the line meets the name
        leader = {"arrowstyle": "-", "color": MUTED[0], "linewidth": 0.4, "shrinkA": 0, "shrinkB": 2, "relpos": side}
        axes.annotate(
            point.name,
            (point.x, point.y),
            xytext=offset,
            textcoords="offset points",
            va="center",
            fontsize=SIZE,
            color=MUTED[0],
            arrowprops=leader if abs(offset[1]) > _NEAR else None,
        )
    return written


def _height(axes: "Axes", y: float, scale: float) -> float:
    """A height in data coordinates, in points from the bottom of the figure."""
    return float(axes.transData.transform((axes.get_xlim()[0], y))[1] * scale)


def _around(axes: "Axes", point: Point, scale: float) -> Box:
    """The box of a point's marker and bar."""
    ends = [(point.x, point.y - point.spread), (point.x, point.y + point.spread)]
    (x, low), (_, high) = axes.transData.transform(ends) * scale
    return Box(x - 3, low - 3, x + 3, high + 3)


def _free(name: str, around: Box, frame: Box, taken: Sequence[Box]) -> Box | None:
    """The nearest place of a name beside a box where nothing else is; None if there is none."""
    width, middle = len(name) * _WIDTH, (around.low + around.high) / 2
    for shift in range(round(frame.high - frame.low)):
        for y in (middle + shift, middle - shift):
            for left in (around.right + _GAP - 3, around.left - _GAP + 3 - width):
                box = Box(left, y - SIZE / 2, left + width, y + SIZE / 2)
                if box.inside(frame) and not any(box.meets(other) for other in taken):
                    return box
    return None
