"""What the first run of each variant puts out: examples, attention to a source, photos with detections."""

import base64
import difflib
from typing import NamedTuple

from mnemos.types import JSONObject

from .markup import decimal, escape, figure, paragraph, plural, table
from .read import Results
from .run_records import DETECTIONS, RunRecord

MOST = 40  # rows of a table: a bad translation may repeat a word until its length is reached


class _About(NamedTuple):
    """The description of a kind of example: see `mnemos.lab.tasks.task.Task.artifacts`.

    exact: an output should equal what was given, and is bold where not. compared: the words in which an output differs
    from that of the first variant are bold.
    """

    title: str
    given: str
    found: str
    about: str
    beside: str
    exact: bool
    compared: bool


def example_section(results: Results) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none."""
    # --- by kind and references: the outputs of each variant ---
    tables: dict[tuple[_About, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            described = run.artifacts.get("examples")
            for entry, fields in described.items() if isinstance(described, dict) else ():
                lines = run.artifacts.get(entry)
                if not isinstance(fields, dict) or not isinstance(lines, list):
                    continue
                texts = {key: str(fields.get(key, "")) for key in ("title", "given", "found", "about", "beside")}
                exact, compared = fields.get("exact") is not False, fields.get("compared") is True
                about = _About(exact=exact, compared=compared, **texts)
                lines = [line for line in lines if isinstance(line, dict)]
                references = tuple((str(line.get(about.beside, "")), str(line.get(about.given, ""))) for line in lines)
                if lines:
                    outputs = [str(line.get(about.found, "")) for line in lines]
                    tables.setdefault((about, references), {})[name] = outputs

    parts = []
    for (about, references), variants in tables.items():
        caption = f"{about.about} First what was {about.given}, then what the first run of each variant {about.found}"
        caption += "; bold where it differs" * about.exact
        caption += "; bold: words that the first variant does not have there" * (about.compared and len(variants) > 1)
        rows = []
        for i, (beside, given) in enumerate(references):
            first, *others = (outputs[i] for outputs in variants.values())
            cells = [_marked(about, given, first), *(_marked(about, given, other, first) for other in others)]
            rows.append([escape(beside)] * bool(about.beside) + [escape(given), *cells])
        head = [about.beside] * bool(about.beside) + [about.given, *variants]
        style = "examples" if about.exact else "examples texts"
        parts += [paragraph(about.title), table(f"{caption}. From result.json.".strip(), head, rows, style)]
    return "\n".join(parts)


def _marked(about: _About, given: str, output: str, first: str | None = None) -> str:
    text = escape(output) or "nothing"
    if about.compared and first is not None:
        return differing(output, first) or text
    return text if given == output or not about.exact else f"<b>{text}</b>"


def differing(text: str, other: str) -> str:
    """The words of a text, those bold that are not at their place in another text."""
    words = text.split()
    same = [False] * len(words)
    for block in difflib.SequenceMatcher(None, words, other.split(), autojunk=False).get_matching_blocks():
        same[block.a : block.a + block.size] = [True] * block.size
    return " ".join(
        escape(word) if alike else f"<b>{escape(word)}</b>" for word, alike in zip(words, same, strict=True)
    )


def alignment_section(results: Results) -> str:
    """A table for the first run of each variant whose result.json has an alignment; "" if none has."""
    parts = []
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            alignment = run.artifacts.get("alignment")
            if not isinstance(alignment, dict) or not {"rows", "columns", "weights", "about"} <= {*alignment}:
                continue
            words, weights = alignment["rows"], alignment["weights"]
            most = max((weight for row in weights for weight in row), default=0.0) or 1.0
            first = f" The first {MOST} of {len(words)} rows are shown." if len(words) > MOST else ""
            caption = f"{name}: {alignment['about']}{first} The darkest cell is {most:.2f}. From result.json."
            rows = [
                [escape(word), *(_shade(weight, most) for weight in row)]
                for word, row in zip(words[:MOST], weights[:MOST], strict=True)
            ]
            parts.append(paragraph(f"{name}: what each word was read from"))
            parts.append(table(caption, ["", *alignment["columns"]], rows, "alignment"))
    return "\n".join(parts)


def _shade(weight: float, most: float) -> str:
    names = f'role="img" aria-label="{weight:.2f}" title="{weight:.2f}"'
    return f'<i class="weight" {names} style="--weight:{100 * weight / most:.0f}%"></i>'


def detection_section(results: Results) -> str:
    """For the first run of each variant that has them: its photos, and a table of its classes; "" if none has any."""
    parts = []
    for name, run in results.first_runs(lambda run: run.detected or _classes(run)):
        parts += [_photos(name, run)] * bool(run.detected) + [_by_class(name, run)] * bool(_classes(run))
    return "\n".join(parts)


def _photos(name: str, run: RunRecord) -> str:
    panels = []
    for file, photo in run.detected:
        label, source = escape(f"{file}: annotations and detections of {name}"), base64.b64encode(photo).decode()
        panels.append(f'<img alt="{label}" src="data:image/jpeg;base64,{source}">')
    caption = (
        f"{name}: the first {plural(len(panels), 'scored photo')} with an object, not selected. Left: the annotated "
        "objects. Right: the detections with a score of at least 0.3, with their scores. A class has one colour. From "
        f"{run.label}/{DETECTIONS}."
    )
    return figure(panels, caption, "pairs")


def _classes(run: RunRecord) -> list[JSONObject]:
    rows = run.artifacts.get("by_class")
    return [one for one in rows if isinstance(one, dict) and "class" in one] if isinstance(rows, list) else []


def _by_class(name: str, run: RunRecord) -> str:
    classes = _classes(run)
    columns = [column for column in classes[0] if column != "class"]
    known = [one for one in classes if any(one.get(column) is not None for column in columns)]
    rows = [[escape(one["class"]), *(_precision(one.get(column)) for column in columns)] for one in known]
    caption = (
        f"{name}: average precision of each class on the scored pictures of the test split, in per cent, by overlap "
        "and by size of the objects as in the table of metrics; – where the pictures have no such object."
    )
    if absent := len(classes) - len(known):
        caption += f" {absent:,} of {len(classes):,} classes, of which they have no object, are left out."
    return table(f"{caption} From {run.label}/result.json.", ["class", *columns], rows, "classes")


def _precision(value: object) -> str:
    return decimal(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "–"
