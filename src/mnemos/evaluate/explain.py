"""What a trained gated cache does, recorded for the report: o_self and o_mem as images, what slots hold, what it costs.

Nothing is trained and nothing drawn: the finished model looks at some pictures, and two files are left in its run's
folder. `explain.json`:

    {"pictures": {"split", "index", "label", "guess", "names"} or null, "left": why there are none, or null,
     "sizes": {"train", "valid", "test"}, "middle": the layer of Figure 4, "layers": [{"name", "share": σ(λ) a head,
     "inference": "frozen" or "transient", "cost": {...} or null, "maps": {...} or {"left": why} or null,
     "slots": {...} or {"left": why} or null}]}

`explain.safetensors`: pictures [N, height, width, 1 or 3] uint8; self.i and memory.i [N, h, w] of layer i: the mean of
o_self and o_mem over head and channel at every token, as it is (Figure 4 scales each picture of it to [0, 1]);
patches.i [slots, K, side, side, 1 or 3] uint8: the training patches nearest to the slots, in the middle half.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.atomic import write_json
from mnemos.attention.gated_branch import GatedBranch
from mnemos.data.augment import normalise
from mnemos.modes import evaluating
from mnemos.ops.gated_cache import resample
from mnemos.ops.gated_cache.cost import Shape, inference_macs, training_macs

from .branches import looked_at, maps, rounded
from .holdings import IMAGES, TOKENS, even, holdings
from .places import Places, places

PICTURES = 8  # of the test split, drawn
SIDE = 96  # pixels a side at most, of a recorded picture
SEARCHED = 6  # layers whose slots are compared with tokens, evenly
PATCH = 32  # pixels a side at most, of a recorded patch
BATCH = 32


@torch.no_grad()
def explain(model: nn.Module, task: Any, folder: Path) -> dict[str, Any] | None:
    """Write explain.json and explain.safetensors of a finished run; returns the former, None without gated caches.

    Deterministic, under 4 MB, and the model is left as it was. Cost: a forward of some 260 pictures, and for the slots
    about 10⁶·Dm² multiply-adds in each of at most six layers. A task without pictures gets the costs alone.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GatedBranch)}
    if not layers:
        return None
    tensors: dict[str, Tensor] = {}
    with evaluating(model):
        shapes = _shapes(model, layers, task.sample())
        entries = [
            {
                "name": name,
                "share": torch.sigmoid(layer.mix.float()).tolist(),
                "inference": layer.grc.inference,
                "cost": cost(layer, *shapes[name]) if name in shapes else None,
                "maps": None,
                "slots": None,
            }
            for name, layer in layers.items()
        ]
        sizes = {split: task.size(split) for split in ("train", "valid", "test")}
        found: dict[str, Any] = {"pictures": None, "left": None, "sizes": sizes, "middle": None, "layers": entries}
        if hasattr(task, "picture"):
            _look(model, task, layers, found, tensors)
        else:
            found["left"] = "the task has no pictures"
    if tensors:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "explain.safetensors"))
    write_json(folder / "explain.json", found)  # last: what it tells of is there
    return found


def cost(layer: GatedBranch, rows: int, tokens: int) -> dict[str, Any] | None:
    """What a layer adds for one sample of `rows` rows of `tokens` tokens, by formula; None where it walks in blocks.

    Sizes, parameters (counted), and multiply-adds of a training forward and of one in eval().
    """
    if getattr(layer, "causal", False):
        return None
    own = sum(p.numel() for name, p in layer.named_parameters() if not name.startswith("inner."))
    out = getattr(layer, "out_dim", layer.dim)
    grid = layer.grid[0] * layer.grid[1] if layer.grid is not None else 0
    shape = Shape(
        tokens,
        layer.cache.shape[0],
        layer.dim,
        layer.cache_dim,
        layer.num_heads,
        out,
        rows,
        grid,
        not hasattr(layer, "inner"),
    )
    return {
        "rows": rows,
        "tokens": tokens,
        "slots": shape.length,
        "width": shape.width,
        "cache_width": shape.cache_width,
        "heads": shape.heads,
        "parameters": own,
        "training_macs": training_macs(shape, layer.grc),
        "inference_macs": inference_macs(shape, layer.grc),
    }


