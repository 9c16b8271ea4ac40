"""The drawings of the pages: `python docs/drawings/draw.py` writes docs/*.svg. The charts among them read results/."""

import json
import math
from pathlib import Path
from typing import Any

from svg import Drawing

from mnemos.lab.compare.significance import Spread, welch

RESULTS = Path(__file__).parents[2] / "results"


def state() -> None:
    """Four calls of one model: a state goes in and comes out, is kept, forked and saved."""
    d = Drawing(720, 260, "A state goes into a call and comes out of it; it can be kept, forked and saved")
    d.text(20, 30, "y, state = layer(x, state)", size=15, bold=True)
    d.text(20, 50, "The same call trains on whole rows, reads a prompt and writes token by token.", colour="soft")
    d.cells(20, 88, ["ppppp"], 18)
    d.text(65, 82, "five tokens", "middle", 12, "soft")
    d.box(140, 75, 70, 44, "layer", "blue")
    d.arrow((112, 97), (136, 97))
    d.arrow((175, 119), (175, 150))
    d.text(175, 166, "y: five outputs", "middle", 12, "soft")
    d.arrow((212, 97), (256, 97), strong=True)
    d.box(260, 78, 58, 38, "state", "green")
    d.arrow((289, 118), (289, 196), dashed=True)
    d.box(250, 198, 78, 34, "a file", "plain")
    d.text(296, 160, "save", size=12, colour="soft")
    for y, tokens, word in ((68, "p", "a token"), (160, "ppp", "three others")):
        d.arrow((320, 97), (392, y + 22), strong=True)
        d.box(396, y, 70, 44, "layer", "blue")
        d.cells(431 - 9 * len(tokens), y + 58, [tokens], 18)
        d.text(431 + 9 * len(tokens) + 6, y + 72, word, size=12, colour="soft")
        d.arrow((431, y + 56), (431, y + 48))
        d.arrow((468, y + 22), (512, y + 22), strong=True)
        d.box(516, y + 3, 58, 38, "state", "green")
    for i, line in enumerate(("The first state", "stays as it was:", "both go on", "from it.")):
        d.text(592, 128 + 17 * i, line, size=12, colour="soft")
    d.write("state")


def linear_attention() -> None:
    """The sum that linear attention keeps, written and read once a token; and the same for whole rows."""
    d = Drawing(720, 300, "Linear attention keeps a sum of outer products; a token adds one and reads once")
    d.text(20, 30, "A token at a time: constant cost", size=15, bold=True)
    for i in range(3):
        x = 20 + 150 * i
        d.cells(x + 34, 110, ["g" * 4] * 4, 14)
        d.text(x + 18, 120, f"S_{i + 1}", "middle", 14)
        d.box(x + 16, 52, 92, 30, f"φ(k_{i + 1}) v_{i + 1}^T", "blue")
        d.arrow((x + 62, 84), (x + 62, 107))
        d.text(x + 72, 100, "+", size=13)
        d.arrow((x + 62, 168), (x + 62, 186))
        d.box(x + 16, 188, 92, 30, f"y_{i + 1}", "plain")
        if i:
            d.arrow((x - 58, 138), (x + 30, 138), strong=True)
    d.text(20, 244, "y_i = φ(q_i)^TS_i / φ(q_i)^Tz_i", size=15)
    d.text(20, 266, "S = Σ φ(k) v^T: one matrix a head.  z = Σ φ(k): one vector.", size=12, colour="soft")
    d.text(20, 284, "The number of tokens does not appear in the size of either.", size=12, colour="soft")
    d.line(470, 20, 470, 280, dashed=True)
    d.text(490, 30, "Rows: same numbers", size=15, bold=True)
    d.cells(
        500, 60, ["b       ", "bb      ", "bbb     ", "bbbb    ", "ggggb   ", "ggggbb  ", "ggggbbb ", "ggggbbbb"], 18
    )
    d.text(500, 232, "Within a chunk: products of", size=12, colour="soft")
    d.text(500, 249, "queries and keys. Earlier chunks", size=12, colour="soft")
    d.text(500, 266, "(green): read from S.", size=12, colour="soft")
    d.write("linear-attention")


