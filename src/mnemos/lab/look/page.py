"""The page of a look: one self-contained HTML file with a summary that needs no scripts, and the viewer."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mnemos.lab.report.charts import Axis, Chart, arm, chart_figure
from mnemos.lab.report.markup import decimal, escape, listed, paragraph, plural, table
from mnemos.lab.report.shell import chart_library, embedded, html_page, script

from .images import PictureRecording
from .pack import pack, pack_pictures
from .record import PARTS, Recording
from .summary import explained, picture_sentences, sentences, thresholds

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
    said: list[tuple[Recording | PictureRecording, list[str]]] = [(one, sentences(one)) for one in recordings]
    said += [(one, picture_sentences(one)) for one in pictures]
    opening = '<div class="look-short">'
    for one, texts in said:
        parts = [paragraph(one.about, "note") if one.about else "", *(paragraph(text) for text in texts)]
        name = f"<h3>{escape(one.name)}</h3>" if one.name else ""
        opening += f"<div>{name}{''.join(parts)}</div>"
    opening += "</div>" + (paragraph(thresholds(), "note") if any(one.asked for one in recordings) else "")
    short = f'<section id="short" class="opening"><h2>In short</h2>\n{_told(recordings)}{opening}</section>'
    header, own = paragraph(_byline(recordings), "byline"), partial(script, package="mnemos.lab.look")
    charts = [chart_library(), script("page.js")] if any(one.slug == "asked" for one in sections) else []
    return html_page(title, f"{short}\n{body}", header, [*charts, own("look.js")], own("look.css"))


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
        [Axis("tokens between what was told and the question", ",d")],
        limits=(0.0, 1.0),
        references=[] if known[0].document.guess is None else [("a guess", known[0].document.guess)],
    )
    for i, one in enumerate(known):
        assert one.asked is not None
        assert one.document.question is not None
        for after, p in zip(*one.asked, strict=True):
            chart.add(i, 0, p, after - one.document.question.told[1])
    steps = listed([f"{one:,}" for one in dict.fromkeys(max(1, one.length // PARTS) for one in known)])
    caption = (
        f"The question is asked after every {steps} tokens of this one row, and the probability of the right answer is "
        "drawn."
    )
    caption += " Dotted: a guess." if chart.references else ""
    return [Section("asked", "When it is known", chart_figure([chart], caption, "wide"))]


def _told(recordings: Sequence[Recording]) -> str:
    """What was told and what is asked, in the document's words."""
    one = next((one for one in recordings if one.document.question is not None), None)
    if one is None or (question := one.document.question) is None:
        return ""
    texts = [text for text, count in one.document.words for _ in range(count)]
    told, ask = (" ".join(texts[a:b]) for a, b in (question.told, (len(texts) - len(question.ask), len(texts))))
    apart = len(texts) - len(question.ask) - question.told[1]
    return paragraph(f"Told: “{told}” Asked {apart} tokens later: “{ask}”", "lead")


def _viewer(recordings: Sequence[Recording]) -> list[Section]:
    if not recordings:
        return []
    data = "\n".join(embedded(pack(one, 1 / len(recordings)), "look-run") for one in recordings)
    note = paragraph(
        "The viewer needs scripts, which this browser does not run. The tables below need none.", "missing"
    )
    document = recordings[0].document
    said = ""
    if document.other and any(word == document.other for word, _ in document.words):
        said = paragraph(f"“{document.other}” in the text is a word outside the vocabulary of the models.", "note")
    return [Section("viewer", "Segment by segment", f'{said}<div id="look">{note}</div>\n{data}')]


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
            name = f"{one.name}, {layer.name}" if pictures[1:] else layer.name
            size = decimal(layer.share), decimal(layer.gate), str(layer.held), decimal(1 / layer.held)
            rows.append([escape(name), *size, escape(said)])
    caption = (
        "Each cached layer: the share of its memory by size, σ(λ)·o_mem beside (1 − σ(λ))·o_self; the mean gate σ(λ); "
        "its slots; the weight that each would have if all were read alike; the slot that is read most, with its mean "
        "weight."
    )
    shown = table(caption, ["layer", "share by size", "gate σ(λ)", "slots", "read alike", "read most"], rows)
    data = "\n".join(embedded(pack_pictures(one), "look-pictures") for one in pictures)
    said = (
        "o_self is the layer's own attention; o_mem is what each patch reads from the slots of its cache. The layer "
        "adds (1 − σ(λ))·o_self and σ(λ)·o_mem. The fuller a colour, the greater."
    )
    made = f'{paragraph(said)}<div id="look-images"></div>\n{data}\n{shown}'
    return [Section("images", "Image by image", made)]


def _places(recordings: Sequence[Recording]) -> list[Section]:
    """The predictions with a part of the memory emptied before their segment, as tables."""
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
            also = ""
            if any(row[2] != "–" for row in shown):
                also = " Kept alone: the other units of that memory are emptied instead; other memories stay."
            left = f" The {len(shown)} with the lowest of {len(rows)}." if len(rows) > len(shown) else ""
            caption = (
                f"{one.name}: the probability of “{place.answer_text}”, {decimal(place.probability)} as read, with a "
                f"part of the memory emptied before the segment in which it is predicted.{also}{left}"
            )
            made = table(caption, ["part", "emptied", "kept alone"], shown)
            name = f"{one.name}, “{place.answer_text}”"
            found.append(f"<details{'' if found else ' open'}><summary>{escape(name)}</summary>{made}</details>")
    texts = dict.fromkeys(paragraph(explained(one.document)) for one in recordings)
    return [Section("emptied", "Predictions with a part emptied", "\n".join([*texts, *found]))] if found else []
