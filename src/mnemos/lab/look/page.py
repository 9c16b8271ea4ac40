"""The page of a look: one self-contained HTML file with a summary that needs no scripts, and the viewer."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mnemos.lab.report.charts import Axis, Chart, arm, chart_figure
from mnemos.lab.report.markup import decimal, escape, listed, paragraph, plural, table
from mnemos.lab.report.shell import embedded, html_page, script

from .images import PictureRecording
from .pack import pack, pack_pictures
from .record import Recording
from .summary import picture_sentences, sentences

_SHOWN = 12  # rows of a static table


class Section(NamedTuple):
    """A section of the page: its slug, its name and its HTML."""

    slug: str
    name: str
    text: str


def page(
    recordings: Sequence[Recording], pictures: Sequence[PictureRecording] = (), title: str = "What the memory holds"
) -> str:
    """The page of some recordings as HTML. The same recordings give the same text."""
    sections = [*_asked(recordings), *_viewer(recordings), *_places(recordings), *_pictures(pictures)]
    body = "\n".join(
        f'<section id="{one.slug}"><h2>{escape(one.name)}</h2>\n{one.text}</section>' for one in sections if one.text
    )
    opening = "".join(
        f"<h3>{escape(one.name)}</h3>{''.join(paragraph(text) for text in sentences(one))}"
        if len(recordings) > 1
        else "".join(paragraph(text, "lead" if i == 0 else "") for i, text in enumerate(sentences(one)))
        for one in recordings
    )
    opening = (
        _told(recordings) + opening + "".join(paragraph(text) for one in pictures for text in picture_sentences(one))
    )
    short = f'<section id="short" class="opening"><h2>In short</h2>\n{opening}</section>'
    header, own = paragraph(_byline(recordings), "byline"), partial(script, package="mnemos.lab.look")
    return html_page(title, f"{short}\n{body}", header, [own("look.js")], own("look.css"))


def _byline(recordings: Sequence[Recording]) -> str:
    if not recordings:
        return "pictures of the test split"
    first = recordings[0]
    parts = [first.document.about, f"{len(first.document.tokens):,} tokens"]
    lengths = dict.fromkeys(f"{plural(one.segments, 'segment')} of {one.length}" for one in recordings)
    return " · ".join([part for part in parts if part] + [listed(list(lengths))])


def _asked(recordings: Sequence[Recording]) -> list[Section]:
    """The probability of the answer by the number of words after which the question comes."""
    known = [one for one in recordings if one.asked is not None]
    if not known:
        return []
    chart = Chart(
        *("asked", "", "probability of the answer", [arm(one.name, i) for i, one in enumerate(known)], [""]),
        [Axis("words between what was told and the question", ",d")],
        limits=(0.0, 1.0),
    )
    for i, one in enumerate(known):
        assert one.asked is not None
        assert one.document.question is not None
        for after, p in zip(*one.asked, strict=True):
            chart.add(i, 0, p, after - one.document.question.told[1])
    caption = "After each part of a segment the question is asked, and the probability of the right answer is drawn."
    return [Section("asked", "When it is known", chart_figure([chart], caption, "full"))]


def _told(recordings: Sequence[Recording]) -> str:
    """What was told and what is asked, in the document's words."""
    one = next((one for one in recordings if one.document.question is not None), None)
    if one is None or (question := one.document.question) is None:
        return ""
    texts = [text for text, count in one.document.words for _ in range(count)]
    told, ask = (" ".join(texts[a:b]) for a, b in (question.told, (len(texts) - len(question.ask), len(texts))))
    apart = len(texts) - len(question.ask) - question.told[1]
    return paragraph(f"Told: “{told}” Asked {apart} words later: “{ask}”", "lead")


def _viewer(recordings: Sequence[Recording]) -> list[Section]:
    if not recordings:
        return []
    data = "\n".join(embedded(pack(one, 1 / len(recordings)), "look-run") for one in recordings)
    note = paragraph(
        "The viewer needs scripts, which this browser does not run. The tables below need none.", "missing"
    )
    return [Section("viewer", "Segment by segment", f'<div id="look">{note}</div>\n{data}')]


def _pictures(pictures: Sequence[PictureRecording]) -> list[Section]:
    """The pictures, and of each layer the numbers that need no scripts."""
    if not pictures:
        return []
    rows = []
    for one in pictures:
        for layer in one.layers:
            most = layer.answered.mean((0, 2, 3))
            first = int(most.argmax())
            said = f"slot {layer.slots[first] + 1} ({decimal(float(most[first]))})"
            rows.append([escape(f"{one.name}, {layer.name}"), decimal(layer.share), escape(said)])
    caption = "Each cached layer: the share of its memory, σ(λ), and the slot that is read most, with its mean weight."
    shown = table(caption, ["layer", "σ(λ)", "read most"], rows)
    data = "\n".join(embedded(pack_pictures(one), "look-pictures") for one in pictures)
    return [Section("images", "Image by image", f'<div id="look-images"></div>\n{data}\n{shown}')]


def _places(recordings: Sequence[Recording]) -> list[Section]:
    """What is lost when a part of the memory is emptied before the last segment, as tables."""
    found: list[str] = []
    for one in recordings:
        for place in one.places:
            rows = []
            last = {change: p[-1] for change, p in place.effects if len(p) == len(place.boundaries)}
            for change, p in last.items():
                if change.alone or np.isnan(p):
                    continue
                alone = last.get(change._replace(alone=True))
                both = (
                    decimal(float(p)),
                    decimal(float(alone)) if change.unit is not None and alone is not None else "–",
                )
                rows.append((float(p), [escape(change.name), *both]))
            if not rows:
                continue
            shown = [row for _, row in sorted(rows, key=lambda row: row[0])[:_SHOWN]]
            left = f" The {len(shown)} with the lowest of {len(rows)}." if len(rows) > len(shown) else ""
            caption = (
                f"{one.name}: the probability of “{place.answer_text}”, {decimal(place.probability)} as read, with a "
                "part of the memory emptied before the segment in which it is predicted, or with the other units of "
                "that memory emptied instead (kept alone: all other memories stay)."
                f"{left}"
            )
            made = table(caption, ["part", "emptied", "kept alone"], shown)
            name = f"{one.name}, “{place.answer_text}”"
            found.append(f"<details{'' if found else ' open'}><summary>{escape(name)}</summary>{made}</details>")
    return [Section("emptied", "What is lost when a part is emptied", "\n".join(found))] if found else []
