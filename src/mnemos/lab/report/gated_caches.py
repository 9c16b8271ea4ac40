"""What gated caches did: their gates over training, and what layers read from them beside attention."""

from collections.abc import Callable, Sequence

import numpy as np

from mnemos.errors import plural
from mnemos.lab.evaluate.recorded import NO_PICTURES, BranchMaps, Left, Pictures

from .charts import MOST, WHOLE, Axis, Chart, Series, chart_figure
from .curves import intervals, means, seed_names
from .markup import decimal, escape, figure, img, listed, missing, paragraph, short, shortened, table_of
from .read import Results
from .run_records import GateCurves, RunRecord
from .shell import HEADS, layer_variable

MIX = "mix"  # σ(λ), which has a value for each head; the other gates have one for each layer
TITLES = {
    MIX: "Gate of the cache, σ(λ)",
    "update.mean": "Update gate, mean",
    "update.saturated": "Update gate, saturated share",
    "cache.rms": "Cache, root mean square",
    "reset.mean": "Reset gate, mean",
    "reset.saturated": "Reset gate, saturated share",
    "cache.rank": "Cache, effective rank",
}


def _each_variant(
    results: Results,
    has: Callable[[RunRecord], object],
    draw: Callable[[str, list[RunRecord]], str],
    why: Callable[[Sequence[RunRecord]], str],
) -> str:
    parts, lines = [], []
    for name in results.names:
        if runs := [run for run in results.runs_of(name) if has(run)]:
            parts.append(draw(name, runs))
        elif name in results.cached() and (reason := why(results.runs_of(name))):
            lines.append(missing(f"{name}: {reason}."))
    return "\n".join(parts + lines)


