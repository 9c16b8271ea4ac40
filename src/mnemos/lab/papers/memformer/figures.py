"""Figures 4 to 8: drift of slots, costs by length and memory, what slots do and read, horizons and numbers of slots.

Figures 4 and 5 train nothing. The small models of Figures 6 to 8 read the text in --data or the standard library's
source.
"""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.attention.relative import RelativeConfig
from mnemos.config import ModelConfig
from mnemos.errors import plural, say
from mnemos.lab.compare.baselines import parameters
from mnemos.lab.evaluate.write_attention import KINDS, SlotExample, WriteAttention, measure_write_attention
from mnemos.lab.measure.flops import forward_flops
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.measure.peak import live_peak_of
from mnemos.lab.recipes.family import altered
from mnemos.lab.recipes.text import text as text_recipe
from mnemos.lab.report.shell import INK, MUTED
from mnemos.lab.run.recipe import Recipe, RolloutConfig
from mnemos.lab.run.trained import open_run
from mnemos.memory.slots import SlotsConfig
from mnemos.memory_replay import replay
from mnemos.models.memformer import Memformer, MemformerConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.ops.slot_memory import biased_memory_norm
from mnemos.types import InputError, State, select

from ..claims import Claim
from ..drawing import panel, panels, picture, variant
from ..experiments import add_differences
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import perplexities, train
from .tables import HORIZON, SegmentLoss

# ---- Figure 4: a slot without input drifts to its terminal state ----

WIDTH = 128  # D
STEPS = 1024  # writes without input
NOISE = 2**-23  # the precision of float32, as a distance in units of ρ
CIRCLE, TURNS = 0.3, 16  # ‖v_bias‖/ρ and writes in the drawing of the circle
_ROOT = math.sqrt(WIDTH)
SETTINGS = {  # a radius ρ, and ‖v_bias‖
    "ρ = √D, ‖v‖ = .03 ρ (our start)": (_ROOT, 0.03 * _ROOT),
    "ρ = √D, ‖v‖ = ρ": (_ROOT, _ROOT),
    "ρ = 1, ‖v‖ = 1.15 (the paper's)": (1.0, 1.15),
    "ρ = 1, ‖v‖ = 3.20 (the paper's)": (1.0, 3.20),
}
STARTS: dict[str, tuple[int, Literal[":", "--", "-"]]] = {  # degrees from the terminal state, and the line of the curve
    "near": (30, ":"),
    "across": (90, "--"),
    "opposite": (175, "-"),
}
_DRIFT = (
    "Each slot starts on the sphere of radius ρ at 30°, 90° or 175° from its terminal state T. Each write applies "
    "biased_memory_norm only, in float64. Near T, each write multiplies the distance by 1/(1 + ‖v‖/ρ). Opposite to T, "
    "the slot hardly moves at first, unless ‖v‖ > ρ: then it jumps across the centre. Distances are Euclidean; "
    f"{NOISE:.1e} ρ is the precision of float32. A dash: not reached within {STEPS} writes."
)