def gated_cache() -> None:
    """Where a gated cache is read, mixed and written, and whose it is."""
    d = Drawing(
        720, 330, "A gated cache: tokens read slots through a second attention, a gate mixes, a recurrent gate writes"
    )
    d.text(20, 30, "In a layer", size=15, bold=True)
    d.box(20, 120, 70, 40, "tokens", "plain")
    d.box(140, 70, 130, 40, "self-attention", "blue")
    d.box(140, 170, 130, 40, "attention to slots", "green")
    d.cells(175, 262, ["gggg"], 15)
    d.text(205, 296, "cache: slots", "middle", 12, "soft")
    d.arrow((92, 132), (136, 92))
    d.arrow((92, 148), (136, 188))
    d.arrow((205, 260), (205, 213), strong=True)
    d.box(320, 120, 110, 40, "mix by σ(λ)", "orange")
    d.arrow((272, 92), (316, 132))
    d.arrow((272, 188), (316, 148))
    d.arrow((432, 140), (468, 140))
    d.text(452, 128, "y", "middle", 13)
    d.arrow((55, 162), (55, 272), (170, 272), dashed=True)
    d.text(62, 232, "written after", size=12, colour="soft")
    d.text(62, 248, "reading, by gates", size=12, colour="soft")
    d.line(480, 20, 480, 310, dashed=True)
    d.text(500, 30, "Whose cache?", size=15, bold=True)
    d.text(500, 60, 'scope="shared" (paper)', size=13, bold=True)
    d.text(500, 78, "One a layer, from the mean of the", size=12, colour="soft")
    d.text(500, 94, "training batch; frozen in eval.", size=12, colour="soft")
    for i, y in enumerate((112, 130, 148)):
        d.cells(510, y, ["pppp"], 14)
        d.arrow((570, y + 7), (618, 133 + 3 * i))
    d.cells(624, 126, ["gggg"], 15)
    d.text(500, 204, 'scope="stream"', size=13, bold=True)
    d.text(500, 222, "One a row, part of the state, also", size=12, colour="soft")
    d.text(500, 238, "in eval: a memory of this text.", size=12, colour="soft")
    for y in (256, 276, 296):
        d.cells(510, y, ["pppp"], 14)
        d.arrow((570, y + 7), (618, y + 7))
        d.cells(624, y, ["gggg"], 14)
    d.write("gated-cache")


def memformer() -> None:
    """Slots from segment to segment, and replay: forward keeps states, backward runs one segment again at a time."""
    d = Drawing(
        720, 340, "Memformer passes slots from segment to segment; replay computes its gradients one segment at a time"
    )
    d.text(20, 30, "Memformer: slots are read and written once a segment", size=15, bold=True)
    for i in range(3):
        x = 60 + 210 * i
        d.cells(x, 64, ["ggg"], 16)
        d.text(x + 24, 58, f"M_{i}", "middle", 13)
        d.box(x + 70, 52, 90, 40, "read, write,\nforget", "blue", 12)
        d.arrow((x + 50, 72), (x + 68, 72), strong=True)
        d.arrow((x + 162, 72), (x + 206, 72), strong=True)
        d.cells(x + 79, 122, ["pppp"], 18)
        d.arrow((x + 115, 120), (x + 115, 95))
        d.text(x + 115, 156, f"segment {i + 1}", "middle", 12, "soft")
    d.text(20, 196, "Replay: exact gradients at the memory of one segment", size=15, bold=True)
    d.text(20, 222, "1. forward, without a graph: keep the slots", size=12, colour="soft")
    d.text(20, 276, "2. backward: run the segments once more", size=12, colour="soft")
    for i in range(4):
        x = 300 + 100 * i
        d.cells(x, 208, ["ggg"], 13)
        if i < 3:
            d.arrow((x + 42, 215), (x + 96, 215), strong=True)
            d.box(x + 46, 256, 46, 32, f"seg {i + 1}", "orange" if i == 2 else "plain", 11)
            d.arrow((x + 44, 272), (x - 4, 272), strong=True)
    d.arrow((640, 272), (594, 272), strong=True)
    d.text(646, 276, "∂ loss", size=12)
    d.text(
        20, 316, "One graph exists at a time; gradients of the slots go back segment by segment.", "start", 12, "soft"
    )
    d.write("memformer")


