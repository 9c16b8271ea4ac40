"""What the slots of a memory listened to in real text: kinds by segment, examples, and words (Memformer, 6 and 7)."""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .markup import decimal, escape, figure, legend, listed, paragraph, plural, table
from .read_write_attention import KINDS
from .results import Comparison, RunRecord, SlotExample, WriteAttention
from .style import ARMS, MUTED, RULE, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What the paper saw of 1,024 slots "during the middle of processing a document", and ‖v_bias‖ of two of them, ρ = 1.
PAPER = {"holds": (0.6, 0.8), "overwrites": (0.05, 0.1)}
PAPER_BIAS = {"holds": 1.15, "overwrites": 3.20}
_COLOURS = dict(zip(KINDS, (2, 4, 1), strict=True))  # of the palette's arms
SAID = {"holds": "hold", "mixes": "mix", "overwrites": "are overwritten"}
NAMES = {"holds": "holds", "mixes": "mixes", "overwrites": "is overwritten"}


def section(comparison: Comparison) -> str:
    """Kinds, examples and words of the first run of each arm whose slots were listened to; "" where there is none."""
    parts = []
    for index, name in enumerate(comparison.arms):
        run = next((run for run in comparison.runs.get(name, ()) if run.listened is not None), None)
        if run is not None and run.listened is not None:
            parts.append(_arm(index, name, run, run.listened))
    return "\n".join(parts)


def _arm(index: int, name: str, run: RunRecord, found: WriteAttention) -> str:
    panels = [panel(f"listening-{index}-share", "Share of the slots, by segment", partial(draw_shares, found=found))]
    for place, one in enumerate(found.examples):
        drawn = partial(draw_listener, one=one, first=found.first)
        panels.append(panel(f"listening-{index}-{place}", heading(one), drawn, label=f"Attention of slot {one.slot}"))
    keys = legend((f"arm-{_COLOURS[kind]}", f"slots that {SAID[kind]}") for kind in KINDS)
    caption = (
        f"{name}: {about(found)} Bands: the paper's shares. {explained(found)} From {run.label}/write_attention.json."
    )
    parts = [paragraph(f"{name}: {summary(found)}"), figure(panels, caption, legend=keys), _table(name, found)]
    shaded = [one for one in found.examples if one.kind != "holds"] or list(found.examples[-1:])
    if found.words is not None:
        texts = [_text(one, found.words) for one in shaded]
        caption = (
            f"{name}: the words from the same segment on, each shaded by the attention that the slot pays to a byte of "
            "it on average, from none to the most. The encoder reads a segment in both directions, so a byte stands "
            f"for what surrounds it, too. From {run.label}/write_attention.json."
        )
        parts.append(figure(texts, caption, kind="full"))
    return "\n".join(parts)


def about(found: WriteAttention) -> str:
    """What was read and what the kinds are, in a sentence."""
    low, high = found.about["thresholds"]
    documents = plural(int(found.about["documents"]), "test document")
    return (
        f"the writer's attention, mean over heads, in {documents} of up to {len(found.shares['holds'])} segments of "
        f"{found.about['segment']:.0f} tokens. A slot holds where its weight on itself is above {high:g}, is "
        f"overwritten where it is below {low:g}, and mixes between."
    )


def explained(found: WriteAttention) -> str:
    """What the panels of single slots are."""
    shown = found.about["shown"]
    return (
        f"The others: in segment {shown['place'] + 1:.0f} of {shown['of']:.0f} of the longest document, the slot of "
        "median weight of each kind; its weight on itself is the bar before the rule, the rest that on each token."
    )


def summary(found: WriteAttention) -> str:
    """The shares beside the paper's, and the biases, in sentences."""
    middle, kinds = found.about["middle"], found.about["kinds"]
    parts = []
    for i, kind in enumerate(KINDS):
        theirs = f" (the paper: {_span(PAPER[kind])})" if kind in PAPER else ""
        parts.append(f"{middle[kind]:.0%}{'' if i else ' of the slots'} {SAID[kind]}{theirs}")
    text = f"in the middle half of a document {listed(parts)}."
    holds, writes = kinds["holds"]["bias"], kinds["overwrites"]["bias"]
    if holds is not None and writes is not None:
        text += (
            f" ‖v_bias‖ of slots that are usually overwritten is {writes / holds:.2f} times that of slots that usually "
            f"hold (the paper, of one slot each: {PAPER_BIAS['overwrites'] / PAPER_BIAS['holds']:.2f})."
        )
    return text


