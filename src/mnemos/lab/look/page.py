"""The page of a look: one self-contained HTML file with a summary that needs no scripts, and the viewer."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from mnemos.errors import plural
from mnemos.lab.report.charts import Axis, Chart, chart_figure, variant
from mnemos.lab.report.markup import capital, decimal, escape, listed, paragraph, table
from mnemos.lab.report.shell import chart_library, embedded, html_page, script

from .effects import KNOWN, LOST, WHOLE, Prediction
from .pack import explained, pack
from .record import PARTS, Recording

_SHOWN = 12  # rows of a static table


def page(recordings: Sequence[Recording]) -> str:
    """The page of some recordings as HTML. The same recordings give the same text."""
    sections = {
        ("short", "In short"): _short(recordings),
        ("asked", "When it is known"): (asked := _asked(recordings)),
        ("viewer", "Segment by segment"): _viewer(recordings),
        ("emptied", "Predictions with a part emptied"): _emptied(recordings),
    }
    body = "\n".join(
        f'<section id="{slug}"><h2>{escape(name)}</h2>\n{text}</section>'
        for (slug, name), text in sections.items()
        if text
    )
    document = recordings[0].document
    lengths = dict.fromkeys(f"{plural(one.segments, 'segment')} of {one.length}" for one in recordings)
    parts = [document.about, f"{len(document.tokens):,} tokens", listed(list(lengths))]
    byline = " · ".join(filter(None, parts))
    own = partial(script, package="mnemos.lab.look")
    charts = [chart_library(), script("page.js")] if asked else []
    return html_page(
        "What the memory holds", body, paragraph(byline, "byline"), [*charts, own("look.js")], own("look.css")
    )


def _short(recordings: Sequence[Recording]) -> str:
    # --- what was told and what is asked, in the document's words ---
    passage = ""
    one = next((one for one in recordings if one.document.question is not None), None)
    if one is not None and (question := one.document.question) is not None:
        texts = [text for text, count in one.document.words for _ in range(count)]
        fact, asked = (" ".join(texts[a:b]) for a, b in (question.fact, (len(texts) - len(question.ask), len(texts))))
        apart = len(texts) - len(question.ask) - question.fact[1]
        passage = paragraph(f"Told: “{fact}” Asked {apart} tokens later: “{asked}”", "lead")

    # --- the sentences of each recording ---
    parts = ""
    for one in recordings:
        heading = f"<h3>{escape(one.name)}</h3>" if one.name else ""
        note = paragraph(one.about, "note") if one.about else ""
        parts += f"<div>{heading}{note}{''.join(map(paragraph, sentences(one)))}</div>"
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


# --- what a recording shows, in sentences that say what was measured and no more ---


def sentences(one: Recording) -> list[str]:
    """What to say of a recording, the most important first."""
    # The memories on the page come first, so that the parts have been named before they are spoken of.
    names = []
    for kind in dict.fromkeys(memory.kind for memory in one.memories):
        alike = [memory for memory in one.memories if memory.kind == kind]
        all_layers = one.layers.get(kind, len(alike))
        layers = f"{len(alike)} of {all_layers}" if len(alike) < all_layers else all_layers
        name = alike[0].name
        names.append(name if all_layers == 1 else f"{name.rsplit(', ', 1)[-1]} of {layers} layers")
    shown = f"Shown: {'; '.join(names) or 'the text alone, as its memory has no reader here'}."
    if one.asked is not None:
        return [_when(one), shown, *(_where(one, prediction) for prediction in one.predictions[:1])]
    counted = ~np.isnan(one.surprise)
    if not counted.any() or not one.emptied:
        return [shown]
    parts = [f"{array[counted].mean():.3f} with the {kind} emptied" for kind, array in one.emptied.items()]
    nats = (
        f"Nats a token: {one.surprise[counted].mean():.3f} as read; {', '.join(parts)}, each time before a segment of "
        f"{one.length} tokens, with everything else as it was."
    )
    return [shown, nats]


def thresholds() -> str:
    """From which probability on an answer is called known, lost, and held by a unit alone."""
    return (
        f"Known: at least {LOST:.2f} times the greatest probability that it has when asked, if that is {KNOWN:.2f} or "
        f"more. Lost with a part emptied: less than {LOST:.2f} times what it has as read. Enough alone: at least that, "
        "with the other units of the memory emptied."
    )


def _when(one: Recording) -> str:
    assert one.asked is not None
    assert one.document.question is not None
    end, (after, known), lost = one.document.question.fact[1], one.asked, one.asked.lost
    at = [0, *([] if lost is None else [lost - 1, lost]), len(after) - 1]
    parts = [f"{after[i] - end} tokens later {known[i]:.2f}" for i in dict.fromkeys(at) if i]
    text = ", ".join([f"Asked right after it was told, the answer has a probability of {known[0]:.2f}", *parts])
    return text + ("." if one.asked.known(max(known)) else ": it is not known anywhere.")


def _where(one: Recording, prediction: Prediction) -> str:
    """Without which parts the answer is lost, by the segments before which they are emptied."""
    if one.asked is not None and not one.asked.known_at_end:
        return "The answer is not known at the end, so nothing was emptied."
    if not prediction.boundaries:
        return "No segment comes before the question, so nothing was emptied."
    runs: list[tuple[str, int, int]] = []  # what is said, of the boundaries from one to another
    for i, boundary in enumerate(prediction.boundaries):
        needed = _needed(one, prediction, i)
        if runs and runs[-1][0] == needed:
            runs[-1] = (needed, runs[-1][1], boundary)
        else:
            runs.append((needed, boundary, boundary))
    # Segments count from 1 on the page; a boundary is before the segment of its number.
    spans = [f"segment {a + 1}" if a == b else f"segments {a + 1} to {b + 1}" for _, a, b in runs]
    parts = [f"before {span} the answer is {needed}" for (needed, _, _), span in zip(runs, spans, strict=True)]
    return capital("; ".join(parts)) + "."


def _needed(one: Recording, prediction: Prediction, i: int) -> str:
    least = LOST * prediction.probability
    at = [(change, float(p[i])) for change, p in prediction.effects if i < len(p)]
    gone = [change for change, p in at if p < least and not change.alone]
    memories = [change for change in gone if change.memory is not None]
    parts = [change for change in memories if change.unit is not None]
    parts = parts or [change for change in memories if ": " in change.name]
    if parts:
        return f"lost without {listed([change.name for change in parts], 'or')}"
    if not memories:
        return f"lost without {gone[0].name}, but not without any one memory" if gone else f"given even without {WHOLE}"
    numbers = {change.memory for change in memories}
    alone = [(change, p) for change, p in at if change.alone and change.memory in numbers and not np.isnan(p)]
    text = f"lost without {listed([change.name for change in memories], 'or')}"
    if not alone:
        return text
    units = sum(len(one.memories[number].units) for number in numbers if number is not None)
    tried = f"{len(alone)} units" if len(alone) == units else f"{len(alone)} units tried, of {units},"
    enough = [change.name if memories[1:] else change.name.rpartition(": ")[2] for change, p in alone if p >= least]
    return f"{text}, of whose {tried} {listed(enough, 'or') or 'none'} is enough alone"
