"""What gated caches did: their gates over training, and what layers read from them beside attention."""

import numpy as np

from mnemos.errors import plural
from mnemos.lab.evaluate.recorded import BranchMaps, Explanation, Left, Pictures

from .charts import MOST, WHOLE, Axis, Chart, Series, chart_figure
from .curves import every_nth, seed_names
from .markup import decimal, escape, figure, img, listed, missing, short, shortened, table_of
from .read import Results
from .run_records import GateCurves
from .shell import layer_variable

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


def gate_section(results: Results) -> str:
    """σ(λ) by layer and head, gate activity, and the size and rank of the cache, over training."""
    parts = []
    for slug, name in enumerate(results.names):
        runs = [run for run in results.runs_of(name) if run.gates]
        if not runs:
            continue
        gates, seeds = [run.gates for run in runs if run.gates], list(seed_names(runs).values())
        layers = gates[0].layers
        series = [Series(label, layer_variable(i, len(layers))) for i, label in enumerate(shortened(layers))]
        source = f"From metrics.jsonl (records of kind gates) of {plural(len(runs), 'run')}."
        others = [key for key in TITLES if key != MIX and any(np.isfinite(one.values[key]).any() for one in gates)]
        mix = chart_figure(
            [gate_chart(f"mix-{slug}", series, gates, MIX, seeds)],
            f"{name}: the gate σ(λ) of the cached branch over training: thin lines are heads and seeds, the thick line "
            f"of a layer is their mean. {source}",
            "wide",
        )
        activity = chart_figure(
            [gate_chart(f"gate-{slug}-{key.replace('.', '-')}", series, gates, key, seeds) for key in others],
            f"{name}: activity of the gates and state of the cache over training, by layer. The saturated share is the "
            "part of a gate's values below 0.05 or above 0.95. The effective rank is exp of the entropy of the "
            f"normalised singular values. {source}",
        )
        parts += [mix, activity]
    return "\n".join(filter(None, parts))


def gate_chart(slug: str, series: list[Series], gates: list[GateCurves], key: str, seeds: list[str]) -> Chart:
    """One quantity of `TITLES` over training, by layer: a line for each seed, of σ(λ) for each head of a seed."""
    values = [one.mix if key == MIX else one.values[key][:, :, None] for one in gates]  # [S, L, H or 1]
    heads, title = max(one.shape[2] for one in values), TITLES[key]
    of_head = [f", head {h}" for h in range(heads)] if key == MIX else [""]
    runs = [f"{run}{head}" for run in seeds for head in of_head]
    mode = "lines" if any(len(one.step) > 1 for one in gates) else "marks"
    chart = Chart(slug, title, title.split(", ")[-1], series, runs, [Axis("updates", WHOLE)], mode)
    drawn = every_nth([one.step for one in gates], min(200, max(20, MOST // (len(runs) * len(series)))))
    for i, (one, of_run) in enumerate(zip(gates, values, strict=True)):
        for layer in range(len(series)):
            for h in range(of_run.shape[2]):
                chart.add(layer, i * heads + h, of_run[drawn, layer, h], one.step[drawn])
    return chart


def map_section(results: Results) -> str:
    """o_self and o_mem as images, for pictures of the test split: Figure 4 of Cached Transformers."""
    runs = results.first_runs(lambda run: run.explained and run.explained.pictures)
    return "\n".join(_maps(name, run.label, run.explained) for name, run in runs if run.explained)


def _maps(name: str, label: str, explained: Explanation) -> str:
    pictures = explained.pictures
    assert pictures is not None
    names = [layer.name for layer in explained.layers]
    called = dict(zip(names, shortened(names), strict=True))
    mapped = [(layer, layer.maps) for layer in explained.layers if isinstance(layer.maps, BranchMaps)]
    layers = [layer for layer, _ in mapped]
    drawn = [layers[i] for i in sorted({0, (len(layers) - 1) // 2, len(layers) - 1})]

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
    caption = (
        f"{name}: outputs of the two branches for {plural(count, 'test picture')}. Below each picture, for "
        f"{listed([called[layer.name] for layer in drawn])}: the mean over heads and channels of the output "
        "of self-attention and of the cached branch, at every token. Each map is scaled to [0, 1] on its own, so "
        "patterns can be compared but magnitudes cannot; dark means small. An arrow names the predicted class where it "
        f"is wrong. From {label}/explain.safetensors."
    )

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
    return "\n".join([figure([strips], caption, "full"), numbers, *notes])


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