def _shapes(model: nn.Module, layers: dict[str, GatedBranch], sample: Tensor) -> dict[str, tuple[int, int]]:
    """(rows, tokens) of the first call of each layer for one sample."""
    found: dict[str, tuple[int, int]] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: found.setdefault(name, args[0].shape[:2]) and None)
        for name, layer in layers.items()
    ]
    try:
        model(sample, None)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (int(rows), int(tokens)) for name, (rows, tokens) in found.items()}


def _look(
    model: nn.Module, task: Any, layers: dict[str, GatedBranch], found: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Fill in the pictures, and each layer's maps and slots."""
    entries = {entry["name"]: entry for entry in found["layers"]}
    watched_layers = {}
    for name, layer in layers.items():
        if layer.grc.scope == "stream" or getattr(layer, "causal", False):
            entries[name]["maps"] = {"left": "its cache moves along a stream"}
        else:
            watched_layers[name] = layer
    index, label, inputs = _choose(task)
    shown = _pictures(task, "test", index)
    seen = looked_at(model, watched_layers, inputs)
    stand: dict[str, Places] = {}
    for name, layer in watched_layers.items():
        place: Any = "it was not called" if name not in seen else None
        if place is None:
            rows, tokens = seen[name].o_self.shape[0] // len(index), seen[name].o_self.shape[1]
            place = places(model, name, layer, rows, tokens, (shown.shape[1], shown.shape[2]))
        if isinstance(place, str):
            entries[name]["maps"] = {"left": place}
            continue
        stand[name] = place
        number = list(layers).index(name)
        entries[name]["maps"], tensors[f"self.{number}"], tensors[f"memory.{number}"] = maps(layer, place, seen[name])
    if stand:
        found["middle"] = list(layers).index(list(stand)[(len(stand) - 1) // 2])
        tensors["pictures"] = _smaller(shown, SIDE)
        guess = model(inputs, None)[0].argmax(-1).tolist()
        found["pictures"] = {"split": "test", "index": index, "label": label, "guess": guess, "names": list(task.names)}
        _search(model, task, layers, stand, entries, tensors)
    else:
        found["left"] = "no layer's tokens have a known place in the picture"


def _search(
    model: nn.Module,
    task: Any,
    layers: dict[str, GatedBranch],
    stand: dict[str, Places],
    entries: dict[str, dict[str, Any]],
    tensors: dict[str, Tensor],
) -> None:
    """Compare the slots of some layers with tokens of training pictures, and cut out the nearest."""
    chosen = {list(stand)[i]: layers[list(stand)[i]] for i in even(len(stand), SEARCHED)}
    index = even(task.size("train"), IMAGES).tolist()
    pictures = _pictures(task, "train", index)
    generator = torch.Generator().manual_seed(0)
    centres, picks = {}, {}
    for name, layer in chosen.items():
        centres[name] = stand[name].centres(layer.cache.shape[0], layer.grc.resample).flatten(0, 1)
        # Padding is no token; of the others every picture gives as many, each its own choice of places.
        real = centres[name].isfinite().all(-1).nonzero().flatten()
        each = min(len(real), max(1, TOKENS // len(index)))
        picks[name] = torch.stack([real[torch.randperm(len(real), generator=generator)[:each]] for _ in index])
    tokens: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for first in range(0, len(index), BATCH):
        part = index[first : first + BATCH]
        seen = looked_at(model, chosen, _inputs(task, "train", part, pictures[first : first + BATCH]))
        for name, layer in chosen.items():
            grid = stand[name].grid if layer.grc.resample == "grid" else None
            slots = resample(seen[name].source.float(), layer.cache.shape[0], None, layer.grc.resample, grid)
            slots = slots.reshape(len(part), -1, slots.shape[-1])
            tokens[name].append(
                slots.gather(1, picks[name][first : first + BATCH, :, None].expand(-1, -1, slots.shape[-1]))
            )
    for name, layer in chosen.items():
        pick = picks[name]
        image = torch.arange(len(index)).repeat_interleave(pick.shape[1])
        place = pick.flatten()
        length = layer.cache.shape[0]
        held = holdings(layer, torch.cat(tokens[name]).flatten(0, 1), place % length, image)
        if isinstance(held, str):
            entries[name]["slots"] = {"left": held}
            continue
        where = centres[name][place[held.token]]
        cut = patches(pictures, image[held.token], where, stand[name].grid)
        tensors[f"patches.{list(layers).index(name)}"] = cut
        entries[name]["slots"] = {
            **held.numbers,
            "shown": held.slots.tolist(),
            "image": [[index[i] for i in row] for row in image[held.token].tolist()],
            "centres": rounded(where),
            "nearest": rounded(held.cosine),
        }


def patches(pictures: Tensor, image: Tensor, where: Tensor, grid: tuple[int, int]) -> Tensor:
    """What tokens stand for and half as much around it, [..., side, side, C] uint8, of pictures [N, H, W, C].

    image [...]; where [..., 2]: the centre (y, x) in [0, 1]; grid: a token's patch is H/grid[0] × W/grid[1]. Beyond
    the picture's edge it is grey.
    """
    height, width, _ = pictures.shape[1:]
    patch = [max(1, round(n / g)) for n, g in zip((height, width), grid, strict=True)]
    margin = [-(-n // 2) for n in patch]
    padded = F.pad(pictures.permute(0, 3, 1, 2), (margin[1], margin[1], margin[0], margin[0]), value=128)
    found = []
    for i, (y, x) in zip(image.flatten().tolist(), where.flatten(0, -2).tolist(), strict=True):
        # With the margin around the picture, the crop starts where without it the patch does.
        top = min(max(round(y * height - patch[0] / 2), 0), height - patch[0])
        left = min(max(round(x * width - patch[1] / 2), 0), width - patch[1])
        found.append(padded[i, :, top : top + patch[0] + 2 * margin[0], left : left + patch[1] + 2 * margin[1]])
    cut = _smaller(torch.stack(found).permute(0, 2, 3, 1), PATCH)
    return cut.unflatten(0, tuple(image.shape))


def _smaller(pictures: Tensor, most: int) -> Tensor:
    """uint8 pictures [N, H, W, C], their larger side at most `most` pixels."""
    height, width = pictures.shape[1:3]
    if max(height, width) <= most:
        return pictures
    size = [max(1, round(n * most / max(height, width))) for n in (height, width)]
    small = F.interpolate(pictures.permute(0, 3, 1, 2).float(), size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _choose(task: Any) -> tuple[list[int], list[int], Tensor]:
    """Which pictures of the test split: of as many classes as there are, the first of each; their labels and inputs."""
    found: dict[int, list[tuple[int, Tensor]]] = {}
    start = 0
    for batch in task.batches("test", BATCH):
        for i, label in enumerate(batch.targets.tolist()):
            rows = found.setdefault(label, [])
            if len(rows) < PICTURES:
                rows.append((start + i, batch.inputs[i].clone()))
        start += len(batch.inputs)
        if len(found) >= PICTURES or start >= 2000:
            break
    # Class by class, the second of each where the classes are fewer than the pictures.
    order = sorted((place, label, i, x) for label, rows in found.items() for place, (i, x) in enumerate(rows))
    chosen = sorted((label, i, x) for _, label, i, x in order[:PICTURES])
    return [i for _, i, _ in chosen], [label for label, _, _ in chosen], torch.stack([x for _, _, x in chosen])


def _inputs(task: Any, split: str, index: list[int], pictures: Tensor) -> Tensor:
    """What the model is given of pictures of a split, without training's augmentation."""
    return task.rows(split, index).inputs if task.inputs == "tokens" else normalise(pictures.numpy(), *task.colours)


def _pictures(task: Any, split: str, index: list[int]) -> Tensor:
    return torch.stack([torch.as_tensor(task.picture(split, i)) for i in index])
