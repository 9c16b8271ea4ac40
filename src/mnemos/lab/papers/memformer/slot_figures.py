"""Figures 6 and 7: what the slots of a small Memformer do with a document, and the words that they attend to.

The model is trained on the text in --data or on the standard library's source.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mnemos.errors import say
from mnemos.lab.evaluate.recorded import KINDS, SlotExample, WriteAttention
from mnemos.lab.evaluate.write_attention import record_write_attention
from mnemos.lab.recipes.text import text as text_recipe
from mnemos.lab.report import report
from mnemos.lab.report.read import read_run
from mnemos.lab.report.slot_attention import (
    COLOURS,
    NAMES,
    PAPER,
    VERBS,
    about,
    explained,
    gap,
    slot_title,
    summary,
    word_weights,
)
from mnemos.lab.report.style import MUTED, RULE
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.trained import open_run
from mnemos.types import InputError

from ..claim import Claim
from ..drawing import png, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import runs, train_and_compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


STEPS = 1000
COLUMNS = 100  # characters per line in figure7.png
SHOWN = 12  # words in the table


def small(options: Options, steps: int) -> Recipe:
    """The recipe text-memformer with the paper's preset, LayerNorm, GELU and the rate 1e-3, on the options' text.

    `steps`: the updates, where the options say no number. Only 1 % of the documents is held out: for such small models
    a small test split is sufficient.
    """
    recipe = text_recipe("memformer")
    model: Any = recipe.model
    data: Any = recipe.data
    data = replace(data, path=None if options.data is None else str(options.data), held_out=0.01)
    count = options.steps or steps
    train = replace(recipe.train, steps=count, eval_every=max(1, count // 4))
    optim = replace(recipe.optim, lr=1e-3, schedule=replace(recipe.optim.schedule, warmup=100))
    model = replace(model, preset="paper", norm="pre", activation="gelu", mlp=256)
    return replace(recipe, model=model, data=data, optim=optim, train=train)


def source(options: Options) -> str:
    """A description of the text, for titles."""
    return "the standard library's source" if options.data is None else f"the text in {options.data}"


def figure6(claim: Claim, options: Options) -> Finding:
    """Figure 6: the shares of slots that hold, mix or are overwritten, by segment, and one slot of each kind."""
    if options.recipes_only:
        return Finding([], [_COMMANDS])
    run = _run(options)
    found = _write_attention(run)
    low, high = found.thresholds
    table = Table(
        f"Slots by kind, over the middle half of {found.documents} test documents",
        ["", "own weight", "share, %", "paper share, %", "slots on average", "their ‖v_bias‖/ρ", "paper ‖v_bias‖/ρ"],
    )
    bounds = {"holds": f"> {high:g}", "mixes": "between", "overwrites": f"< {low:g}"}
    for kind in KINDS:
        usual, theirs = found.kinds[kind], PAPER.get(kind)
        bias = usual.bias / found.radius if usual.slots else None
        said = "–" if theirs is None else f"{100 * theirs[0]:.0f} to {100 * theirs[1]:.0f}"
        paper = {"holds": 1.15, "overwrites": 3.2}.get(kind)
        share = 100 * found.middle[kind]
        table.add(f"slots that {VERBS[kind]}", bounds[kind], share, said, usual.slots, bias, paper)
    size = (10.0, 3.0 + 2.6 * ((len(found.shown.examples) + 2) // 2 - 1))
    path = png(options.out / "figure6.png", size, partial(_panels, found=found))
    even = (
        f"Attention that is even over a segment leaves a slot a weight of {1 / (1 + found.segment):.3f} on itself: "
        "where that is below the bound, a writer that has not learned to choose counts as overwriting."
    )
    notes = [f"{run}: {summary(found)}", f"Data: {about(found)} {even}", explained(found)]
    return Finding([table], notes, [path, report([run], options.out / "figure6.html")], [run])


def figure7(claim: Claim, options: Options) -> Finding:
    """Figure 7: the words that slots attended to in the middle of a document."""
    if options.recipes_only:
        return Finding([], [_COMMANDS])
    run = _run(options)
    found = _write_attention(run)
    if found.shown.words is None:
        raise InputError(f"{run}: expected a run on text, found another task; choose a run on text with --run")
    writers = [one for one in found.shown.examples if one.kind != "holds"] or list(found.shown.examples[-1:])
    tables = []
    for one in writers:
        columns = ["word", "attention per token, relative to uniform", "% of its attention", "tokens"]
        table = Table(f"{slot_title(one)}: the words with most attention", columns)
        pairs = sorted(
            zip(word_weights(one, found.shown.words), found.shown.words, strict=True), key=lambda pair: -pair[0]
        )
        for weight, (word, length) in [pair for pair in pairs if not pair[1][0].isspace()][:SHOWN]:
            table.add(word, weight * found.shown.first, 100 * weight * length, length)
        tables.append(table)
    lines = len(_wrapped(found.shown.words))
    size = (10.0, 0.35 + len(writers) * (0.55 + 0.24 * lines))
    path = png(options.out / "figure7.png", size, partial(_texts, slots=writers, words=found.shown.words))
    where = f"segment {found.shown.place + 1} of {found.shown.of} of the longest document"
    notes = [f"{run}: {where}. Uniform attention is equal on every token of a segment.", _SAYS]
    return Finding(tables, notes, [path, report([run], options.out / "figure7.html")], [run])


_COMMANDS = "To draw a finished run, for example of mnemos train text-memformer --data.path FOLDER, use --run RUN."
_SAYS = "The paper's slot attended to named entities and verbs; its tokens are words."


def _run(options: Options) -> Path:
    """The run given by --run, or a small run on text, which is trained unless it exists."""
    if options.run is not None:
        return options.run
    recipe = small(options, STEPS)
    say(f"  training {recipe.name} on {source(options)}, {recipe.train.steps:,} updates", flush=True)
    (run,) = runs(train_and_compare(options, "text", [recipe], seeds=1))
    return run


def _write_attention(run: Path) -> WriteAttention:
    """The write attention of a run's slots. It is recorded now if the run has no write_attention.json."""
    if not (run / "write_attention.json").is_file():
        _, task, model = open_run(run)
        record_write_attention(model, task, run)
    found = read_run(run, str(run)).write_attention
    if found is None:
        raise InputError(
            f"{run}: expected a run of a model that writes slots, found another model; choose a Memformer run with "
            "--run"
        )
    return found


