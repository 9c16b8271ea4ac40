"""Pictures of claims, as PNG files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mnemos.atomic import write_bytes
from mnemos.figures.style import raster

DPI = 160


def png(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> Path:
    """Write a PNG of `size` inches that `draw(figure)` lays out; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, raster(size, DPI, draw, {"font.size": 11.0}))
    return path
