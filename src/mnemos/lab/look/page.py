"""The page of a look: one self-contained HTML file with a summary that needs no scripts, and the viewer."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from mnemos.errors import plural
from mnemos.lab.report.charts import Axis, Chart, chart_figure, variant
from mnemos.lab.report.markup import decimal, escape, listed, paragraph, table, table_of
from mnemos.lab.report.shell import chart_library, embedded, html_page, script

from .images import PictureRecording
from .pack import pack, pack_pictures
from .record import PARTS, Recording
from .summary import explained, picture_sentences, sentences, thresholds

_SHOWN = 12  # rows of a static table


def page(
    recordings: Sequence[Recording], pictures: Sequence[PictureRecording] = (), title: str = "What the memory holds"
) -> str:
    """The page of some recordings as HTML. The same recordings give the same text."""
    sections = {
        ("short", "In short"): _short(recordings, pictures),
        ("asked", "When it is known"): (asked := _asked(recordings)),
        ("viewer", "Segment by segment"): _viewer(recordings),
        ("emptied", "Predictions with a part emptied"): _emptied(recordings),
        ("images", "Image by image"): _pictures(pictures),
    }
    body = "\n".join(
        f'<section id="{slug}"><h2>{escape(name)}</h2>\n{text}</section>'
        for (slug, name), text in sections.items()
        if text
    )
    byline = "pictures of the test split"
    if recordings:
        document = recordings[0].document
        parts = [document.about, f"{len(document.tokens):,} tokens"]
        lengths = dict.fromkeys(f"{plural(one.segments, 'segment')} of {one.length}" for one in recordings)
        byline = " · ".join([part for part in parts if part] + [listed(list(lengths))])
    own = partial(script, package="mnemos.lab.look")
    charts = [chart_library(), script("page.js")] if asked else []
    return html_page(title, body, paragraph(byline, "byline"), [*charts, own("look.js")], own("look.css"))


def _short(recordings: Sequence[Recording], pictures: Sequence[PictureRecording]) -> str:
    # --- what was told and what is asked, in the document's words ---
    passage = ""
    one = next((one for one in recordings if one.document.question is not None), None)
    if one is not None and (question := one.document.question) is not None:
        texts = [text for text, count in one.document.words for _ in range(count)]
        fact, asked = (" ".join(texts[a:b]) for a, b in (question.fact, (len(texts) - len(question.ask), len(texts))))
        apart = len(texts) - len(question.ask) - question.fact[1]
        passage = paragraph(f"Told: “{fact}” Asked {apart} tokens later: “{asked}”", "lead")

    # --- the sentences of each recording ---
    entries = [(one.name, one.about, sentences(one)) for one in recordings]
    entries += [(one.name, one.about, picture_sentences(one)) for one in pictures]
    parts = ""
    for name, about, texts in entries:
        heading = f"<h3>{escape(name)}</h3>" if name else ""
        note = paragraph(about, "note") if about else ""
        parts += f"<div>{heading}{note}{''.join(map(paragraph, texts))}</div>"
    words = paragraph(thresholds(), "note") if any(one.asked for one in recordings) else ""
    return f'{passage}<div class="look-short">{parts}</div>{words}'


def _asked(recordings: Sequence[Recording]) -> str:
    asked = [(one, one.asked, one.document.question) for one in recordings]
    answered = [(one, ask, question) for one, ask, question in asked if ask is not None and question is not None]
    if not answered:
        return ""
    guess = answered[0][0].document.guess
    series = [variant(one.name, i) for i, (one, _, _) in enumerate(answered)]
    chart = Chart(
        *("asked", "", "probability of the answer", series, [""]),
        [Axis("tokens between what was told and the question", ",d")],
        limits=(0.0, 1.0),
        references=[] if guess is None else [("a guess", guess)],
    )
    for i, (_, ask, question) in enumerate(answered):
        chart.add(i, 0, ask.probability, [after - question.fact[1] for after in ask.after])
    steps = listed([f"{step:,}" for step in dict.fromkeys(max(1, one.length // PARTS) for one, _, _ in answered)])
    caption = (
        f"The question is asked after every {steps} tokens of this one row, and the probability of the right answer is "
        f"drawn.{'' if guess is None else ' Dotted: a guess.'}"
    )
    return chart_figure([chart], caption, "wide")


def _viewer(recordings: Sequence[Recording]) -> str:
    if not recordings:
        return ""
    data = "\n".join(embedded(pack(one, 1 / len(recordings)), "look-run") for one in recordings)
    note = "The viewer needs scripts, which this browser does not run. The tables below need none."
    document, words = recordings[0].document, ""
    if document.other and any(word == document.other for word, _ in document.words):
        words = paragraph(f"“{document.other}” in the text is a word outside the vocabulary of the models.", "note")
    return f'{words}<div id="look">{paragraph(note, "missing")}</div>\n{data}'


def _emptied(recordings: Sequence[Recording]) -> str:
    """The predictions with a part of the memory emptied before their segment, as tables."""
    tables: list[str] = []
    for one, prediction in [(a, b) for a in recordings for b in a.predictions]:
        last = {change: p[-1] for change, p in prediction.effects if len(p) == len(prediction.boundaries)}
        rows = []
        for change, p in last.items():
            if not change.alone and not np.isnan(p):
                alone = last.get(change._replace(alone=True)) if change.unit is not None else None
                numbers = [decimal(float(p)), "–" if alone is None else decimal(float(alone))]
                rows.append((float(p), [escape(change.name), *numbers]))
        if not rows:
            continue
        shown = [row for _, row in sorted(rows, key=lambda row: row[0])[:_SHOWN]]
        caption = (
            f"{one.name}: the probability of “{prediction.answer_text}”, {decimal(prediction.probability)} as read, "
            "with a part of the memory emptied before the segment in which it is predicted."
        )
        if any(row[2] != "–" for row in shown):
            caption += " Kept alone: the other units of that memory are emptied instead; other memories stay."
        caption += f" The {len(shown)} with the lowest of {len(rows)}." * (len(rows) > len(shown))
        html = table(caption, ["part", "emptied", "kept alone"], shown)
        title = escape(f"{one.name}, “{prediction.answer_text}”")
        tables.append(f"<details{'' if tables else ' open'}><summary>{title}</summary>{html}</details>")
    texts = dict.fromkeys(paragraph(explained(one.document)) for one in recordings)
    return "\n".join([*texts, *tables]) if tables else ""


def _pictures(pictures: Sequence[PictureRecording]) -> str:
    if not pictures:
        return ""
    layers = []
    for one in pictures:
        for layer in one.layers:
            name, weights = f"{one.name}, {layer.name}" if pictures[1:] else layer.name, layer.answered.mean((0, 2, 3))
            first = int(weights.argmax())
            layers.append((name, layer, f"slot {layer.slots[first] + 1} ({decimal(float(weights[first]))})"))
    numbers = table_of(
        "Each cached layer: the share of its memory by size, σ(λ)·o_mem beside (1 − σ(λ))·o_self; the mean gate σ(λ); "
        "its slots; the weight that each would have if all were read alike; the slot that is read most, with its mean "
        "weight.",
        layers,
        {
            "layer": lambda one: escape(one[0]),
            "share by size": lambda one: decimal(one[1].share),
            "gate σ(λ)": lambda one: decimal(one[1].gate),
            "slots": lambda one: str(one[1].count),
            "read alike": lambda one: decimal(1 / one[1].count),
            "read most": lambda one: escape(one[2]),
        },
    )
    data = "\n".join(embedded(pack_pictures(one), "look-pictures") for one in pictures)
    text = (
        "o_self is the layer's own attention; o_mem is what each patch reads from the slots of its cache. The layer "
        "adds (1 − σ(λ))·o_self and σ(λ)·o_mem. The fuller a colour, the greater."
    )
    return f'{paragraph(text)}<div id="look-images"></div>\n{data}\n{numbers}'