def forget_correct() -> None:
    """What three kinds of layers answer after a key has been written twice."""
    d = Drawing(
        720, 270, "A key is written twice: a sum adds both values, a decay fades the first, the delta rule replaces it"
    )
    d.text(20, 30, "The key k is written with v, later with w. What does a query k read?", size=15, bold=True)
    rows = (
        ("Add", "linear attention", "S + k w^T", "v + w", (1.0, 1.0)),
        ("Forget", "RetNet, GLA, Mamba-2", "a S + k w^T", "a v + w", (0.45, 1.0)),
        ("Correct", "DeltaNet", "S + β k (w − S^Tk)^T", "w  (β = 1)", (0.0, 1.0)),
        ("Forget and correct", "Qwen3-Next, Kimi Linear", "a S + β k (w − a S^Tk)^T", "w", (0.0, 1.0)),
    )
    for x, head in ((20, "layer"), (210, "the state becomes"), (440, "it reads")):
        d.text(x, 62, head, size=12, colour="soft")
    for i, (name, whose, update, reads, (old, new)) in enumerate(rows):
        y = 92 + 46 * i
        d.text(20, y, name, size=14, bold=True)
        d.text(20, y + 17, whose, size=11, colour="soft")
        d.text(210, y + 6, update, size=15)
        d.text(440, y + 6, reads, size=15)
        if old:
            d.box(560, y - 10, 60 * old, 24, "v" if old > 0.3 else "", "blue", 12)
        d.box(560 + 60 * old, y - 10, 60 * new, 24, "w", "green", 12)
    d.text(560, 62, "old and new value", size=12, colour="soft")
    d.write("forget-correct")


def window_state() -> None:
    """Which tokens a linearised attention reads exactly, and which through its state."""
    d = Drawing(720, 210, "A window is read exactly, the first tokens too, all tokens between through one matrix")
    d.text(20, 30, "Softmax near, a state for what has left the window", size=15, bold=True)
    d.cells(20, 110, ["o" * 3 + "g" * 22 + "b" * 11 + "p"], 18)
    for x, w, name, about in (
        (20, 54, "sinks", "exact"),
        (74, 396, "tokens between: Σ φ(k) v^T, one matrix a head", "constant size, whatever their number"),
        (470, 198, "window of w tokens", "exact softmax"),
    ):
        d.line(x + 2, 138, x + w - 2, 138)
        d.text(x + w / 2, 156, name, "middle", 12)
        d.text(x + w / 2, 173, about, "middle", 12, "soft")
    d.text(684, 90, "q", "start", 13)
    d.arrow((677, 106), (677, 72), (570, 72), (570, 106), strong=True)
    d.arrow((677, 72), (272, 72), (272, 106), strong=True)
    d.arrow((272, 72), (47, 72), (47, 106), strong=True)
    d.text(390, 64, "one softmax over all three", "middle", 12, "soft")
    d.text(
        20,
        198,
        "linearise(model, window=w, sinks=s): a token costs the same after 100 tokens and after 100,000.",
        size=12,
        colour="soft",
    )
    d.write("window-state")


def comparison() -> None:
    """How a cache is compared: four rows of a measured task, and what each difference tells."""
    (mqar,) = (one for one in _load("bench_memory")["benchmarks"] if one["name"] == "mqar")
    mqar = {row["name"]: row for row in mqar["rows"]}
    mnist = {row["name"].removeprefix("mnist-vit"): row for row in _load("mnist_vit")["rows"]}
    rows = (
        ("no cache", mqar["window"], mnist[""]),
        ("equal parameters, no cache", None, mnist["-wider"]),
        ("never written: stores nothing", mqar["gated-cache-unwritten"], mnist["-cached-unwritten"]),
        ("cached", mqar["gated-cache"], mnist["-cached"]),
    )
    d = Drawing(720, 300, "A cache is credited with what it adds to the same model whose cache is never written")
    d.text(20, 30, "A memory is worth what it adds to the same model that stores nothing", size=15, bold=True)
    panels = (
        (250, 190, 0.7, 1.0, "recall of pairs, cache per stream"),
        (500, 190, 0.93, 0.96, "MNIST, ViT, shared cache"),
    )
    for x, w, low, high, title in panels:
        d.text(x, 62, title, size=13)
        d.line(x, 226, x + w, 226)
        for value in (low, (low + high) / 2, high):
            at = x + w * (value - low) / (high - low)
            d.line(at, 226, at, 231)
            d.text(at, 246, f"{value:.3g}", "middle", 11, "soft")
    for i, (name, *values) in enumerate(rows):
        y = 92 + 38 * i
        d.text(20, y + 5, name, size=13, bold=name == "cached")
        for (x, w, low, high, _), row in zip(panels, values, strict=True):
            if row is None:
                d.text(x, y + 5, "not run", size=12, colour="soft")
                continue
            mean, std = (x + w * (row["mean"] - low) / (high - low), w * row["std"] / (high - low))
            d.line(mean - std, y, mean + std, y, strong=True)
            d.dot(mean, y)
    for (x, *_), panel in zip(panels, (1, 2), strict=True):
        cached, unwritten = (Spread(r["mean"], r["std"], r["seeds"]) for r in (rows[3][panel], rows[2][panel]))
        gain = welch(cached, unwritten)
        ends = "{:+.3f} ({:+.3f} to {:+.3f})".format(gain.difference, *(gain.interval or ())).replace("-", "−")
        d.text(x, 280, ends, size=13, bold=True)
    d.text(20, 280, "cached − never written (95 %)", size=12, bold=True)
    d.write("comparison")


