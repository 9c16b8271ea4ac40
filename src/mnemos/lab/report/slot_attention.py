"""What the slots attend to when they are written: kinds by segment, examples, words (Memformer, Figures 6 and 7)."""

import math

import numpy as np

from mnemos.lab.evaluate.recorded import KINDS, SlotExample, WriteAttention

from .charts import Axis, Chart, Series, chart_figure
from .markup import decimal, escape, figure, listed, paragraph, plural, table
from .read import Results
from .run_records import RunRecord

# The paper's shares of 1,024 slots "during the middle of processing a document", and ‖v_bias‖ of two slots at ρ = 1.
PAPER = {"holds": (0.6, 0.8), "overwrites": (0.05, 0.1)}
PAPER_BIAS = {"holds": 1.15, "overwrites": 3.20}
COLOURS: dict[str, int] = dict(zip(KINDS, (2, 4, 1), strict=True))  # indices into the palette
VERBS = {"holds": "hold", "mixes": "mix", "overwrites": "are overwritten"}
NAMES = {"holds": "holds", "mixes": "mixes", "overwrites": "is overwritten"}


def section(results: Results) -> str:
    """For each variant, kinds, examples and words of the first run with a write_attention.json; "" if there is none."""
    parts = []
    for index, name in enumerate(results.names):
        run = next((run for run in results.runs_of(name) if run.write_attention is not None), None)
        if run is not None and run.write_attention is not None:
            parts.append(_variant(index, name, run, run.write_attention))
    return "\n".join(parts)


def _variant(index: int, name: str, run: RunRecord, found: WriteAttention) -> str:
    kinds = {kind: Series(f"slots that {VERBS[kind]}", f"variant-{COLOURS[kind]}") for kind in KINDS}
    segments = len(found.shares["holds"])
    shares = Chart(
        f"write-attention-{index}-share",
        "Share of the slots",
        "share",
        list(kinds.values()),
        [run.label],
        [Axis("segment", ",.0f")],
        "lines" if segments > 1 else "marks",
        bands=[(KINDS.index(kind), *PAPER[kind]) for kind in KINDS if kind in PAPER],
        form="%",
        limits=(-0.02, 1.02),
    )
    for place, kind in enumerate(KINDS):
        for segment, share in enumerate(found.shares[kind], 1):
            shares.add(place, 0, float(share), segment)
    charts = [shares]
    for place, one in enumerate(found.shown.examples):
        itself = [(f"slot {one.slot} on itself", one.itself)]
        slug, tokens = f"write-attention-{index}-{place}", [Axis("token of the segment", ",.0f")]
        chart = Chart(
            slug, slot_title(one), "attention", [kinds[one.kind]], [run.label], tokens, "bars", references=itself
        )
        for token, weight in enumerate(one.weights[: found.shown.first], 1):
            chart.add(0, 0, float(weight), token)
        charts.append(chart)
    bands = "Bands: the paper's shares, of text."
    caption = f"{name}: {about(found)} {bands} {explained(found)} From {run.label}/write_attention.json."
    parts = [paragraph(f"{name}: {summary(found)}"), chart_figure(charts, caption), _table(name, found)]
    shaded = [one for one in found.shown.examples if one.kind != "holds"] or list(found.shown.examples[-1:])
    if found.shown.words is not None:
        texts = [_text(one, found.shown.words) for one in shaded]
        caption = (
            f"{name}: the text from the start of that segment. The shade of a word is the slot's mean attention to its "
            "tokens, from none to the largest. The encoder reads a segment in both directions, so the output at a "
            f"token also depends on its surroundings. From {run.label}/write_attention.json."
        )
        parts.append(figure(texts, caption, kind="full"))
    return "\n".join(parts)


def about(found: WriteAttention) -> str:
    """What was measured and how the kinds are defined."""
    low, high = found.thresholds
    documents = plural(found.documents, "test document")
    return (
        f"attention of the memory writer, mean over heads, in {documents} of up to {len(found.shares['holds'])} "
        "segments "
        f"of {found.segment} tokens. A slot holds if its weight on itself is above {high:g}, is "
        f"overwritten if it is below {low:g}, and mixes otherwise."
    )


