"""o_self and o_mem as images, for pictures of the test split: Figure 4 of Cached Transformers."""

import numpy as np

from mnemos.lab.evaluate.recorded import NO_PICTURES, BranchMaps, CachedLayer, Explanation, Left, Pictures

from .image_grids import img, strips
from .markup import decimal, escape, figure, listed, missing, paragraph, plural, short, shortened, table
from .read import Results


def section(results: Results) -> str:
    """For each cached variant, a figure and a table of the first run with image maps, or why there are none."""
    parts, whys = [], []
    for name in results.names:
        found = [(run.label, run.explained) for run in results.runs_of(name) if run.explained]
        drawn = [(label, one, one.pictures) for label, one in found if one.pictures is not None]
        if drawn:
            parts.append(_variant(name, *drawn[0]))
        elif name in results.cached():
            why = found[0][1].left if found else "no run has an explain.json"
            whys += [f"{name}: {why}, so the report has no images of its branches."] * (why != NO_PICTURES)
    return "\n".join(parts + [missing(why) for why in whys])


def _variant(name: str, label: str, found: Explanation, pictures: Pictures) -> str:
    mapped = [layer for layer in found.layers if layer.self_map is not None]
    middle = found.layers[found.middle] if found.middle is not None else mapped[len(mapped) // 2]
    chosen = [layer for layer in mapped if layer in (mapped[0], middle, mapped[-1])]
    called = dict(zip((one.name for one in found.layers), shortened([one.name for one in found.layers]), strict=True))
    rows = listed([called[layer.name] for layer in chosen])
    count = len(pictures.pixels)
    drawn = [("", [f"<small>{escape(classes(pictures, i))}</small>" for i in range(count)], "")]
    drawn.append(("", [img(picture) for picture in pictures.pixels], ""))
    for layer in chosen:
        for what, maps in (("self", layer.self_map), ("mem", layer.memory_map)):
            assert maps is not None
            aloud = f"o_{what} of {called[layer.name]}"
            images = [img(grey(one), aloud) for one in maps]
            drawn.append((f"{escape(called[layer.name])} o<sub>{what}</sub>", images, ""))
    about = pictures.about or "An arrow names the predicted class where it is wrong"
    which = "the first, a middle and the last cached layer" if len(chosen) == 3 else "its cached layers"
    caption = (
        f"{name}: outputs of the two branches for {plural(count, 'test picture')}. Below each picture, for "
        f"{rows} ({which}): the mean over heads and channels of the output of self-attention and of the cached "
        "branch, at every token. Each map is scaled to [0, 1] on its own, so patterns can be compared but "
        f"magnitudes cannot; dark means small. {about}. From {label}/explain.safetensors."
    )
    left = [f"{called[one.name]}: {one.maps.left}" for one in found.layers if isinstance(one.maps, Left)]
    notes = [missing(f"Left out: {'; '.join(left)}.")] if left else []
    text = paragraph(_summary(name, mapped, middle, called))
    return "\n".join([text, figure([strips(drawn)], caption, kind="full"), _table(name, label, mapped, called), *notes])


def _maps(layer: CachedLayer) -> BranchMaps:
    assert isinstance(layer.maps, BranchMaps)
    return layer.maps


def _summary(name: str, mapped: list[CachedLayer], middle: CachedLayer, called: dict[str, str]) -> str:
    """What the numbers say about the paper's claim that the two branches are complementary."""
    found = np.array(_maps(middle).correlation)
    parts = [
        f"{name}: in the middle layer ({called[middle.name]}) the correlation between the two maps of a picture is "
        f"{decimal(found.mean(), signed=True)} on average and ranges from {decimal(found.min(), signed=True)} to "
        f"{decimal(found.max(), signed=True)}."
    ]
    everywhere = np.concatenate([np.array(_maps(layer).correlation) for layer in mapped])
    parts.append(
        f"Over all layers and pictures it is below −0.5 in {(everywhere < -0.5).mean():.0%} "
        f"and above 0.5 in {(everywhere > 0.5).mean():.0%} of the cases."
    )
    weights = np.array([_maps(layer).weight for layer in mapped])
    low, high = f"{weights.min():.0%}", f"{weights.max():.0%}"
    span = low if low == high else f"{low} to {high}"
    parts.append(f"By size, the cached branch is {span} of the two branches of a layer.")
    same = [called[layer.name] for layer in mapped if _maps(layer).memory_own < 0.25]
    if same:
        parts.append(f"In {listed(same)} o_mem is nearly the same image for every picture.")
    return " ".join(parts)


def _table(name: str, label: str, mapped: list[CachedLayer], called: dict[str, str]) -> str:
    rows = []
    for layer in mapped:
        found = np.array(_maps(layer).correlation)
        rows.append(
            [
                f"<code>{escape(called[layer.name])}</code>",
                " × ".join(map(str, _maps(layer).grid)),
                decimal(float(np.mean(layer.share))),
                decimal(_maps(layer).weight),
                decimal(found.mean(), signed=True),
                f"{decimal(found.min(), signed=True)} to {decimal(found.max(), signed=True)}",
                decimal(_maps(layer).self_own),
                decimal(_maps(layer).memory_own),
            ]
        )
    caption = (
        f"{name}: both branches in numbers, over the same pictures. Share of magnitude: the root mean square of "
        "σ(λ)·o_mem, divided by the sum of it and that of (1 − σ(λ))·o_self. Correlation: between the two maps of a "
        "picture, mean and range over pictures. "
        "Picture-specific: the share of a map's variance that differs between pictures at one position; the rest is "
        f"the same image for all pictures. From {label}/explain.json."
    )
    head = [
        "layer",
        "grid",
        "mean σ(λ)",
        "share of magnitude",
        "correlation",
        "range",
        "picture-specific, o_self",
        "picture-specific, o_mem",
    ]
    return table(caption, head, rows)


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