def fast() -> None:
    """How long a training step takes in Transformers and with mnemos.fast."""
    found = _load("fast_models")
    names = {"Mamba2": "Mamba-2", "Qwen3Next": "Qwen3-Next", "KimiLinear": "Kimi Linear"}
    steps = {row["model"]: row["training step"] for row in found["rows"]}
    rows = [(model, steps[model]) for model in names]
    d = Drawing(720, 72 + 62 * len(rows), "A training step on a CPU: Transformers, and with mnemos.fast")
    d.text(20, 30, "A training step on a CPU, seconds", size=15, bold=True)
    cpu = "Intel Xeon" if "Xeon" in found["provenance"]["cpu"] else "AMD EPYC"
    d.text(20, 50, f"2 × 1,024 tokens, 4 layers of width 512, two cores of an {cpu}", size=12, colour="soft")
    for i, (model, step) in enumerate(rows):
        y = 72 + 62 * i
        d.text(20, y + 26, names[model], size=14, bold=True)
        for j, (side, label, fill) in enumerate(
            (("transformers", "Transformers", "plain"), ("mnemos", "mnemos.fast", "green"))
        ):
            w = 400 * step["ms"][side] / step["ms"]["transformers"]
            d.box(130, y + 24 * j, w, 20, "", fill)
            times = f": {step['times as fast']['median']:.1f} times as fast" if side == "mnemos" else ""
            d.text(
                138 + w,
                y + 24 * j + 15,
                f"{step['ms'][side] / 1000:.2f}  {label}{times}",
                size=12,
                bold=side == "mnemos",
            )
    d.write("fast")


def attention_needs() -> None:
    """What a decoder loses when one attention or key head has a window, and which eight attentions stay whole."""
    ranking = _load("attention_ranking")
    names, chosen = ranking["names"], set(ranking["order"][:8])
    d = Drawing(720, 290, "What SmolLM2-135M loses when one of its 30 attentions reads a window alone, by layer")
    d.text(20, 30, "Few attentions need what is beyond a window", size=15, bold=True)
    lines = "SmolLM2-135M: nats a token lost when one attention (bars), or one of its key heads (blue), reads a window."
    d.text(20, 50, lines, size=12, colour="soft")
    most = max(ranking["alone"].values())
    top = math.ceil(100 * most) / 100
    for value in (0, top / 2, top):
        y = 230 - 150 * value / top
        d.line(60, y, 700, y, dashed=value > 0)
        d.text(54, y + 4, f"{value:.2g}", "end", 11, "soft")
    for i, name in enumerate(names):
        x, height = 66 + 21 * i, 150 * max(ranking["alone"][name], 0) / top
        d.box(x, 230 - height, 15, max(height, 1), "", "green" if name in chosen else "plain")
        for j, nats in enumerate(ranking["heads"][name]):
            d.line(x + 3.5 + 4 * j, 230, x + 3.5 + 4 * j, 230 - 150 * max(nats, 0) / top, strong=True)
        d.text(x + 7.5, 246, str(i), "middle", 11, "soft")
    d.text(380, 264, "layer", "middle", 12, "soft")
    d.text(20, 282, "Green: the eight that stay whole in a hybrid, chosen jointly.", size=12)
    d.write("attention-needs")