def gate_section(results: Results) -> str:
    """σ(λ) by layer and head, gate activity, and the size and rank of the cache, over training."""

    def draw(name: str, runs: list[RunRecord]) -> str:
        slug, layers = results.names.index(name), runs[0].gates.layers if runs[0].gates else ()
        drawn = [run for run in runs if run.gates and run.gates.layers == layers]
        gates, seeds = [run.gates for run in drawn if run.gates], list(seed_names(drawn).values())
        series = [Series(label, layer_variable(i, len(layers))) for i, label in enumerate(shortened(layers))]
        source = f"{runs[0].label}/metrics.jsonl"
        if len(runs) > 1:
            source = (
                f"metrics.jsonl (records of kind gates) of {runs[0].label} and {plural(len(runs) - 1, 'other run')}"
            )

        # --- how σ(λ) changed, and in how many layers it is above a half ---
        starts, ends = (np.concatenate([g.mix[at].ravel() for g in gates]) for at in (0, -1))
        start = [("mean at the first record", float(np.nanmean(starts)))] if np.isfinite(starts).any() else []
        starts, ends = starts[np.isfinite(starts)], ends[np.isfinite(ends)]
        summary = f"{name}: σ(λ) was not recorded."
        if starts.size and ends.size:
            last = np.concatenate([g.mix[-1] for g in gates], 1)  # [L, heads of all seeds]
            above = sum(row[np.isfinite(row)].mean() > 0.5 for row in last if np.isfinite(row).any())
            summary = (
                f"{name}: the mean gate σ(λ) of the cache went from {starts.mean():.3f} to {ends.mean():.3f} between "
                f"the first record and the last, where the heads range from {ends.min():.3f} to {ends.max():.3f}. The "
                f"mean over heads is above 0.5 in {above} of {plural(len(last), 'layer')}."
            )

        # --- σ(λ) by layer at the last record, a mark per head and seed ---
        heads = max(one.mix.shape[2] for one in gates)
        end = Chart(
            *(f"mix-{slug}-end", "σ(λ) by layer and head, at the last record", "σ(λ)"),
            [Series(f"head {h}", f"head-{h % len(HEADS)}", h // len(HEADS)) for h in range(heads)],
            seeds,
            [Axis("layer", "~g")],
            "marks",
            ticks=range(len(layers)) if len(layers) <= 24 else (),
            references=start,
            limits=(0, 1),
        )
        for i, one in enumerate(gates):
            for layer, values in enumerate(one.mix[-1]):
                for h, value in enumerate(values):
                    end.add(h, i, value, layer)

        recorded = [key for key in TITLES if key != MIX and any(np.isfinite(g.values[key]).any() for g in gates)]
        absent = [title.lower() for key, title in TITLES.items() if key != MIX and key not in recorded]
        parts = [
            paragraph(summary),
            chart_figure(
                [gate_chart(f"mix-{slug}", series, gates, MIX, seeds)],
                f"{name}: the gate σ(λ) of the cached branch over training, one thin line per head and seed, one thick "
                f"line per layer (the mean). From {source}.",
                "wide",
            ),
            chart_figure(
                [end],
                f"{name}: the gate σ(λ) at the last record, by layer: one mark per head and seed "
                f"({plural(len(gates), 'seed')}). The dotted line is the mean at the first record. From {source}.",
                "wide",
            ),
            chart_figure(
                [gate_chart(f"gate-{slug}-{key.replace('.', '-')}", series, gates, key, seeds) for key in recorded],
                f"{name}: activity of the gates and state of the cache over training, by layer. The saturated share is "
                "the part of a gate's values below 0.05 or above 0.95. The effective rank is exp of the entropy of the "
                f"normalised singular values. From {source}.",
            ),
        ]
        if len(gates) < len(runs):
            out = plural(len(runs) - len(gates), "run")
            parts.append(missing(f"{out} of {name} is left out: it has other layers."))
        if absent:
            parts.append(missing(f"Not recorded for {name}: {'; '.join(absent)}."))
        return "\n".join(filter(None, parts))

    return _each_variant(results, lambda run: run.gates, draw, lambda _: "no run recorded its gates")


def gate_chart(slug: str, series: list[Series], gates: list[GateCurves], key: str, seeds: list[str]) -> Chart:
    """One quantity of `TITLES` over training, by layer: a line for each seed, of σ(λ) for each head of a seed."""
    values = [one.mix if key == MIX else one.values[key][:, :, None] for one in gates]  # [S, L, H or 1]
    heads, title = max(one.shape[2] for one in values), TITLES[key]
    of_head = [f", head {h}" for h in range(heads)] if key == MIX else [""]
    runs = [f"{run}{head}" for run in seeds for head in of_head]
    chart = Chart(slug, title, title.split(", ")[-1], series, runs, [Axis("updates", WHOLE)])
    # Seeds share what a point is the mean of, so that their points have equal updates.
    points = intervals([one.step for one in gates], max(20, MOST // (len(runs) * len(series))) if key == MIX else 200)
    for i, (one, of_run, records) in enumerate(zip(gates, values, points, strict=True)):
        for layer in range(len(series)):
            for h in range(of_run.shape[2]):
                chart.add(layer, i * heads + h, means(of_run[:, layer, h], records), means(one.step, records))
    return chart


def map_section(results: Results) -> str:
    """o_self and o_mem as images, for pictures of the test split: Figure 4 of Cached Transformers."""

    def why(runs: Sequence[RunRecord]) -> str:  # "" for tasks without pictures, which need no line
        explained = next((run.explained for run in runs if run.explained), None)
        reason = "no run has an explain.json" if explained is None else explained.left
        return "" if reason == NO_PICTURES else f"{reason}, so the report has no images of its branches"

    return _each_variant(results, lambda run: run.explained and run.explained.pictures, _maps, why)


def _maps(name: str, runs: list[RunRecord]) -> str:
    label, explained = runs[0].label, runs[0].explained
    assert explained is not None
    assert explained.pictures is not None
    pictures = explained.pictures
    names = [layer.name for layer in explained.layers]
    called = dict(zip(names, shortened(names), strict=True))
    mapped = [(layer, layer.maps) for layer in explained.layers if isinstance(layer.maps, BranchMaps)]
    layers = [layer for layer, _ in mapped]
    middle = layers[len(layers) // 2] if explained.middle is None else explained.layers[explained.middle]
    drawn = [layer for layer in layers if layer in (layers[0], middle, layers[-1])]

    # --- a row of pictures, and two rows of maps for each drawn layer ---
    count = len(pictures.pixels)
    rows = [("", [f"<small>{escape(classes(pictures, i))}</small>" for i in range(count)])]
    rows.append(("", [img(picture) for picture in pictures.pixels]))
    for layer in drawn:
        for which, maps in (("self", layer.self_map), ("mem", layer.memory_map)):
            assert maps is not None
            images = [img(grey(one), f"o_{which} of {called[layer.name]}") for one in maps]
            rows.append((f"{escape(called[layer.name])} o<sub>{which}</sub>", images))
    cells = "".join(f"<span>{title}</span>{''.join(row)}" for title, row in rows)
    strips = f'<div class="strips" style="--columns:{count}">{cells}</div>'
    which = "the first, a middle and the last cached layer" if len(drawn) == 3 else "its cached layers"
    caption = (
        f"{name}: outputs of the two branches for {plural(count, 'test picture')}. Below each picture, for "
        f"{listed([called[layer.name] for layer in drawn])} ({which}): the mean over heads and channels of the output "
        "of self-attention and of the cached branch, at every token. Each map is scaled to [0, 1] on its own, so "
        "patterns can be compared but magnitudes cannot; dark means small. An arrow names the predicted class where it "
        f"is wrong. From {label}/explain.safetensors."
    )

    # --- the paper says that the branches are complementary: what the numbers say of that ---
    of_middle = np.array(next(maps.correlation for layer, maps in mapped if layer is middle))
    everywhere = np.concatenate([np.array(maps.correlation) for _, maps in mapped])
    weights = [maps.weight for _, maps in mapped]
    by_size = " to ".join(dict.fromkeys(f"{weight:.0%}" for weight in (min(weights), max(weights))))
    summary = (
        f"{name}: in the middle layer ({called[middle.name]}) the correlation between the two maps of a picture is "
        f"{decimal(of_middle.mean(), signed=True)} on average and ranges from {decimal(of_middle.min(), signed=True)} "
        f"to {decimal(of_middle.max(), signed=True)}. Over all layers and pictures it is below −0.5 in "
        f"{(everywhere < -0.5).mean():.0%} and above 0.5 in {(everywhere > 0.5).mean():.0%} of the cases. By size, the "
        f"cached branch is {by_size} of the two branches of a layer."
    )
    if same := [called[layer.name] for layer, maps in mapped if maps.memory_own < 0.25]:
        summary += f" In {listed(same)} o_mem is nearly the same image for every picture."

    numbers = table_of(
        f"{name}: both branches in numbers, over the same pictures. Share of magnitude: the root mean square of "
        "σ(λ)·o_mem, divided by the sum of it and that of (1 − σ(λ))·o_self. Correlation: between the two maps of a "
        "picture, mean and range over pictures. Picture-specific: the share of a map's variance that differs between "
        f"pictures at one position; the rest is the same image for all pictures. From {label}/explain.json.",
        mapped,
        {
            "layer": lambda one: f"<code>{escape(called[one[0].name])}</code>",
            "grid": lambda one: " × ".join(map(str, one[1].grid)),
            "mean σ(λ)": lambda one: decimal(float(np.mean(one[0].share))),
            "share of magnitude": lambda one: decimal(one[1].weight),
            "correlation": lambda one: decimal(float(np.mean(one[1].correlation)), signed=True),
            "range": lambda one: " to ".join(decimal(end(one[1].correlation), signed=True) for end in (min, max)),
            "picture-specific, o_self": lambda one: decimal(one[1].self_own),
            "picture-specific, o_mem": lambda one: decimal(one[1].memory_own),
        },
    )
    left = [f"{called[one.name]}: {one.maps.left}" for one in explained.layers if isinstance(one.maps, Left)]
    notes = [missing(f"Left out: {'; '.join(left)}.")] if left else []
    return "\n".join([paragraph(summary), figure([strips], caption, "full"), numbers, *notes])


def grey(one: np.ndarray) -> np.ndarray:
    """A map [h, w] scaled to its own range, as uint8 [h, w, 1]; a constant or not finite map becomes middle grey."""
    low, high = float(one.min()), float(one.max())
    if not np.isfinite([low, high]).all() or high <= low:
        return np.full((*one.shape, 1), 128, np.uint8)
    return ((one - low) / (high - low) * 255).round().astype(np.uint8)[..., None]


def classes(pictures: Pictures, i: int) -> str:
    """The class of a picture, and on a second line the predicted one where it is another."""
    label, guess = (
        short(str(pictures.names[one]) if 0 <= one < len(pictures.names) else str(one), 12)
        for one in (pictures.label[i], pictures.guess[i])
    )
    return label if pictures.label[i] == pictures.guess[i] else f"{label}\n→ {guess}"
