"""What the slots attend to when they are written: kinds by segment, examples, words (Memformer, Figures 6 and 7)."""

import math

import numpy as np

from mnemos.errors import plural
from mnemos.lab.evaluate.recorded import KINDS, SlotExample, WriteAttention

from .charts import WHOLE, Axis, Chart, Series, chart_figure
from .markup import decimal, escape, figure, listed, paragraph, table_of
from .read import Results

# The paper's shares of 1,024 slots "during the middle of processing a document", and ‖v_bias‖ of two slots at ρ = 1.
PAPER = {"holds": (0.6, 0.8), "overwrites": (0.05, 0.1)}
PAPER_BIAS = {"holds": 1.15, "overwrites": 3.20}
COLOURS: dict[str, int] = dict(zip(KINDS, (2, 4, 1), strict=True))  # indices into the palette
VERBS = {"holds": "hold", "mixes": "mix", "overwrites": "are overwritten"}
NAMES = {"holds": "holds", "mixes": "mixes", "overwrites": "is overwritten"}


def section(results: Results) -> str:
    """For each variant, kinds, examples and words of the first run with a write_attention.json; "" if there is none."""
    parts = []
    kinds = {kind: Series(f"slots that {VERBS[kind]}", f"variant-{COLOURS[kind]}") for kind in KINDS}
    for name, run in results.first_runs(lambda run: run.write_attention):
        slug, recorded = f"write-attention-{results.names.index(name)}", run.write_attention
        assert recorded is not None
        source, examples = f"From {run.label}/write_attention.json.", recorded.shown.examples

        # --- the share of each kind by segment, and a slot of each with its weights on tokens ---
        shares = Chart(
            *(f"{slug}-share", "Share of the slots", "share"),
            *(list(kinds.values()), [run.label], [Axis("segment", WHOLE)]),
            "lines" if len(recorded.shares["holds"]) > 1 else "marks",
            bands=[(KINDS.index(kind), *PAPER[kind]) for kind in KINDS if kind in PAPER],
            form="%",
            limits=(-0.02, 1.02),
        )
        for index, kind in enumerate(KINDS):
            shares.add(index, 0, recorded.shares[kind], range(1, len(recorded.shares[kind]) + 1))
        charts, tokens = [shares], [Axis("token of the segment", WHOLE)]
        for index, one in enumerate(examples):
            itself = [(f"slot {one.slot} on itself", one.itself)]
            names = (f"{slug}-{index}", slot_title(one), "attention")
            chart = Chart(*names, [kinds[one.kind]], [run.label], tokens, "bars", references=itself)
            weights = one.weights[: recorded.shown.first]
            chart.add(0, 0, weights, range(1, len(weights) + 1))
            charts.append(chart)
        caption = f"{name}: {about(recorded)} Bands: the paper's shares, of text. {explained(recorded)} {source}"
        parts += [paragraph(f"{name}: {summary(recorded)}"), chart_figure(charts, caption), _table(name, recorded)]

        # --- the words of that segment, shaded by the weights of the slots that do not just hold ---
        if (words := recorded.shown.words) is not None:
            shaded = [one for one in examples if one.kind != "holds"] or list(examples[-1:])
            caption = (
                f"{name}: the text from the start of that segment. The shade of a word is the slot's mean attention to "
                "its tokens, from none to the largest. The encoder reads a segment in both directions, so the output "
                f"at a token also depends on its surroundings. {source}"
            )
            parts.append(figure([shaded_text(one, words) for one in shaded], caption, "full"))
    return "\n".join(parts)


def about(recorded: WriteAttention) -> str:
    """What was measured and how the kinds are defined."""
    low, high = recorded.thresholds
    document = "validation document" if recorded.split == "valid" else "test document"
    return (
        f"attention of the memory writer, mean over heads, in {plural(recorded.documents, document)} of up to "
        f"{len(recorded.shares['holds'])} segments of {recorded.segment} tokens. A slot holds if its weight on itself "
        f"is above {high:g}, is overwritten if it is below {low:g}, and mixes otherwise."
    )


def explained(recorded: WriteAttention) -> str:
    """What the panels of single slots show."""
    return (
        f"The other panels: segment {recorded.shown.place + 1} of {recorded.shown.of} of the first document, the slot "
        "with the median weight of each kind: its weights on the tokens, and on itself as a line."
    )


def summary(recorded: WriteAttention) -> str:
    """Sentences that compare the shares and the forgetting biases with the paper's."""
    parts = []
    for i, kind in enumerate(KINDS):
        theirs = f" (the paper, of text: {_span(PAPER[kind])})" if kind in PAPER else ""
        parts.append(f"{recorded.middle[kind]:.0%}{'' if i else ' of the slots'} {VERBS[kind]}{theirs}")
    text = f"in the middle half of a document {listed(parts)}."
    holds, writes = recorded.kinds["holds"].bias, recorded.kinds["overwrites"].bias
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


def shaded_text(one: SlotExample, words: tuple[tuple[str, int], ...]) -> str:
    """The words, each shaded by its weight beside the largest: HTML."""
    weights = word_weights(one, words)
    most, parts = max(weights) or 1.0, []
    for (text, _), weight in zip(words, weights, strict=True):
        share = round(85 * weight / most)
        blank = text.isspace() or not share
        parts.append(escape(text) if blank else f'<mark style="--weight:{share}%">{escape(text)}</mark>')
    title = escape(f"Slot {one.slot}, which {NAMES[one.kind]}")
    return f'<p class="title">{title}</p><p class="shaded">{gap(words).join(parts)}</p>'


def _table(name: str, recorded: WriteAttention) -> str:
    def bias(kind: str) -> str:
        of_kind = recorded.kinds[kind]
        if not math.isfinite(of_kind.bias):
            return "–"
        mean, least, most = (decimal(norm / recorded.radius) for norm in (of_kind.bias, of_kind.least, of_kind.most))
        return f"{mean} ({least} to {most})"

    return table_of(
        f"{name}: slots by kind. Share: share of all slots, over the middle half of every document. Usually: how many "
        f"of the {recorded.slots} slots are of the kind by their mean weight on themselves. ‖v_bias‖/ρ: norm of the "
        f"forgetting bias, mean and range, divided by the radius ρ = {decimal(recorded.radius)} of a slot (1 in the "
        "paper).",
        KINDS,
        {
            "slots that": lambda kind: escape(VERBS[kind]),
            "share": lambda kind: f"{recorded.middle[kind]:.1%}",
            "paper, of text": lambda kind: _span(PAPER[kind]) if kind in PAPER else "–",
            "usually": lambda kind: str(recorded.kinds[kind].slots),
            "‖v_bias‖/ρ": bias,
            "paper, one slot": lambda kind: decimal(PAPER_BIAS[kind]) if kind in PAPER_BIAS else "–",
        },
    )