def told_facts() -> None:
    """Facts recalled by distance, and perplexity of the same text, of what was trained on told facts."""
    found = _load("linearised")
    names = {
        "told-window": "window alone",
        "told-cache": "gated cache",
        "told-hedgehog": "hedgehog",
        "told-delta": "delta rule",
        "told-delta-forgets": "… half-life 1,024",
    }
    arms = {name: runs for name in names if (runs := found["told"].get(name))}
    height = 96 + 52 * len(arms)
    d = Drawing(720, height + 46, "Facts that a linearised decoder recalls by distance, beside its perplexity")
    d.text(20, 30, "A state carries facts; perplexity hardly tells", size=15, bold=True)
    d.text(170, 62, "right of 20 facts, by tokens since they were told", size=13)
    low, high, left, width = 25, 40, 510, 180
    d.text(left, 62, "perplexity of the novel", size=13)

    def at(value: float) -> float:
        return round(left + width * (value - low) / (high - low), 1)

    bases = {row["name"]: row["perplexity"] for row in found["rows"] if row["name"] in ("original", "window")}
    for name, label in (("original", "full attention"), ("window", "window, untrained")):
        x = at(next(positions["512-4096"] for text, positions in bases[name].items() if text.startswith("great")))
        d.line(x, 84, x, height - 10, dashed=True)
        d.text(x, 80, label, "middle", 11, "soft")
    distances = [one["distance"] for one in next(iter(arms.values()))[0]["recall"]["distances"]]
    for i, (name, runs) in enumerate(arms.items()):
        y = 130 + 52 * i
        d.text(20, y - 10, names[name], size=13, bold=True)
        d.text(20, y + 6, f"{len(runs)} seed" + "s" * (len(runs) > 1), size=11, colour="soft")
        d.line(170, y, 170 + 52 * len(distances), y)
        for j in range(len(distances)):
            right = sum(sum(run["recall"]["distances"][j]["choice"]) for run in runs) / len(runs)
            d.box(176 + 52 * j, y - 36 * right / 20, 26, 36 * right / 20, "", "green")
            d.text(206 + 52 * j, y - 3, f"{right:.0f}", size=11, colour="soft")
        for run in runs:
            d.dot(at(run["predicted"]["positions"]["512-4096"]["perplexity"]), y - 14)
    for j, distance in enumerate(distances):
        d.text(189 + 52 * j, height + 2, f"{distance:,}", "middle", 11, "soft")
    d.line(left, height - 10, left + width, height - 10)
    for value in range(low, high + 1, 5):
        d.text(at(value), height + 6, str(value), "middle", 11, "soft")
    d.text(20, height + 32, "A guess is right in 2 of 20. Means over seeds; a dot is one seed.", size=12)
    d.write("told-facts")


def rooms() -> None:
    """The rooms of the package, and the direction of their imports (tests/test_imports.py has the whole order)."""
    d = Drawing(
        720, 443, "The rooms of the package in rows: the laboratory, what users call, layers, operators, the base"
    )
    d.text(20, 30, "The rooms: imports go down, and to the right", size=15, bold=True)
    rows = (
        ("orange", ("cli · bench · papers · recipes · look · report · compare · linearised",)),
        ("orange", ("run: the training loop", "speech · translation · vision")),
        ("orange", ("evaluate · measure · tasks · hosted",)),
        ("blue", ("trainers", "programs: export", "hugging__face: fast", "hosts: cache")),
        ("blue", ("generate: Stream, beam search",)),
        ("blue", ("models: Transformer, Memformer, …",)),
        ("green", ("attention: y, state = layer(x, state)",)),
        ("green", ("testing: check__memory", "memory: slots, keys, gated cache")),
        ("green", ("ops: equations, and the fast forms", "native: C++ kernels")),
        ("plain", ("memory__replay: gradients through any model",)),
        ("plain", ("state__file", "config · registry", "types: states", "libraries · errors")),
    )
    for i, (fill, names) in enumerate(rows):
        width = (580 - 8 * (len(names) - 1)) / len(names)
        for j, name in enumerate(names):
            d.box(120 + j * (width + 8), 46 + 35 * i, width, 28, name, fill, 12)
    for first, last, label in ((0, 2, "mnemos.lab"), (3, 5, "you call"), (6, 8, "layers"), (9, 10, "the base")):
        d.text(20, 46 + 35 * (first + last) / 2 + 18, label, size=13, bold=True)
    d.write("rooms")


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


if __name__ == "__main__":
    for draw in (
        state,
        linear_attention,
        gated_cache,
        memformer,
        forget_correct,
        window_state,
        comparison,
        fast,
        attention_needs,
        told_facts,
        rooms,
    ):
        draw()