def figure4(claim: Claim, options: Options) -> Finding:
    """Figure 4: the drift on a circle, as in the paper, and the remaining distance by write, for several ‖v_bias‖."""
    table = Table(
        f"Remaining distance to the terminal state after writes without input (D = {WIDTH})",
        ["", "start", "after 1", "after 8", "after 32", "writes to half of it", "writes to float32 precision"],
    )
    from matplotlib.patches import Circle

    path = options.out / "figure4.png"
    with picture(path, (10.0, 5.2)) as figure:
        circle, axes = figure.subplots(1, 2, width_ratios=(2, 3))
        # --- slots a and b as the paper draws them: the same writes turn b less than a ---
        panel(circle, "On a circle", "").set_axis_off()
        circle.set(aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.45, 1.45))
        circle.add_patch(Circle((0, 0), 1, fill=False, edgecolor=MUTED[0], linewidth=0.8))
        for name, degrees, color in (("$m_a$", 75, variant(1)["color"]), ("$m_b$", -172, variant(2)["color"])):
            slots = drift(2, 1.0, CIRCLE, math.radians(abs(degrees)), TURNS)
            x, y = slots[:, 0].tolist(), (slots[:, 1] * math.copysign(1, degrees)).tolist()
            circle.plot(x, y, color=color, marker="o", linewidth=0)
            arrow = {"arrowstyle": "->", "color": color, "linewidth": 1.4}
            circle.annotate("", (x[0] + CIRCLE, y[0]), (x[0], y[0]), arrowprops=arrow)
            circle.text(1.2 * x[0], 1.2 * y[0], name, ha="center", va="center", color=color, fontsize=14)
        circle.plot([1], [0], marker="*", markersize=14, color=INK[0], linewidth=0)
        circle.text(1.14, 0, "T", va="center", fontsize=14)
        says = f"{TURNS} writes without input, ‖v‖ = {CIRCLE:g} ρ"
        circle.text(0, -1.32, says, ha="center", fontsize=11, color=MUTED[0])
        # --- the table, and the distance by write ---
        panel(axes, "Distance to the terminal state, in ρ", "writes without input", log="y")
        for i, (setting, (radius, length)) in enumerate(SETTINGS.items()):
            for start, (degrees, line) in STARTS.items():
                left = distances(drift(WIDTH, radius, length, math.radians(degrees), STEPS), radius)
                after = [f"{100 * left[n] / left[0]:.3g}%" if left[n] > NOISE else "nothing" for n in (1, 8, 32)]
                firsts = (next((n for n, x in enumerate(left) if x <= bound), None) for bound in (left[0] / 2, NOISE))
                table.add(setting, start, *after, *firsts)
                label = setting if start == "opposite" else None
                curve = [max(x, NOISE / 4) for x in left]  # nothing has no logarithm
                axes.plot(range(len(left)), curve, color=variant(i)["color"], linestyle=line, label=label)
        for start, (_, line) in STARTS.items():
            axes.plot([], [], color=INK[0], linestyle=line, label=f"from {start}")
        axes.set(xlim=(0, 40), ylim=(NOISE / 2, 3))
        axes.axhline(NOISE, color=MUTED[0], linewidth=0.8)
        axes.text(39.7, NOISE * 1.3, "float32 precision", ha="right", fontsize=9, color=MUTED[0])
    return Finding([table], [_DRIFT], [path])


def drift(width: int, radius: float, length: float, angle: float, steps: int) -> Tensor:
    """The positions [steps + 1, width] of a slot that starts at `angle` (radians) from its terminal state, axis 0."""
    bias = torch.zeros(1, width, dtype=torch.float64)
    bias[0, 0] = length
    slot = torch.zeros(1, 1, width, dtype=torch.float64)
    slot[0, 0, :2] = radius * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    slots = [slot]
    for _ in range(steps):
        slots.append(biased_memory_norm(slots[-1], bias, radius))
    return torch.cat(slots)[:, 0]


def distances(slots: Tensor, radius: float) -> list[float]:
    """The distance of each position of a drift to the terminal state, in units of the radius."""
    end = torch.zeros_like(slots[0])
    end[0] = radius
    return ((slots - end).norm(dim=-1) / radius).tolist()


# ---- Figure 5: FLOPs by length and bytes by memory size, for three models of equal parameters ----

LENGTHS = tuple(2**i for i in range(7, 14))  # tokens of a sequence: 128 to 8,192
SIZES = tuple(2**i for i in range(6, 12))  # slots or tokens of a memory: 64 to 2,048
SEGMENT, MEMORY, BATCH = 128, 1024, 16
PAPER_RATIO = 8.1  # the paper's ratio of memory, "in large memory size setting"
# The paper's image model. All three have the same number of layers; MLP widths make their parameters equal.
MEMFORMER = MemformerConfig(dim=128, encoder_layers=4, decoder_layers=8, num_heads=4, mlp=256, segment=SEGMENT)
USES = ("state", "state inside a segment", "running", "training")  # of memory
NAMES = ("Transformer", "Transformer-XL", "Memformer")
_SIZES_COMPARED = (
    f"Width {MEMFORMER.dim}, {MEMFORMER.num_heads} heads, {MEMFORMER.encoder_layers} + {MEMFORMER.decoder_layers} "
    "layers in Memformer, and equally many layers in the others, whose MLPs are widened to equal parameters. The "
    f"Transformer reads the whole sequence at once, the others read {SEGMENT} tokens at a time. A multiply-add counts "
    "as 2 FLOPs; attention is counted without masking."
)
_BYTES_COUNTED = (
    "State: the bytes kept between two segments with a full memory; inside a segment, before its last token, Memformer "
    "also keeps the keys and values of its decoder. Running: weights, state, and the most bytes of "
    "other tensors at one time while one more segment is read without gradient. Training: weights, state, and the most "
    "bytes of other tensors in an update, without an optimiser. An update of Memformer is memory replay over "
    f"{HORIZON} segments, with the states that it stores, so that encoder and writer have gradients; one of "
    "Transformer-XL is a segment, as no gradient enters its memory. Only tensors count: a GPU also has workspaces, and "
    "memory that was freed and is kept. The paper's 8.1 is of the GPU's memory \"on the actual models\" with a large "
    "memory; the paper does not say whether in inference or in training."
)