def explained(found: WriteAttention) -> str:
    """What the panels of single slots show."""
    shown = found.shown
    return (
        f"The other panels: segment {shown.place + 1} of {shown.of} of the first document, the slot with "
        "the median weight of each kind: its weights on the tokens, and on itself as a line."
    )


def summary(found: WriteAttention) -> str:
    """Sentences that compare the shares and the forgetting biases with the paper's."""
    middle, kinds = found.middle, found.kinds
    parts = []
    for i, kind in enumerate(KINDS):
        theirs = f" (the paper, of text: {_span(PAPER[kind])})" if kind in PAPER else ""
        parts.append(f"{middle[kind]:.0%}{'' if i else ' of the slots'} {VERBS[kind]}{theirs}")
    text = f"in the middle half of a document {listed(parts)}."
    holds, writes = kinds["holds"].bias, kinds["overwrites"].bias
    if math.isfinite(holds) and math.isfinite(writes):
        text += (
            f" ‖v_bias‖ of slots that are usually overwritten is {writes / holds:.2f} times that of slots that usually "
            f"hold (the paper, of text, one slot each: {PAPER_BIAS['overwrites'] / PAPER_BIAS['holds']:.2f})."
        )
    return text


def _span(pair: tuple[float, float]) -> str:
    return f"{pair[0] * 100:.0f}–{pair[1]:.0%}"


def slot_title(one: SlotExample) -> str:
    """The title of a panel."""
    return f"Slot {one.slot} {NAMES[one.kind]}: {one.itself:.2f} on itself"


def word_weights(one: SlotExample, words: tuple[tuple[str, int], ...]) -> list[float]:
    """The attention of a slot to each word: the mean over its tokens, so that long words do not count more."""
    ends = np.cumsum([length for _, length in words])
    return [float(part.mean()) for part in np.split(one.weights, ends[:-1])]


def gap(words: tuple[tuple[str, int], ...]) -> str:
    """What stands between words: a space where they have no white space of their own."""
    return "" if any(text != text.strip() for text, _ in words) else " "


def _text(one: SlotExample, words: tuple[tuple[str, int], ...]) -> str:
    weights = word_weights(one, words)
    most = max(weights) or 1.0
    parts = []
    for (text, _), weight in zip(words, weights, strict=True):
        share = round(85 * weight / most)
        blank = text.isspace() or not share
        parts.append(escape(text) if blank else f'<mark style="--heard:{share}%">{escape(text)}</mark>')
    said = f"Slot {one.slot}, which {NAMES[one.kind]}"
    return f'<p class="said">{escape(said)}</p><p class="shaded">{gap(words).join(parts)}</p>'


def _table(name: str, found: WriteAttention) -> str:
    rows = []
    for kind in KINDS:
        usual = found.kinds[kind]
        theirs = _span(PAPER[kind]) if kind in PAPER else "–"
        # ‖v_bias‖ is relative to the radius ρ of a slot, which is 1 in the paper.
        norms = [decimal(norm / found.radius) for norm in (usual.bias, usual.least, usual.most)]
        said = "{} ({} to {})".format(*norms) if math.isfinite(usual.bias) else "–"
        bias = decimal(PAPER_BIAS[kind]) if kind in PAPER_BIAS else "–"
        rows.append([escape(VERBS[kind]), f"{found.middle[kind]:.1%}", theirs, str(usual.slots), said, bias])
    slots, radius = found.slots, decimal(found.radius)
    caption = (
        f"{name}: slots by kind. Share: share of all slots, over the middle half of every document. Usually: how "
        "many of "
        f"the {slots} slots are of the kind by their mean weight on themselves. ‖v_bias‖/ρ: norm of the forgetting "
        f"bias, mean and range, divided by the radius ρ = {radius} of a slot (1 in the paper)."
    )
    return table(caption, ["slots that", "share", "paper, of text", "usually", "‖v_bias‖/ρ", "paper, one slot"], rows)
