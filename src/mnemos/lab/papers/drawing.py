"""Write the figures of claims as PNG files."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mnemos.atomic import write_bytes
from mnemos.lab.report.style import raster

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 160


def png(path: Path, size: tuple[float, float], draw: Callable[["Figure"], None]) -> Path:
    """Write a PNG of `size` inches, drawn by `draw(figure)`, and return its path. The file is written atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, raster(size, DPI, draw, {"font.size": 11.0}))
    return path
