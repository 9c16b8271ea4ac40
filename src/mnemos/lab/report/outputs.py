"""What the first run of each variant puts out: examples, attention to a source, photos with detections."""

import base64
import difflib
from typing import NamedTuple

from mnemos.types import JSONObject

from .markup import decimal, escape, figure, paragraph, plural, table
from .read import Results
from .run_records import DETECTIONS, RunRecord

Lines = list[tuple[str, str, str]]  # (what is beside it, given, found)
MOST = 40  # rows of a table: a bad translation may repeat a word until its length is reached


class _About(NamedTuple):
    """The description of a kind of example: see `mnemos.lab.tasks.task.Task.artifacts`.

    exact: an output should equal what was given, and is bold where not. compared: the words in which an output differs
    from that of the first variant are bold.
    """

    title: str
    given: str
    found: str
    text: str
    exact: bool
    beside: str
    compared: bool


def example_section(results: Results) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none."""
    tables: dict[tuple[_About, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            for about, lines in _examples(run.artifacts):
                rows = tuple(line[:2] for line in lines)
                tables.setdefault((about, rows), {})[name] = [line[2] for line in lines]
    parts = []
    for (about, rows), variants in tables.items():
        several = about.compared and len(variants) > 1
        caption = (
            f"{about.text} First what was {about.given}, then what the first run of each variant {about.found}"
            f"{'; bold where it differs' if about.exact else ''}"
            f"{'; bold: words that the first variant does not have there' if several else ''}. From result.json."
        )
        cells = []
        for i, (beside, given) in enumerate(rows):
            first, *others = (lines[i] for lines in variants.values())
            answers = [_marked(about, given, first), *(_marked(about, given, other, first) for other in others)]
            cells.append([escape(beside)] * bool(about.beside) + [escape(given), *answers])
        head = [about.beside] * bool(about.beside) + [about.given, *variants]
        kind = "examples" if about.exact else "examples texts"
        parts += [paragraph(about.title), table(caption.strip(), head, cells, kind)]
    return "\n".join(parts)


def _marked(about: _About, given: str, found: str, first: str | None = None) -> str:
    text = escape(found) or "nothing"
    if about.compared and first is not None:
        return _differing(found, first) or text
    return text if given == found or not about.exact else f"<b>{text}</b>"


def _differing(found: str, first: str) -> str:
    """The words of a text, those bold that are not at their place in another text."""
    words, others = found.split(), first.split()
    same = [False] * len(words)
    for block in difflib.SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks():
        same[block.a : block.a + block.size] = [True] * block.size
    shown = (escape(word) if kept else f"<b>{escape(word)}</b>" for word, kept in zip(words, same, strict=True))
    return " ".join(shown)


def _examples(result: JSONObject) -> list[tuple[_About, Lines]]:
    """(its description, [(given, found)]) of each entry that the result describes as examples."""
    described = result.get("examples")
    found = []
    for entry, about in described.items() if isinstance(described, dict) else ():
        if isinstance(about, dict) and isinstance(result.get(entry), list):
            keys = ("title", "given", "found", "about", "beside")
            title, given, answer, text, beside = (str(about.get(key, "")) for key in keys)
            lines = [
                (str(one.get(beside, "")), str(one.get(given, "")), str(one.get(answer, "")))
                for one in result[entry]
                if isinstance(one, dict)
            ]
            exact, compared = about.get("exact") is not False, about.get("compared") is True
            found.append((_About(title, given, answer, text, exact, beside, compared), lines))
    return [one for one in found if one[1]]


def alignment_section(results: Results) -> str:
    """A table for the first run of each variant whose result.json has an alignment; "" if none has."""
    parts = []
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            found = run.artifacts.get("alignment")
            if isinstance(found, dict) and {"rows", "columns", "weights", "about"} <= {*found}:
                parts += _shades(name, found)
    return "\n".join(parts)


def _shades(name: str, found: JSONObject) -> list[str]:
    rows, columns, weights = found["rows"], found["columns"], found["weights"]
    most = max((weight for row in weights for weight in row), default=0.0) or 1.0
    if len(rows) > MOST:
        found = found | {"about": f"{found['about']} The first {MOST} of {len(rows)} rows are shown."}
        rows, weights = rows[:MOST], weights[:MOST]
    cells = [[escape(word), *(_shade(weight, most) for weight in row)] for word, row in zip(rows, weights, strict=True)]
    caption = f"{name}: {found['about']} The darkest cell is {most:.2f}. From result.json."
    return [paragraph(f"{name}: what each word was read from"), table(caption, ["", *columns], cells, "alignment")]


def _shade(weight: float, most: float) -> str:
    names = f'role="img" aria-label="{weight:.2f}" title="{weight:.2f}"'
    return f'<i class="weight" {names} style="--weight:{100 * weight / most:.0f}%"></i>'


def detection_section(results: Results) -> str:
    """For the first run of each variant that has them: its photos, and a table of its classes; "" if none has any."""
    parts = []
    for name in results.names:
        run = next((one for one in results.runs_of(name) if one.detected or _classes(one)), None)
        if run is not None:
            parts += [_photos(name, run)] * bool(run.detected) + [_by_class(name, run)] * bool(_classes(run))
    return "\n".join(parts)


def _photos(name: str, run: RunRecord) -> str:
    panels = [_img(photo, f"{file}: annotations and detections of {name}") for file, photo in run.detected]
    caption = (
        f"{name}: the first {plural(len(panels), 'scored photo')} with an object, not selected. Left: the annotated "
        "objects. Right: the detections with a score of at least 0.3, with their scores. A class has one colour. From "
        f"{run.label}/{DETECTIONS}."
    )
    return figure(panels, caption, kind="pairs")


def _img(photo: bytes, label: str) -> str:
    return f'<img alt="{escape(label)}" src="data:image/jpeg;base64,{base64.b64encode(photo).decode()}">'


def _classes(run: RunRecord) -> list[JSONObject]:
    """The figures of each class. Runs before 2026-11-23 have them as text, and as examples, which show them."""
    found = run.artifacts.get("by_class")
    if not isinstance(found, list) or "by_class" in (run.artifacts.get("examples") or {}):
        return []
    return [one for one in found if isinstance(one, dict) and "class" in one]


def _by_class(name: str, run: RunRecord) -> str:
    classes = _classes(run)
    columns = [column for column in classes[0] if column != "class"]
    shown = [one for one in classes if any(one.get(column) is not None for column in columns)]
    rows = [[escape(one["class"]), *(_precision(one.get(column)) for column in columns)] for one in shown]
    absent = len(classes) - len(shown)
    left_out = f" {absent:,} of {len(classes):,} classes, of which they have no object, are left out." if absent else ""
    caption = (
        f"{name}: average precision of each class on the scored pictures of the test split, in per cent, by overlap "
        "and by size of the objects as in the table of metrics; – where the pictures have no such object."
        f"{left_out} From {run.label}/result.json."
    )
    return table(caption, ["class", *columns], rows, "classes")


def _precision(value: object) -> str:
    return decimal(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "–"