def _colour(kind: str) -> str:
    return variant_colour(COLOURS[kind])


def _panels(figure: "Figure", found: WriteAttention) -> None:
    """Draw the shares and each example, two panels per row."""
    from matplotlib.lines import Line2D

    count = len(found.shown.examples) + 1
    rows = (count + 1) // 2
    inches = figure.get_size_inches()[1]
    high = (inches - 0.55) / rows
    for i in range(count):
        row, column = divmod(i, 2)
        bottom = inches - 0.55 - (row + 1) * high + 0.55
        axes = figure.add_axes((0.06 + 0.5 * column, bottom / inches, 0.42, (high - 0.95) / inches))
        if i:
            _draw_slot(axes, found.shown.examples[i - 1], found.shown.first)
            axes.set_xlabel("token of the segment")
        else:
            _draw_shares(axes, found)
            axes.set_xlabel("segment")
        title = slot_title(found.shown.examples[i - 1]) if i else "Share of the slots (bands: the paper's)"
        axes.set_title(title, loc="left", fontsize=13)
    keys = [Line2D([], [], color=_colour(kind), label=f"slots that {VERBS[kind]}", linewidth=2.5) for kind in KINDS]
    figure.legend(handles=keys, loc="upper left", bbox_to_anchor=(0.05, 1.0), ncol=3, frameon=False, fontsize=12)