def _span(pair: tuple[float, float]) -> str:
    return f"{pair[0] * 100:.0f}–{pair[1]:.0%}"


def heading(one: SlotExample) -> str:
    """A panel's title."""
    return f"Slot {one.slot} {NAMES[one.kind]}: {one.itself:.2f} on itself"


def colour(kind: str) -> str:
    """Of a kind of slot, in every picture."""
    return ARMS[_COLOURS[kind]][0]


def draw_shares(axes: "Axes", found: WriteAttention) -> None:
    """A line a kind, and the paper's shares as bands."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    count = len(found.shares["holds"])
    place = np.arange(1, count + 1)
    for kind, (low, high) in PAPER.items():
        axes.axhspan(low, high, color=colour(kind), alpha=0.16, linewidth=0)
    for kind in KINDS:
        axes.plot(place, found.shares[kind], color=colour(kind), marker="o" if count < 3 else None, markersize=4)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(0.5, max(count, 2) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.grid(axis="y", color=RULE[0])


def draw_listener(axes: "Axes", one: SlotExample, first: int) -> None:
    """A bar a token, of the `first` of them, and the slot itself before the rule."""
    tokens, weights = np.arange(1, first + 1), one.weights[:first]
    gap = max(2.0, len(tokens) / 20)
    axes.bar(tokens, weights, width=0.8, color=colour(one.kind))
    axes.bar([-gap], [one.itself], width=gap, color=colour(one.kind))
    axes.axvline(0, color=MUTED[0], linewidth=0.6)
    axes.set_xlim(-1.8 * gap, len(tokens) + 1)
    # Of a slot that holds, no token's bar is to look tall.
    axes.set_ylim(0, 1.05 * max(one.itself, float(weights.max())))
    ticks = [tick for tick in axes.get_xticks() if 0 < tick <= len(tokens)]
    axes.set_xticks([-gap, *ticks], ["itself", *(f"{tick:.0f}" for tick in ticks)])
    axes.grid(axis="y", color=RULE[0])


def heard(one: SlotExample, words: tuple[tuple[str, int], ...]) -> list[float]:
    """The attention that a slot pays to each word: the mean over its tokens, or long words would seem to be dear."""
    ends = np.cumsum([length for _, length in words])
    return [float(part.mean()) for part in np.split(one.weights, ends[:-1])]


def _text(one: SlotExample, words: tuple[tuple[str, int], ...]) -> str:
    weights = heard(one, words)
    most = max(weights) or 1.0
    parts = []
    for (text, _), weight in zip(words, weights, strict=True):
        share = round(85 * weight / most)
        blank = text.isspace() or not share
        parts.append(escape(text) if blank else f'<mark style="--heard:{share}%">{escape(text)}</mark>')
    said = f"Slot {one.slot}, which {NAMES[one.kind]}"
    return f'<p class="said">{escape(said)}</p><p class="shaded">{"".join(parts)}</p>'


def _table(name: str, found: WriteAttention) -> str:
    rows = []
    for kind in KINDS:
        usual = found.about["kinds"][kind]
        theirs = _span(PAPER[kind]) if kind in PAPER else "–"
        # What counts is ‖v_bias‖ over the radius, which in the paper is 1.
        norms = [usual[key] and usual[key] / found.about["radius"] for key in ("bias", "least", "most")]
        said = "–" if norms[0] is None else f"{decimal(norms[0])} ({decimal(norms[1])} to {decimal(norms[2])})"
        bias = decimal(PAPER_BIAS[kind]) if kind in PAPER_BIAS else "–"
        rows.append(
            [escape(SAID[kind]), f"{found.about['middle'][kind]:.1%}", theirs, f"{usual['slots']:.0f}", said, bias]
        )
    slots, radius = found.about["slots"], decimal(found.about["radius"])
    caption = (
        f"{name}: slots by kind. Share: of all slots, over the middle half of every document. Usually: how many of the "
        f"{slots:.0f} are of the kind by their mean weight on themselves there. ‖v_bias‖/ρ: the length of their "
        f"forgetting bias, mean and range, over that of a slot, {radius} (the paper's: 1)."
    )
    return table(caption, ["slots that", "share", "paper", "usually", "‖v_bias‖/ρ", "paper, of one"], rows)