def figure5(claim: Claim, options: Options) -> Finding:
    """Figure 5: FLOPs of a forward pass by length; bytes of the running model by memory size, batches of 16."""
    ratio = "Transformer-XL / Memformer"
    # --- FLOPs by length ---
    counts = ", ".join(f"{name} {parameters(configuration(name, MEMORY)):,}" for name in NAMES)
    flops_table = Table(
        f"10⁹ FLOPs of a forward pass; memory {MEMORY:,}, segments of {SEGMENT} tokens (parameters: {counts})",
        ["tokens", *NAMES, ratio],
    )
    flops = {}
    for name in NAMES:
        model, segment = built(name, MEMORY), 0 if name == "Transformer" else SEGMENT
        flops[name] = [forward_flops(model, tokens(1, n), segment=segment) / 1e9 for n in LENGTHS]
    for n, plain, xl, ours in zip(LENGTHS, *flops.values(), strict=True):
        flops_table.add(f"{n:,}", plain, xl, ours, xl / ours)
    growth = ", ".join(f"{name} ×{each[-1] / each[-2]:.2f}" for name, each in flops.items())
    # --- bytes by size of the memory ---
    title = f"MiB of a model that runs with a batch of {BATCH}"
    bytes_table = Table(title, ["memory", "kind", *NAMES[1:], ratio, "paper"])
    use = {name: [memory_of(name, size) for size in SIZES] for name in NAMES[1:]}
    for size, of_xl, of_ours in zip(SIZES, *use.values(), strict=True):
        for name in USES:
            theirs = PAPER_RATIO if (name, size) == ("running", max(SIZES)) else None
            bytes_table.add(f"{size:,}", name, of_xl[name], of_ours[name], of_xl[name] / of_ours[name], theirs)
    # --- the picture ---
    path = options.out / "figure5.png"
    by_length = ("FLOPs of a forward pass, 10⁹", "tokens in the sequence")
    by_size = (f"Running model, {BATCH} streams, MiB (dashed: state)", "size of the memory, tokens or slots")
    with panels(path, by_length, by_size, log="xy") as (left, right):
        for i, name in enumerate(NAMES):
            left.plot(LENGTHS, flops[name], **variant(i), label=name)
            for shown, line in (("running", "-"), ("state", "--")) if name in use else ():
                right.plot(SIZES, [each[shown] for each in use[name]], **variant(i), linestyle=line)
        for axes in (left, right):
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    notes = [_SIZES_COMPARED, f"Growth of FLOPs over the last doubling of the length: {growth}.", _BYTES_COUNTED]
    return Finding([flops_table, bytes_table], notes, [path])


def configuration(name: str, memory: int) -> ModelConfig:
    """The model `name` with a memory of `memory` slots or tokens, and the parameter count of Memformer at `MEMORY`."""
    if name == "Memformer":
        return replace(MEMFORMER, memory=SlotsConfig(slots=memory))
    layers = MEMFORMER.encoder_layers + MEMFORMER.decoder_layers
    base = TransformerConfig.classic(dim=MEMFORMER.dim, layers=layers, num_heads=MEMFORMER.num_heads)
    if name == "Transformer-XL":
        base = replace(base, position="none", attention=RelativeConfig(memory=memory))
    wanted = parameters(replace(MEMFORMER, memory=SlotsConfig(slots=MEMORY)))
    narrow, wide = (parameters(replace(base, mlp=mlp)) for mlp in (1, 2))
    return replace(base, mlp=1 + round((wanted - narrow) / (wide - narrow)))


