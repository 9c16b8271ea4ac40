"""Record what a trained model's memory does: controls of its state, and what its gated caches do, hold and cost.

Nothing is trained and nothing is plotted here. The trained model processes some segments and pictures of the test
split, and two files are written to the run folder for the report. `explain.json`:

    {"memory": what `state_controls` returns, "pictures": {"split", "index", "label", "guess", "names", and "about"
     where the pictures are not the model's own inputs} or null, "left": the reason for null, or null,
     "sizes": {"train", "valid", "test"}, "middle": the layer for Figure 4,
     "layers": [{"name", "share": σ(λ) per head, "inference": "frozen" or "transient", "cost": {...} or null,
     "maps": {...} or {"left": reason} or null, "slots": {...} or {"left": reason} or null}]}

`explain.safetensors`: pictures [N, height, width, 1 or 3] uint8; self.i and memory.i [N, h, w] of layer i: the mean of
o_self and o_mem over heads and channels at every token, not scaled (Figure 4 scales each map to [0, 1]);
patches.i [slots, K, side, side, 1 or 3] uint8: the training patches nearest to the slots; the patch itself is the
central half of each side.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.atomic import write_json
from mnemos.attention.gated_branch import GatedBranch
from mnemos.lab.tasks.augment import normalise
from mnemos.lab.tasks.task import Task
from mnemos.modes import evaluating
from mnemos.ops.gated_cache import resample
from mnemos.ops.gated_cache.cost import Shape, inference_macs, training_macs
from mnemos.types import JSONObject

from .branches import first_calls, maps, rounded
from .controls import state_controls
from .holdings import IMAGES, TOKENS, evenly_spaced, holdings
from .places import Places, places

PICTURES = 8  # of the test split, recorded
SIDE = 96  # maximum side of a recorded picture, in pixels
SEARCHED = 6  # layers whose slots are compared with tokens, evenly spaced
PATCH = 32  # maximum side of a recorded patch, in pixels
BATCH = 32


@torch.no_grad()
def explain(model: nn.Module, task: Task, folder: Path, segment_length: int = 0) -> JSONObject:
    """Write explain.json and explain.safetensors to a run folder. Returns the contents of explain.json.

    "layers" has the layers with a gated cache; for a task without pictures only their costs are recorded.
    segment_length: that of the run's rollout. The result is deterministic and smaller than 4 MB; the model and the
    random generators are unchanged.
    Cost: that of `state_controls`; with gated caches also forward passes for about 260 pictures, and about 10⁶·Dm²
    multiply-adds for the slots in each of at most six layers.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, GatedBranch)}
    tensors: dict[str, Tensor] = {}
    with evaluating(model):
        shapes = _shapes(model, layers, task) if layers else {}
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
        found: JSONObject = {"memory": state_controls(model, task, "test", segment_length)}
        found |= {"pictures": None, "left": None, "sizes": sizes, "middle": None, "layers": entries}
        if not layers:
            found["left"] = "the model has no gated cache"
        elif (seen := task.pictured(model)) is not None:
            _record_pictures(*seen, model, layers, found, tensors)
        else:
            found["left"] = "the task has no pictures"
    if tensors:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "explain.safetensors"))
    write_json(folder / "explain.json", found)  # written last, so that the tensors exist when it does
    return found


def cost(layer: GatedBranch, rows: int, tokens: int) -> JSONObject | None:
    """What a layer adds for one sample with `rows` rows of `tokens` tokens; None for a causal cache.

    The result holds the layer's sizes, its parameters (counted), and by formula the multiply-adds of one forward pass
    in training and one in evaluation.
    """
    if getattr(layer, "causal", False):
        return None
    own = sum(p.numel() for name, p in layer.named_parameters() if not name.startswith("inner."))
    out = getattr(layer, "out_dim", layer.dim)
    grid = layer.grid[0] * layer.grid[1] if layer.grid is not None else 0
    if getattr(layer, "windows", None) is not None:  # one cache for all windows of a sample
        rows, tokens = 1, rows * tokens
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
        getattr(layer, "pool", 1) > 1,
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


