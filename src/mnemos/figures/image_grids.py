"""Pictures that a model wrote, byte by byte, as grids: its own, and completions of half pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.atomic import write_bytes
from mnemos.data.pictures import pillow
from mnemos.types import InputError

from .markup import escape, figure, plural
from .results import Comparison, RunRecord, Written

COLUMNS = 12  # of samples
PIXELS = 960  # about how wide a grid is drawn
GAP = 0.08  # between pictures, in pictures
_REMEDY = "run mnemos sample on it again"


def section(comparison: Comparison) -> str:
    """Samples and completions of the first run of each variant that has some."""
    parts = []
    for name in comparison.arms:
        run = next((run for run in comparison.runs.get(name, ()) if run.written is not None), None)
        if run is not None:
            parts.append(_arm(name, run))
    return "\n".join(parts)


def _arm(name: str, run: RunRecord) -> str:
    found, parts = run.written, []
    assert found is not None
    how = f"temperature {found.about.get('temperature', 1):g}, seed {found.about.get('seed', 0)}"
    where = f"From {run.label}/samples.safetensors; mnemos sample {run.label} draws others."
    if found.samples is not None:
        caption = (
            f"{name}: {plural(len(found.samples), 'picture')} that it wrote, not chosen among others ({how}). {where}"
        )
        parts.append(figure([_img(own(found.samples), f"Pictures written by {name}")], caption, kind="full"))
    if found.completions is not None:
        ways = plural(found.completions.shape[1], "way")
        caption = (
            f"{name}: test pictures of which it saw the upper half (first row), completed in {ways}, and as they are "
            f"(last row); none chosen ({how}). {where}"
        )
        parts.append(figure([_img(completed(found), f"Half pictures completed by {name}")], caption, kind="full"))
    return "\n".join(parts)


def _img(grid: np.ndarray, label: str) -> str:
    source = base64.b64encode(png(grid)).decode()
    return f'<img class="pixels" alt="{escape(label)}" src="data:image/png;base64,{source}">'


def own(samples: np.ndarray) -> np.ndarray:
    """Pictures [N, H, W, C] in rows of at most `COLUMNS`."""
    columns = min(COLUMNS, len(samples))
    rows = -(-len(samples) // columns)
    blank = np.zeros((rows * columns - len(samples), *samples.shape[1:]), np.uint8)
    return grid(np.concatenate([samples, blank]).reshape(rows, columns, *samples.shape[1:]), len(samples))


def completed(found: Written) -> np.ndarray:
    """A column a picture: what was given, its completions, and the picture itself."""
    assert found.originals is not None
    assert found.completions is not None
    seen = found.originals.copy()
    seen[:, int(found.about["given"]) :] = 128
    return grid(np.stack([seen, *found.completions.swapaxes(0, 1), found.originals]))


def grid(pictures: np.ndarray, count: int | None = None) -> np.ndarray:
    """Pictures [rows, columns, H, W, C] uint8 as one [.., .., 4], enlarged pixel by pixel, nothing between them.

    count: how many there are, where the last row is not full.
    """
    rows, columns, height, width, _ = pictures.shape
    scale = max(1, round(PIXELS / (columns * width * (1 + GAP))))
    gap = max(1, round(GAP * width * scale))
    page = np.zeros((rows * (height * scale + gap) - gap, columns * (width * scale + gap) - gap, 4), np.uint8)
    for i in range(rows):
        for j in range(columns if count is None else min(columns, count - i * columns)):
            large = pictures[i, j].repeat(scale, 0).repeat(scale, 1)
            top, left = i * (height * scale + gap), j * (width * scale + gap)
            place = page[top : top + height * scale, left : left + width * scale]
            place[..., :3], place[..., 3] = large, 255
    return page


def png(pixels: np.ndarray) -> bytes:
    """An image [H, W, 4] uint8 as a PNG file's bytes."""
    written = io.BytesIO()
    pillow().fromarray(pixels).save(written, "PNG", optimize=True)
    return written.getvalue()


def write_grids(folder: Path) -> list[Path]:
    """samples.png and completions.png beside a run's samples.safetensors; returns those there was something for."""
    found, files = read_written(folder), []
    if found is not None and found.samples is not None:
        files.append(folder / "samples.png")
        write_bytes(files[-1], png(own(found.samples)))
    if found is not None and found.completions is not None:
        files.append(folder / "completions.png")
        write_bytes(files[-1], png(completed(found)))
    return files


def read_written(folder: Path) -> Written | None:
    """What samples.json and samples.safetensors of a run hold, None where they are not. Raises InputError."""
    path = folder / "samples.json"
    if not path.is_file():
        return None
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        about: Any = json.loads(path.read_text(encoding="utf-8"))
        found = load_file(folder / "samples.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{path}: expected samples and samples.safetensors, found {error}; {_REMEDY}") from None
    fits = isinstance(about, dict) and isinstance(about.get("given"), int)
    for name, axes in (("samples", 4), ("originals", 4), ("completions", 5)):
        fits = fits and (name not in found or (found[name].ndim == axes and found[name].dtype == np.uint8))
    if not fits or ("completions" in found) != ("originals" in found):
        raise InputError(f"{path}: expected pictures as mnemos sample writes them, found others; {_REMEDY}")
    return Written(found.get("samples"), found.get("originals"), found.get("completions"), about)