def memory_of(name: str, size: int) -> dict[str, float]:
    """MiB of a model for a batch whose memory is full: of its state, and of all while it runs and while it is trained.

    The state is that between two segments, and before the last token of one. Running: forward without gradient.
    Training: forward and backward, with the gradients, without an optimiser.
    """
    model = built(name, size)
    with torch.no_grad():
        state: State = None
        for _ in range(-(-size // SEGMENT) if name == "Transformer-XL" else 1):
            _, state = model(tokens(1, SEGMENT), state)
        state = select(state, torch.zeros(BATCH, dtype=torch.int64))  # one stream in every row of the batch
        inside = state_bytes(model(tokens(BATCH, SEGMENT - 1), state)[1])
        forward = live_peak_of(lambda: model(tokens(BATCH, SEGMENT), state))
    between, weights = state_bytes(state), sum(p.numel() * p.element_size() for p in model.parameters())
    training = live_peak_of(lambda: update(model, state))
    sizes = (between, inside, weights + between + forward, weights + between + training)
    return {use: size / 2**20 for use, size in zip(USES, sizes, strict=True)}


def update(model: nn.Module, state: State) -> None:
    """An update from `state`: of Memformer by memory replay, so that its encoder and writer have gradients too."""
    step, rows = SegmentLoss(model), tokens(BATCH, SEGMENT + 1)
    if isinstance(model, Memformer):
        replay(step, [rows] * HORIZON, state, advance=step.advance, verify=False)
    else:
        step(rows, state)[0].backward()


def built(name: str, memory: int) -> nn.Module:
    """The model `name` in evaluation, not trained."""
    torch.manual_seed(0)
    model: nn.Module = configuration(name, memory).build()
    return model.eval()


def tokens(rows: int, length: int) -> Tensor:
    """Tokens 0 to 255 over and over, [rows, length]."""
    return torch.arange(length).remainder(256).expand(rows, -1).contiguous()


# ---- Figures 6 and 7: what the slots of a small Memformer do with a document, and the words that they attend to ----

TEXT_STEPS = 1000
COLUMNS = 100  # characters per line in figure7.png
SHOWN = 12  # words in the table
# The paper's shares of 1,024 slots "during the middle of processing a document", and ‖v_bias‖ of two slots at ρ = 1.
PAPER_SHARES = {"holds": (0.6, 0.8), "overwrites": (0.05, 0.1)}
PAPER_BIAS = {"holds": 1.15, "overwrites": 3.20}
VERBS = {"holds": "hold", "mixes": "mix", "overwrites": "are overwritten"}
_NAMES = {"holds": "holds", "mixes": "mixes", "overwrites": "is overwritten"}
_COLORS = {kind: variant(index)["color"] for kind, index in zip(KINDS, (2, 4, 1), strict=True)}


def figure6(claim: Claim, options: Options) -> Finding:
    """Figure 6: the shares of slots that hold, mix or are overwritten, by segment, and one slot of each kind."""
    run, record = _write_attention(options)
    # --- the table ---
    low, high = record.thresholds
    table = Table(
        f"Slots by kind, over the middle half of {record.documents} test documents",
        ["", "own weight", "share, %", "paper share, %", "slots on average", "their ‖v_bias‖/ρ", "paper ‖v_bias‖/ρ"],
    )
    bounds = {"holds": f"> {high:g}", "mixes": "between", "overwrites": f"< {low:g}"}
    for kind in KINDS:
        usual = record.kinds[kind]
        bias = usual.bias / record.radius if usual.slots else None
        shares = 100 * record.middle[kind], paper_share(kind)
        table.add(f"slots that {VERBS[kind]}", bounds[kind], *shares, usual.slots, bias, PAPER_BIAS.get(kind))
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    examples = record.shown.examples
    rows, path = (len(examples) + 2) // 2, options.out / "figure6.png"
    with picture(path, (10.0, 0.6 + 2.6 * rows)) as figure:
        # --- the picture's first panel: the shares by segment, a line per kind ---
        axes, *others = figure.subplots(rows, 2, squeeze=False).flat
        panel(axes, "Share of the slots (bands: the paper's)", "segment")
        for kind in KINDS:
            segments, label = range(1, len(record.shares[kind]) + 1), f"slots that {VERBS[kind]}"
            style: dict[str, Any] = {"color": _COLORS[kind], "marker": "o" if len(segments) < 3 else None}
            axes.plot(segments, record.shares[kind], **style, label=label)
            if kind in PAPER_SHARES:
                axes.axhspan(*PAPER_SHARES[kind], color=_COLORS[kind], alpha=0.16, linewidth=0)
        axes.set(ylim=(-0.02, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
        # --- a slot of each kind: a bar per token, and left of the line one for the slot itself ---
        for axes, one in zip(others, examples, strict=False):
            panel(axes, _slot_title(one), "token of the segment")
            weights = one.weights[: record.shown.first]
            width = max(2.0, len(weights) / 20)  # of the slot's own bar
            axes.bar(np.arange(1, len(weights) + 1), weights, width=0.8, color=_COLORS[one.kind])
            axes.bar([-width], [one.itself], width=width, color=_COLORS[one.kind])
            axes.axvline(0, color=MUTED[0], linewidth=0.6)
            # The scale includes the slot's weight on itself, so that the tokens of a slot that holds look small.
            axes.set(xlim=(-1.8 * width, len(weights) + 1), ylim=(0, 1.05 * max(one.itself, float(weights.max()))))
            ticks = [tick for tick in axes.get_xticks() if 0 < tick <= len(weights)]
            axes.set_xticks([-width, *ticks], ["itself", *(f"{tick:.0f}" for tick in ticks)])
        for axes in others[len(examples) :]:
            axes.remove()
    even = (
        f"Attention that is even over a segment leaves a slot a weight of {1 / (1 + record.segment):.3f} on itself: "
        "where that is below the bound, a writer that has not learned to choose counts as overwriting."
    )
    document = "validation document" if record.split == "valid" else "test document"
    about = (
        f"attention of the memory writer, mean over heads, in {plural(record.documents, document)} of up to "
        f"{len(record.shares['holds'])} segments of {record.segment} tokens. A slot holds if its weight on itself is "
        f"above {high:g}, is overwritten if it is below {low:g}, and mixes otherwise."
    )
    explained = (
        f"The other panels: segment {record.shown.place + 1} of {record.shown.of} of the first document, the slot with "
        "the median weight of each kind: its weights on the tokens, and on itself."
    )
    notes = [f"{run}: {about} {even}", explained]
    return Finding([table], notes, [path], [run])


def paper_share(kind: str) -> str:
    """The paper's share of the slots of a kind, in percent."""
    share = PAPER_SHARES.get(kind)
    return "–" if share is None else f"{100 * share[0]:.0f} to {100 * share[1]:.0f}"


def _slot_title(one: SlotExample) -> str:
    return f"Slot {one.slot} {_NAMES[one.kind]}: {one.itself:.2f} on itself"


def figure7(claim: Claim, options: Options) -> Finding:
    """Figure 7: the words that slots attended to in the middle of a document."""
    run, record = _write_attention(options)
    words, shown = record.shown.words, record.shown
    if words is None:
        raise InputError(f"{run}: expected a run on text, found another task; choose a run on text with --run")
    # --- a table for each slot that does not hold ---
    writers = [one for one in shown.examples if one.kind != "holds"] or list(shown.examples[-1:])
    tables, columns = [], ["word", "attention per token, relative to uniform", "% of its attention", "tokens"]
    for one in writers:
        table = Table(f"{_slot_title(one)}: the words with most attention", columns)
        weighed = zip(_word_weights(one, words), words, strict=True)
        read = sorted((pair for pair in weighed if not pair[1][0].isspace()), key=lambda pair: -pair[0])
        for weight, (word, length) in read[:SHOWN]:
            table.add(word, weight * shown.first, 100 * weight * length, length)
        tables.append(table)
    # --- the picture: the text once for each, its words shaded by attention ---
    lines, path = _wrap(words), options.out / "figure7.png"
    height = 0.55 + 0.24 * (lines[-1][1] + 1)
    with picture(path, (10.0, 0.35 + len(writers) * height), layout=None) as figure:
        for i, one in enumerate(writers):
            axes = figure.add_axes((0.02, 1 - (i + 1) / len(writers), 0.96, 1 / len(writers)))
            axes.set_axis_off()
            axes.set(xlim=(0, COLUMNS), ylim=(lines[-1][1] + 1.4, -1.9))
            axes.text(0, -0.9, f"Slot {one.slot}, which {_NAMES[one.kind]}", fontsize=13)
            weights = _word_weights(one, words)
            for index, row, column, text in lines:
                shade = 0.0 if text.isspace() else 0.85 * weights[index] / (max(weights) or 1.0)
                box = {"facecolor": _COLORS[one.kind], "alpha": shade, "linewidth": 0, "pad": 0}
                # A letter is .602 of the font's size wide: at 11.4 points a hundredth of the width of the axes.
                axes.text(column, row + 0.5, text, va="center", family="DejaVu Sans Mono", fontsize=11.4, bbox=box)
    where = f"segment {shown.place + 1} of {shown.of} of the longest document"
    notes = [
        f"{run}: {where}. Uniform attention is equal on every token of a segment.",
        "The paper's slot attended to named entities and verbs; its tokens are words.",
    ]
    return Finding(tables, notes, [path], [run])


def _word_weights(one: SlotExample, words: tuple[tuple[str, int], ...]) -> list[float]:
    """The attention of a slot to each word: the mean over its tokens, so that long words do not count more."""
    ends = np.cumsum([length for _, length in words])
    return [float(part.mean()) for part in np.split(one.weights, ends[:-1])]


def _wrap(words: tuple[tuple[str, int], ...]) -> list[tuple[int, int, int, str]]:
    """The words in lines of at most `COLUMNS` characters: (index of the word, line, column, text)."""
    pieces: list[tuple[int, int, int, str]] = []
    # Between words stands a space where they have no white space of their own.
    row, column, between = 0, 0, "" if any(text != text.strip() for text, _ in words) else " "
    for i, (word, _) in enumerate(words):
        for line, text in enumerate((word.expandtabs(4) + between).split("\n")):
            if line or column + len(text) > COLUMNS:
                row, column = row + (column > 0), 0  # an empty line takes no space
            if text:
                pieces.append((i, row, column, text[:COLUMNS]))
            column += len(text)
    return pieces


def _write_attention(options: Options) -> tuple[Path, WriteAttention]:
    """The run of --run or a small one, trained unless it exists, and what its slots attend to when they are written."""
    run = options.run
    if run is None:
        recipe = small(options, TEXT_STEPS)
        say(f"  training {recipe.name} on {source(options)}, {recipe.train.steps:,} updates", flush=True)
        (run,) = train(Finding(), options, "text", {"text": recipe}, seeds=1).runs["text"]
    _, task, model = open_run(run)
    record = measure_write_attention(model, task)
    if record is None:
        raise InputError(
            f"{run}: expected a run of a model that writes slots, found another model; choose a Memformer run with "
            "--run"
        )
    return run, record


def small(options: Options, steps: int) -> Recipe:
    """The recipe text-memformer with the paper's preset, LayerNorm, GELU and the rate 1e-3, on the options' text.

    `steps`: the updates, where the options say no number. Only 1 % of the documents is held out: for such small models
    a small test split is sufficient.
    """
    count = options.steps or steps
    return altered(
        text_recipe("memformer"),
        model={"preset": "paper", "norm": "pre", "activation": "gelu", "mlp": 256},
        data={"path": None if options.data is None else str(options.data), "held_out": 0.01},
        optim={"lr": 1e-3, "schedule": {"warmup": 100}},
        train={"steps": count, "eval_every": max(1, count // 4)},
    )


def source(options: Options) -> str:
    """A description of the text, for titles."""
    return "the standard library's source" if options.data is None else f"the text in {options.data}"


# ---- Figure 8: perplexity by the horizon of the gradient, and by the number of slots ----

HORIZONS = (1, 2, 4, 8, 16, 32)  # segments through which gradient flows
SLOTS = (1, 8, 16, 32, 64)
CONSTANT_HORIZON = 8  # at which numbers of slots are compared
SHORT_STEPS = 150
SHORT_SEGMENT, READ = 32, max(HORIZONS)  # tokens per segment, and segments per update, in every variant
_VARIANTS = (
    f"Every variant reads {READ} segments of {SHORT_SEGMENT} bytes per update. Variants differ in (a) the number of "
    f"segments that the gradient passes through, with {max(SLOTS)} slots, or (b) the number of slots, with a horizon "
    f"of {CONSTANT_HORIZON}. With larger models: mnemos train text-memformer --train.rollout.segments {READ} "
    "--train.rollout.horizon H --model.memory.slots K"
)
_HORIZONS_SAY = (
    "The paper: a horizon of 1 is the worst, longer ones are better, and at 32 the improvement is almost gone. 8 slots "
    "are much better than 1; more slots gain little. Perplexity is on the test split, with the memory carried to the "
    "end of every document."
)


def figure8(claim: Claim, options: Options) -> Finding:
    """Figure 8: (a) horizons 1 to 32, (b) 1 to 64 slots, with small Memformers on text that are otherwise equal."""
    finding = Finding([], [_VARIANTS])
    read = short_recipe(options, CONSTANT_HORIZON, max(SLOTS)).train
    about = f"{source(options)}, {read.steps:,} updates of {read.batch_size} x {READ} x {SHORT_SEGMENT} bytes"
    # --- two tables, each with its panel: a point a seed, and a line through the means ---
    path = options.out / "figure8.png"
    by_horizon = ("Perplexity by horizon of the gradient", "segments that the gradient passes through")
    with panels(path, by_horizon, ("Perplexity by size of the memory", "slots"), log="x") as (left, right):
        for axes, name, title, values in (
            (left, "horizon", "(a) horizon of the gradient", HORIZONS),
            (right, "slots", "(b) number of slots", SLOTS),
        ):
            columns = [name, "perplexity", "bits per byte", "each seed"]
            table = finding.table(f"Perplexity per byte by {title}: {about}", columns)
            style = variant(1 if axes is left else 2)
            scores: dict[str, list[float]] = {}
            for value in values:
                horizon, slots = (value, max(SLOTS)) if name == "horizon" else (CONSTANT_HORIZON, value)
                say(f"  horizon {horizon}, {slots} slots", flush=True)
                # Each variant has its own folder, as `compare` requires equal training settings, and is named for both
                # numbers: the one that both tables have is trained once.
                recipe = short_recipe(options, horizon, slots)
                trained = train(finding, options, recipe.name, {recipe.name: recipe})
                (each,) = perplexities(trained).values()
                scores[f"{name} {value}"] = each
                mean = statistics.fmean(each)
                table.add(value, mean, math.log2(mean), " ".join(f"{one:.3f}" for one in each))
                axes.plot([value] * len(each), each, **style, linewidth=0, alpha=0.5)
            axes.plot(values, [statistics.fmean(each) for each in scores.values()], **style)
            axes.set_xticks(values, [str(value) for value in values])
            axes.minorticks_off()
            first, *others = scores
            add_differences(finding, options, scores, [(other, first) for other in others])
    finding.notes.append(_HORIZONS_SAY)
    finding.files.append(path)
    return finding


def short_recipe(options: Options, horizon: int, slots: int) -> Recipe:
    """A model with one encoder and one decoder layer: an update of 32 segments takes a fraction of a second."""
    steps = options.steps or SHORT_STEPS
    sizes: dict[str, Any] = {"dim": 32, "encoder_layers": 1, "decoder_layers": 1, "mlp": 64}
    return altered(
        small(options, SHORT_STEPS),
        name=f"text-horizon-{horizon}-slots-{slots}",
        model={**sizes, "segment": SHORT_SEGMENT, "memory": {"slots": slots}},
        data={"segment": SHORT_SEGMENT, "longest": 512 * SHORT_SEGMENT},
        optim={"lr": 3e-3, "schedule": {"warmup": min(100, steps // 10)}},
        train={"batch_size": 8, "eval_every": steps, "rollout": RolloutConfig(segments=READ, horizon=horizon)},
    )
