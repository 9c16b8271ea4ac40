"""The page of a look: one self-contained HTML file with a summary that needs no scripts, and the viewer."""

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from mnemos.lab.report.markup import decimal, escape, figure, legend, listed, paragraph, plural, table
from mnemos.lab.report.shell import embedded, html_page

from .pack import pack
from .record import Recording
from .summary import sentences

_SHOWN = 40  # rows of a static table


class Section(NamedTuple):
    """A section of the page: its slug, its name and its HTML."""

    slug: str
    name: str
    text: str


def page(recordings: Sequence[Recording], title: str = "What the memory holds") -> str:
    """The page of some recordings as HTML. The same recordings give the same text."""
    sections = [*_asked(recordings), _viewer(recordings), *_places(recordings)]
    body = "\n".join(
        f'<section id="{one.slug}"><h2>{escape(one.name)}</h2>\n{one.text}</section>' for one in sections if one.text
    )
    opening = "".join(
        f"<h3>{escape(one.name)}</h3>{''.join(paragraph(text) for text in sentences(one))}"
        if len(recordings) > 1
        else "".join(paragraph(text, "lead" if i == 0 else "") for i, text in enumerate(sentences(one)))
        for one in recordings
    )
    short = f'<section id="short" class="opening"><h2>In short</h2>\n{opening}</section>'
    header = paragraph(_byline(recordings), "byline")
    return html_page(title, f"{short}\n{body}", header, [_file("look.js")], _file("look.css"))


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _byline(recordings: Sequence[Recording]) -> str:
    first = recordings[0]
    parts = [first.document.about, f"{len(first.document.tokens):,} tokens"]
    lengths = dict.fromkeys(f"{plural(one.segments, 'segment')} of {one.length}" for one in recordings)
    return " · ".join([part for part in parts if part] + [listed(list(lengths))])


def _asked(recordings: Sequence[Recording]) -> list[Section]:
    """The probability of the answer by the number of words after which the question comes."""
    known = [one for one in recordings if one.asked is not None]
    if not known:
        return []
    names = legend([(f"variant-{i}", one.name) for i, one in enumerate(known)])
    caption = "The question is asked after every part of a segment, each time of the state that the reading has there."
    return [Section("asked", "When it is known", figure([_curves(known)], caption, "full", names))]


def _curves(known: Sequence[Recording]) -> str:
    """A line for each recording, as SVG: probability of the answer by words since it was told."""
    lines, most = [], 1
    for one in known:
        assert one.asked is not None
        assert one.document.question is not None
        lines.append([(after - one.document.question.told[1], p) for after, p in zip(*one.asked, strict=True)])
        most = max(most, lines[-1][-1][0])
    wide, high, left, low = 720, 220, 44, 34
    x, y = (lambda words: left + (wide - left - 16) * words / most), (lambda p: 8 + (high - low - 8) * (1 - p))
    parts = []
    for p in (0, 0.5, 1):
        parts.append(f'<path d="M{left} {y(p):.1f}H{wide - 16}" stroke="var(--rule)"/>')
        parts.append(f'<text x="{left - 8}" y="{y(p) + 4:.1f}" text-anchor="end">{p:g}</text>')
    step = max(1, 2 ** round(math.log2(most / 6)))
    ticks = [(x(words), high - 16, str(words)) for words in range(0, most + 1, step)]
    ticks.append(((left + wide) / 2, high - 1, "words between what was told and the question"))
    parts += [f'<text x="{at:.1f}" y="{down}" text-anchor="middle">{name}</text>' for at, down, name in ticks]
    for i, line in enumerate(lines):
        points = " ".join(f"{x(words):.1f},{y(p):.1f}" for words, p in line)
        colour = f"var(--variant-{i % 6})"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
    said = "Probability of the answer by the words between what was told and the question"
    style = 'font-size="12" fill="var(--muted)"'
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{said}" {style}>{"".join(parts)}</svg>'


def _viewer(recordings: Sequence[Recording]) -> Section:
    data = "\n".join(embedded(pack(one, 1 / len(recordings)), "look-run") for one in recordings)
    note = paragraph(
        "The viewer needs scripts, which this browser does not run. The tables below need none.", "missing"
    )
    return Section("viewer", "Segment by segment", f'<div id="look">{note}</div>\n{data}')


def _places(recordings: Sequence[Recording]) -> list[Section]:
    """What is lost when a part of the memory is emptied before the last segment, as tables."""
    found = []
    for one in recordings:
        for place in one.places:
            rows = []
            for change, p in place.effects:
                if change.alone or not len(p) or np.isnan(p[-1]):
                    continue
                alone = next((q for other, q in place.effects if other == change._replace(alone=True)), None)
                both = (
                    decimal(float(p[-1])),
                    decimal(float(alone[-1])) if change.unit is not None and alone is not None else "–",
                )
                rows.append((float(p[-1]), [escape(change.name), *both]))
            if not rows:
                continue
            shown = [row for _, row in sorted(rows, key=lambda row: row[0])[:_SHOWN]]
            left = f" The {len(shown)} with the lowest of {len(rows)}." if len(rows) > len(shown) else ""
            caption = (
                f"{one.name}: the probability of “{place.answer_text}”, {decimal(place.probability)} as read, with a "
                "part of the memory emptied before the segment in which it is predicted, or with that part alone kept."
                f"{left}"
            )
            found.append(table(caption, ["part", "emptied", "kept alone"], shown))
    return [Section("emptied", "What is lost when a part is emptied", "\n".join(found))] if found else []