def _shapes(model: nn.Module, layers: dict[str, GatedBranch], task: Task) -> dict[str, tuple[int, int]]:
    """The (rows, tokens) of each layer's first call for one sample."""
    found: dict[str, tuple[int, int]] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: found.setdefault(name, args[0].shape[:2]) and None)
        for name, layer in layers.items()
    ]
    try:
        task.forward(model, task.example(), None)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (int(rows), int(tokens)) for name, (rows, tokens) in found.items()}


def _record_pictures(
    run: nn.Module,
    task: Any,
    model: nn.Module,
    layers: dict[str, GatedBranch],
    found: JSONObject,
    tensors: dict[str, Tensor],
) -> None:
    """Add the pictures, and each layer's maps and slots, to `found` and `tensors`. run, task: see `Task.pictured`."""
    entries = {entry["name"]: entry for entry in found["layers"]}
    observed = {}
    for name, layer in layers.items():
        if layer.grc.scope == "stream" or getattr(layer, "causal", False):
            entries[name]["maps"] = {"left": "its cache changes along a stream"}
        else:
            observed[name] = layer
    index, label, inputs = _choose_pictures(task)
    shown = _pictures(task, "test", index)
    calls = first_calls(run, observed, inputs)
    known: dict[str, Places] = {}
    for name, layer in observed.items():
        place: Places | str | None = "the model did not call it" if name not in calls else None
        if place is None:
            rows, tokens = calls[name].o_self.shape[0] // len(index), calls[name].o_self.shape[1]
            place = places(model, name, layer, rows, tokens, (shown.shape[1], shown.shape[2]))
        if isinstance(place, str):
            entries[name]["maps"] = {"left": place}
            continue
        known[name] = place
        number = list(layers).index(name)
        entries[name]["maps"], tensors[f"self.{number}"], tensors[f"memory.{number}"] = maps(layer, place, calls[name])
    if known:
        found["middle"] = list(layers).index(list(known)[(len(known) - 1) // 2])
        tensors["pictures"] = _smaller(shown, SIDE)
        about = str(task.about) if run is not model else ""
        guess = label if about else run(inputs, None)[0].argmax(-1).tolist()
        found["pictures"] = {"split": "test", "index": index, "label": label, "guess": guess, "names": list(task.names)}
        found["pictures"] |= {"about": about} if about else {}
        _compare_slots(run, task, layers, known, entries, tensors)
    else:
        found["left"] = "no layer's tokens have known positions in the picture"


def _compare_slots(
    run: nn.Module,
    task: Any,
    layers: dict[str, GatedBranch],
    known: dict[str, Places],
    entries: dict[str, JSONObject],
    tensors: dict[str, Tensor],
) -> None:
    """Compare the slots of some layers with tokens of training pictures, and record the nearest patches."""
    chosen = {list(known)[i]: layers[list(known)[i]] for i in evenly_spaced(len(known), SEARCHED)}
    index = evenly_spaced(task.size("train"), IMAGES).tolist()
    pictures = _pictures(task, "train", index)
    generator = torch.Generator().manual_seed(0)
    centres, picks = {}, {}
    for name, layer in chosen.items():
        centres[name] = _centres(layer, known[name]).flatten(0, 1)
        # Padding is left out. Every picture contributes the same number of tokens, at its own random positions.
        real = centres[name].isfinite().all(-1).nonzero().flatten()
        each = min(len(real), max(1, TOKENS // len(index)))
        picks[name] = torch.stack([real[torch.randperm(len(real), generator=generator)[:each]] for _ in index])
    tokens: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for first in range(0, len(index), BATCH):
        part = index[first : first + BATCH]
        calls = first_calls(run, chosen, _inputs(task, "train", part, pictures[first : first + BATCH]))
        for name, layer in chosen.items():
            grid = known[name].grid if layer.grc.resample == "grid" else None
            slots = resample(calls[name].source.float(), layer.cache.shape[0], None, layer.grc.resample, grid)
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
        cut = patches(pictures, image[held.token], where, known[name].grid)
        tensors[f"patches.{list(layers).index(name)}"] = cut
        entries[name]["slots"] = {
            **held.numbers,
            "shown": held.slots.tolist(),
            "image": [[index[i] for i in row] for row in image[held.token].tolist()],
            "centres": rounded(where),
            "nearest": rounded(held.cosine),
        }


def _centres(layer: GatedBranch, place: Places) -> Tensor:
    """The centres of the tokens that each slot is written from. With length="paper" these are a grid's squares."""
    if getattr(layer, "windows", None) is not None:
        place = Places(place.grid, 0, torch.arange(place.grid[0] * place.grid[1])[None])
    return place.centres(layer.cache.shape[0], layer.grc.resample, getattr(layer, "pool", 1))


def patches(pictures: Tensor, image: Tensor, where: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cut tokens' patches, with a margin of half a patch, from pictures [N, H, W, C]: [..., side, side, C] uint8.

    image [...]: the picture of each token; where [..., 2]: its centre (y, x) in [0, 1]; grid: a patch has
    H/grid[0] × W/grid[1] pixels. Pixels outside the picture are grey.
    """
    height, width, _ = pictures.shape[1:]
    patch = [max(1, round(n / g)) for n, g in zip((height, width), grid, strict=True)]
    margin = [-(-n // 2) for n in patch]
    padded = F.pad(pictures.permute(0, 3, 1, 2), (margin[1], margin[1], margin[0], margin[0]), value=128)
    found = []
    for i, (y, x) in zip(image.flatten().tolist(), where.flatten(0, -2).tolist(), strict=True):
        # The padded picture is offset by the margin, so the crop with its margin starts at the patch's own coordinates.
        top = min(max(round(y * height - patch[0] / 2), 0), height - patch[0])
        left = min(max(round(x * width - patch[1] / 2), 0), width - patch[1])
        found.append(padded[i, :, top : top + patch[0] + 2 * margin[0], left : left + patch[1] + 2 * margin[1]])
    cut = _smaller(torch.stack(found).permute(0, 2, 3, 1), PATCH)
    return cut.unflatten(0, tuple(image.shape))


def _smaller(pictures: Tensor, most: int) -> Tensor:
    """Scale uint8 pictures [N, H, W, C] so that their larger side has at most `most` pixels."""
    height, width = pictures.shape[1:3]
    if max(height, width) <= most:
        return pictures
    size = [max(1, round(n * most / max(height, width))) for n in (height, width)]
    small = F.interpolate(pictures.permute(0, 3, 1, 2).float(), size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _choose_pictures(task: Task) -> tuple[list[int], list[int], Tensor]:
    """Choose pictures of the test split from as many classes as possible: returns indices, labels and inputs."""
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
    # The first picture of each class, then the second of each, and so on.
    order = sorted((place, label, i, x) for label, rows in found.items() for place, (i, x) in enumerate(rows))
    chosen = sorted((label, i, x) for _, label, i, x in order[:PICTURES])
    return [i for _, i, _ in chosen], [label for label, _, _ in chosen], torch.stack([x for _, _, x in chosen])


def _inputs(task: Any, split: str, index: list[int], pictures: Tensor) -> Tensor:
    """The model's inputs for pictures of a split, without augmentation."""
    return task.rows(split, index).inputs if task.inputs == "tokens" else normalise(pictures.numpy(), *task.colours)


def _pictures(task: Any, split: str, index: list[int]) -> Tensor:
    return torch.stack([torch.as_tensor(task.picture(split, i)) for i in index])
