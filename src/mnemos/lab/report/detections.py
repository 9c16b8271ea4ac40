"""Detectors: photos with what is there and what was found, side by side, and the average precision of each class."""

import base64
from pathlib import Path

from mnemos.types import JSONObject

from .markup import decimal, escape, figure, plural, table
from .results import Comparison, RunRecord

FOLDER = "detections"  # of a run: photos with annotations on the left and detections on the right


def section(comparison: Comparison) -> str:
    """For the first run of each variant that has them: its photos, and a table of its classes; "" if none has any."""
    parts = []
    for name in comparison.variants:
        run = next((one for one in comparison.runs.get(name, ()) if one.detected or _classes(one)), None)
        if run is not None:
            parts += [_photos(name, run)] * bool(run.detected) + [_by_class(name, run)] * bool(_classes(run))
    return "\n".join(parts)


def read_detected(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """(name, bytes) of each photo that a run has drawn, in the order of their numbers."""
    files = sorted((folder / FOLDER).glob("*.jpg"), key=lambda file: (len(file.stem.split("-")[0]), file.stem))
    return tuple((file.name, file.read_bytes()) for file in files)


def _photos(name: str, run: RunRecord) -> str:
    panels = [_img(photo, f"{file}: annotations and detections of {name}") for file, photo in run.detected]
    caption = (
        f"{name}: the first {plural(len(panels), 'scored photo')} with an object, not selected. Left: the annotated "
        "objects. Right: the detections with a score of at least 0.3, with their scores. A class has one colour. From "
        f"{run.label}/{FOLDER}."
    )
    return figure(panels, caption, kind="pairs")


def _img(photo: bytes, label: str) -> str:
    return f'<img alt="{escape(label)}" src="data:image/jpeg;base64,{base64.b64encode(photo).decode()}">'


def _classes(run: RunRecord) -> list[JSONObject]:
    """The figures of each class. Runs before 2026-11-23 have them as text, and as examples, which show them."""
    found = (run.result or {}).get("by_class")
    if not isinstance(found, list) or "by_class" in ((run.result or {}).get("examples") or {}):
        return []
    return [one for one in found if isinstance(one, dict) and "class" in one]


def _by_class(name: str, run: RunRecord) -> str:
    classes = _classes(run)
    columns = [column for column in classes[0] if column != "class"]
    shown = [one for one in classes if any(one.get(column) is not None for column in columns)]
    rows = [[escape(one["class"]), *(_cell(one.get(column)) for column in columns)] for one in shown]
    absent = len(classes) - len(shown)
    left_out = f" {absent:,} of {len(classes):,} classes, of which they have no object, are left out." if absent else ""
    caption = (
        f"{name}: average precision of each class on the scored pictures of the test split, in per cent, by overlap "
        "and by size of the objects as in the table of metrics; – where the pictures have no such object."
        f"{left_out} From {run.label}/result.json."
    )
    return table(caption, ["class", *columns], rows, "classes")


def _cell(value: object) -> str:
    return decimal(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "–"