def _draw_shares(axes: "Axes", found: WriteAttention) -> None:
    """Draw one line per kind, and the paper's shares as bands."""
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    count = len(found.shares["holds"])
    place = np.arange(1, count + 1)
    for kind, (low, high) in PAPER.items():
        axes.axhspan(low, high, color=_colour(kind), alpha=0.16, linewidth=0)
    for kind in KINDS:
        axes.plot(place, found.shares[kind], color=_colour(kind), marker="o" if count < 3 else None, markersize=4)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(0.5, max(count, 2) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    axes.grid(axis="y", color=RULE[0])


def _draw_slot(axes: "Axes", one: SlotExample, first: int) -> None:
    """Draw one bar per token for the `first` tokens, and one for the slot itself left of the line."""
    tokens, weights = np.arange(1, first + 1), one.weights[:first]
    gap = max(2.0, len(tokens) / 20)
    axes.bar(tokens, weights, width=0.8, color=_colour(one.kind))
    axes.bar([-gap], [one.itself], width=gap, color=_colour(one.kind))
    axes.axvline(0, color=MUTED[0], linewidth=0.6)
    axes.set_xlim(-1.8 * gap, len(tokens) + 1)
    # The scale includes the slot's weight on itself, so that the tokens of a slot that holds look small.
    axes.set_ylim(0, 1.05 * max(one.itself, float(weights.max())))
    ticks = [tick for tick in axes.get_xticks() if 0 < tick <= len(tokens)]
    axes.set_xticks([-gap, *ticks], ["itself", *(f"{tick:.0f}" for tick in ticks)])
    axes.grid(axis="y", color=RULE[0])


def _texts(figure: "Figure", slots: list[SlotExample], words: tuple[tuple[str, int], ...]) -> None:
    part = 1 / len(slots)
    for i, one in enumerate(slots):
        axes = figure.add_axes((0.02, 1 - (i + 1) * part, 0.96, part))
        _shaded(axes, one, words)


def _shaded(axes: "Axes", one: SlotExample, words: tuple[tuple[str, int], ...]) -> None:
    """Draw a segment in a fixed-width font, each word shaded by its share of the slot's attention."""
    from matplotlib.patches import Rectangle

    lines, weights = _wrapped(words), word_weights(one, words)
    most = max(weights) or 1.0
    axes.set_axis_off()
    axes.set_xlim(0, COLUMNS)
    axes.set_ylim(len(lines) + 0.4, -1.9)
    axes.text(0, -0.9, f"Slot {one.slot}, which {NAMES[one.kind]}", fontsize=13)
    for row, line in enumerate(lines):
        for word, column, text in line:
            if not text.isspace():
                share = 0.85 * weights[word] / most
                box = Rectangle((column, row - 0.08), len(text), 0.98, color=_colour(one.kind), linewidth=0)
                box.set_alpha(share)
                axes.add_patch(box)
            for i, letter in enumerate(text):
                axes.text(column + i + 0.5, row + 0.45, letter, ha="center", va="center", family="DejaVu Sans Mono")


def _wrapped(words: tuple[tuple[str, int], ...]) -> list[list[tuple[int, int, str]]]:
    """Lines of at most `COLUMNS` characters: (index of the word, column, text). A full line divides a word."""
    lines: list[list[tuple[int, int, str]]] = [[]]
    column, between = 0, gap(words)
    for i, (text, _) in enumerate(words):
        for letter in text.expandtabs(4) + between:
            if letter == "\n" or column >= COLUMNS:
                lines.append([])
                column = 0
                if letter == "\n":
                    continue
            if lines[-1] and lines[-1][-1][0] == i:
                lines[-1][-1] = (i, lines[-1][-1][1], lines[-1][-1][2] + letter)
            else:
                lines[-1].append((i, column, letter))
            column += 1
    return [line for line in lines if line] or [[]]
