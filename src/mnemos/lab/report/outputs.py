"""What the first run of each variant puts out: examples, detections, generated pictures."""

import base64
import difflib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mnemos.atomic import write_bytes
from mnemos.errors import plural
from mnemos.types import JSONObject

from .markup import decimal, escape, figure, img, paragraph, png, table
from .read import Results
from .run_records import DETECTIONS, Generated, RunRecord, read_generated

COLUMNS = 12  # of generated pictures
PIXELS = 960  # approximate width of a grid of pictures
GAP = 0.08  # between pictures, in units of a picture


class _Examples(NamedTuple):
    """How examples of one kind are described (`Task.artifacts`). exact: an output should equal what was given, and is
    bold where not. compared: bold are the words in which it differs from that of the first variant.
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
    # --- by description and references: the outputs of each variant ---
    tables: dict[tuple[_Examples, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            described = run.artifacts.get("examples")
            for entry, fields in described.items() if isinstance(described, dict) else ():
                lines = run.artifacts.get(entry)
                if not isinstance(fields, dict) or not isinstance(lines, list):
                    continue
                texts = {key: str(fields.get(key, "")) for key in ("title", "given", "found", "about", "beside")}
                exact, compared = fields.get("exact") is not False, fields.get("compared") is True
                about = _Examples(exact=exact, compared=compared, **texts)
                lines = [line for line in lines if isinstance(line, dict)]
                references = tuple((str(line.get(about.beside, "")), str(line.get(about.given, ""))) for line in lines)
                if lines:
                    outputs = [str(line.get(about.found, "")) for line in lines]
                    tables.setdefault((about, references), {})[name] = outputs

    parts = []
    for (about, references), variants in tables.items():

        def marked(reference: str, output: str, first: str | None, about: _Examples = about) -> str:
            text = escape(output) or "nothing"
            if about.compared and first is not None:
                return differing(output, first) or text
            return text if reference == output or not about.exact else f"<b>{text}</b>"

        caption = f"{about.about} First what was {about.given}, then what the first run of each variant {about.found}"
        caption += "; bold where it differs" * about.exact
        caption += "; bold: words that the first variant does not have there" * (about.compared and len(variants) > 1)
        rows = []
        for i, (beside, reference) in enumerate(references):
            first, *others = (outputs[i] for outputs in variants.values())
            cells = [marked(reference, first, None), *(marked(reference, other, first) for other in others)]
            rows.append([escape(beside)] * bool(about.beside) + [escape(reference), *cells])
        head = [about.beside] * bool(about.beside) + [about.given, *variants]
        style = "examples" if about.exact else "examples texts"
        parts += [paragraph(about.title), table(f"{caption}. From result.json.".strip(), head, rows, style)]
    return "\n".join(parts)


def differing(text: str, other: str) -> str:
    """The words of a text, those bold that are not at their position in another text."""
    words = text.split()
    same = [False] * len(words)
    for block in difflib.SequenceMatcher(None, words, other.split(), autojunk=False).get_matching_blocks():
        same[block.a : block.a + block.size] = [True] * block.size
    marked = zip(map(escape, words), same, strict=True)
    return " ".join(word if alike else f"<b>{word}</b>" for word, alike in marked)


def detection_section(results: Results) -> str:
    """For the first run of each variant that has them: its photos, and a table of its classes; "" if none has any."""

    def by_class(run: RunRecord) -> list[JSONObject]:
        rows = run.artifacts.get("by_class")
        return [one for one in rows if isinstance(one, dict) and "class" in one] if isinstance(rows, list) else []

    def precision(value: object) -> str:
        return decimal(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else "–"

    parts = []
    for name, run in results.first_runs(lambda run: run.detected or by_class(run)):
        if run.detected:
            panels = []
            for file, photo in run.detected:
                label, source = f"{file}: annotations and detections of {name}", base64.b64encode(photo).decode()
                panels.append(f'<img alt="{escape(label)}" src="data:image/jpeg;base64,{source}">')
            caption = (
                f"{name}: the first {plural(len(panels), 'scored photo')} with an object, not selected. Left: the "
                "annotated objects. Right: the detections with a score of at least 0.3, with their scores. A class has "
                f"one colour. From {run.label}/{DETECTIONS}."
            )
            parts.append(figure(panels, caption, "pairs"))
        if classes := by_class(run):
            columns = [column for column in classes[0] if column != "class"]
            scored = [one for one in classes if any(one.get(column) is not None for column in columns)]
            caption = (
                f"{name}: average precision of each class on the scored pictures of the test split, in per cent, by "
                "overlap and by size of the objects as in the table of metrics; – where the pictures have no such "
                "object."
            )
            if absent := len(classes) - len(scored):
                caption += f" {absent:,} of {len(classes):,} classes, of which they have no object, are left out."
            rows = [[escape(one["class"]), *(precision(one.get(column)) for column in columns)] for one in scored]
            parts.append(table(f"{caption} From {run.label}/result.json.", ["class", *columns], rows, "classes"))
    return "\n".join(parts)


def picture_section(results: Results) -> str:
    """Generated samples and completions of the first run of each variant that has any."""
    parts = []
    for name, run in results.first_runs(lambda run: run.generated):
        generated = run.generated
        assert generated is not None
        how = f"temperature {generated.about.get('temperature', 1):g}, seed {generated.about.get('seed', 0)}"
        source = f"From {run.label}/samples.safetensors; mnemos sample {run.label} generates others."
        if generated.samples is not None:
            count = plural(len(generated.samples), "picture")
            caption = f"{name}: {count} that it generated, not selected ({how}). {source}"
            picture = img(sample_grid(generated.samples), f"Pictures generated by {name}")
            parts.append(figure([picture], caption, "full"))
        if generated.completions is not None:
            caption = (
                f"{name}: test pictures with the upper half given (first row), completed in "
                f"{plural(generated.completions.shape[1], 'way')}, and the originals (last row); not selected ({how}). "
                f"{source}"
            )
            picture = img(completion_grid(generated), f"Half pictures completed by {name}")
            parts.append(figure([picture], caption, "full"))
    return "\n".join(parts)


def sample_grid(samples: np.ndarray) -> np.ndarray:
    """Pictures [N, H, W, C] in rows of at most `COLUMNS`."""
    columns = min(COLUMNS, len(samples))
    rows = -(-len(samples) // columns)
    blank = np.zeros((rows * columns - len(samples), *samples.shape[1:]), np.uint8)
    return grid(np.concatenate([samples, blank]).reshape(rows, columns, *samples.shape[1:]), len(samples))


def completion_grid(generated: Generated) -> np.ndarray:
    """One column per picture: the upper half that was given, its completions, and the original."""
    assert generated.originals is not None
    assert generated.completions is not None
    halves = generated.originals.copy()
    halves[:, int(generated.about["given"]) :] = 128
    return grid(np.stack([halves, *generated.completions.swapaxes(0, 1), generated.originals]))


def grid(pictures: np.ndarray, count: int | None = None) -> np.ndarray:
    """Pictures [rows, columns, H, W, C] uint8 as one image [.., .., 4], enlarged without smoothing.

    count: the number of pictures if the last row is not full.
    """
    rows, columns, height, width, _ = pictures.shape
    scale = max(1, round(PIXELS / (columns * width * (1 + GAP))))
    gap = max(1, round(GAP * width * scale))
    page = np.zeros((rows * (height * scale + gap) - gap, columns * (width * scale + gap) - gap, 4), np.uint8)
    for i in range(rows):
        for j in range(columns if count is None else min(columns, count - i * columns)):
            top, left = i * (height * scale + gap), j * (width * scale + gap)
            cell = page[top : top + height * scale, left : left + width * scale]
            cell[..., :3], cell[..., 3] = pictures[i, j].repeat(scale, 0).repeat(scale, 1), 255
    return page


def write_grids(folder: Path) -> list[Path]:
    """Write samples.png and completions.png beside a run's samples.safetensors; return the files that were written."""
    generated, files = read_generated(folder), []
    if generated is not None and generated.samples is not None:
        files.append(folder / "samples.png")
        write_bytes(files[-1], png(sample_grid(generated.samples)))
    if generated is not None and generated.completions is not None:
        files.append(folder / "completions.png")
        write_bytes(files[-1], png(completion_grid(generated)))
    return files
