"""What the first run of each variant puts out: examples, detections, generated pictures."""

import base64
import difflib
import json
from pathlib import Path

import numpy as np

from mnemos.atomic import write_bytes
from mnemos.errors import plural
from mnemos.types import JSONObject

from .markup import decimal, escape, figure, img, paragraph, png, table
from .read import Results
from .run_records import DETECTIONS, Generated, read_generated

COLUMNS = 12  # of generated pictures
PIXELS = 960  # approximate width of a grid of pictures
GAP = 0.08  # between pictures, in units of a picture


def example_section(results: Results) -> str:
    """One table per kind of example, for all variants with the same references, from their first runs; "" if none.

    A result describes its examples (`Task.artifacts`). "exact": an output should equal what was given, and is bold
    where not. "compared": bold are the words in which it differs from that of the first variant.
    """
    # --- by description and references: the outputs of each variant ---
    tables: dict[str, tuple[JSONObject, list[tuple[str, str]], dict[str, list[str]]]] = {}
    for name in results.names:
        for run in results.runs_of(name)[:1]:
            for entry, about in run.artifacts.get("examples", {}).items():
                lines = run.artifacts.get(entry)
                if lines and isinstance(lines, list):
                    given = [(str(one.get(about.get("beside"), "")), str(one.get(about["given"], ""))) for one in lines]
                    outputs = [str(one.get(about["found"], "")) for one in lines]
                    tables.setdefault(json.dumps([about, given]), (about, given, {}))[2][name] = outputs

    parts = []
    for about, references, variants in tables.values():
        exact, compared, beside = about.get("exact", True), about.get("compared", False), about.get("beside", "")

        def marked(reference: str, output: str, first: str, exact: bool = exact, compared: bool = compared) -> str:
            text = escape(output) or "nothing"
            if compared and output != first:
                return differing(output, first) or text
            return text if reference == output or not exact else f"<b>{text}</b>"

        caption = f"{about['about']} First what was {about['given']}, then what the first run of each variant "
        caption += about["found"] + "; bold where it differs" * exact
        caption += "; bold: words that the first variant does not have there" * (compared and len(variants) > 1)
        rows = []
        for i, (given_beside, reference) in enumerate(references):
            outputs = [of_variant[i] for of_variant in variants.values()]
            cells = [marked(reference, output, outputs[0]) for output in outputs]
            rows.append([escape(given_beside)] * bool(beside) + [escape(reference), *cells])
        head = [beside] * bool(beside) + [about["given"], *variants]
        style = "examples" if exact else "examples texts"
        parts += [paragraph(about["title"]), table(f"{caption}. From result.json.", head, rows, style)]
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

    def precision(value: float | None) -> str:
        return "–" if value is None else decimal(value)

    parts = []
    for name, run in results.first_runs(lambda run: run.detected or run.artifacts.get("by_class")):
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
        if classes := run.artifacts.get("by_class"):
            columns = [column for column in classes[0] if column != "class"]
            scored = [one for one in classes if any(one.get(column) is not None for column in columns)]
            caption = (
                f"{name}: average precision of each class on the scored pictures of the test split, in per cent, by "
                "overlap and by size of the objects as in the table of metrics; – where the pictures have no such "
                f"object. Left out are {len(classes) - len(scored):,} of {len(classes):,} classes, of which they have "
                f"none. From {run.label}/result.json."
            )
            rows = [[escape(one["class"]), *(precision(one.get(column)) for column in columns)] for one in scored]
            parts.append(table(caption, ["class", *columns], rows, "classes"))
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
    blank = np.full((rows * columns - len(samples), *samples.shape[1:]), 255, np.uint8)
    return grid(np.concatenate([samples, blank]).reshape(rows, columns, *samples.shape[1:]))


def completion_grid(generated: Generated) -> np.ndarray:
    """One column per picture: the upper half that was given, its completions, and the original."""
    assert generated.originals is not None
    assert generated.completions is not None
    halves = generated.originals.copy()
    halves[:, int(generated.about["given"]) :] = 128
    return grid(np.stack([halves, *generated.completions.swapaxes(0, 1), generated.originals]))


def grid(pictures: np.ndarray) -> np.ndarray:
    """Pictures [rows, columns, H, W, C] uint8 as one image [.., .., C] on white, enlarged without smoothing."""
    rows, columns, _, width, channels = pictures.shape
    scale = max(1, round(PIXELS / (columns * width * (1 + GAP))))
    gap = max(1, round(GAP * width * scale))
    large = pictures.repeat(scale, 2).repeat(scale, 3)
    apart = np.pad(large, ((0, 0), (0, 0), (0, gap), (0, gap), (0, 0)), constant_values=255)
    page = apart.swapaxes(1, 2).reshape(rows * apart.shape[2], columns * apart.shape[3], channels)
    return page[:-gap, :-gap]


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
