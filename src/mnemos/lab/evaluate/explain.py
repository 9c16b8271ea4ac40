"""Record what a trained model's memory does, for the report: controls of its state, and what its gated caches do."""

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated import GatedBranch
from mnemos.lab.tasks.task import Task
from mnemos.modes import evaluating

from .branches import first_calls, maps, picture_grid
from .controls import SEGMENTS, state_controls
from .recorded import NO_PICTURES, CachedLayer, Explanation, Left, Pictures

PICTURES = 8  # of the test split, recorded
SIDE = 96  # maximum side of a recorded picture, in pixels
BATCH = 32


@torch.no_grad()
def explain(
    model: nn.Module, task: Task, folder: Path, segment_length: int = 0, segments: int = SEGMENTS
) -> Explanation:
    """Record a trained model's memory in explain.json and explain.safetensors of a run folder; what was recorded.

    For a task without pictures only the σ(λ) of layers with a gated cache is recorded. segment_length: that of the
    run's rollout. segments: see `state_controls`. Deterministic, smaller than 4 MB; the model and the generators are
    unchanged.
    """
    pictures, left, middle = None, "the model has no gated cache", None
    shown: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # what pictures show of a layer, by its name
    with evaluating(model):
        memory = state_controls(model, task, "test" if task.has_test else "valid", segment_length, segments)
        parameter = next(model.parameters())
        if (parameter.device.type, parameter.dtype) != ("cpu", torch.float32):  # of `mnemos.fit`, whose model stays so
            model = copy.deepcopy(model).cpu().float()
        caches = {name: module for name, module in model.named_modules() if isinstance(module, GatedBranch)}
        if caches:
            left = NO_PICTURES
            if task.pictured:
                pictures, left, middle = _record_pictures(model, task, caches, shown)
    layers = tuple(
        CachedLayer(name, tuple(torch.sigmoid(layer.mix.float()).tolist()), **shown[name])
        for name, layer in caches.items()
    )
    explanation = Explanation(layers, memory, pictures, None if pictures else left, middle)
    explanation.write(folder)
    return explanation


def _record_pictures(
    model: nn.Module, task: Any, caches: dict[str, GatedBranch], shown: dict[str, dict[str, Any]]
) -> tuple[Pictures | None, str, int | None]:
    """Add maps of each layer to `shown`; the pictures or why there are none, and the middle layer's number."""
    # --- both branches of each layer, as images; a window is a row of its own, whose position is not known ---
    index, label, inputs = choose_pictures(task)
    pixels = torch.stack([torch.as_tensor(task.picture("test", i)) for i in index])  # [N, H, W, 1 or 3]
    changing = {n for n, one in caches.items() if one.grc.scope == "stream" or getattr(one, "causal", False)}
    calls, mapped = first_calls(model, {n: one for n, one in caches.items() if n not in changing}, inputs), []
    for name, layer in caches.items():
        if name in changing:
            shown[name]["maps"] = Left("its cache changes along the sequence")
        elif name not in calls:
            shown[name]["maps"] = Left("the model did not call it")
        elif len(calls[name].o_self) != len(index):
            shown[name]["maps"] = Left("its windows have unknown positions in the picture")
        elif isinstance(grid := picture_grid(layer, calls[name], (pixels.shape[1], pixels.shape[2])), str):
            shown[name]["maps"] = Left(grid)
        else:
            mapped.append(name)
            numbers, own, memory = maps(layer, grid, calls[name])
            shown[name] |= {"maps": numbers, "self_map": own.numpy(), "memory_map": memory.numpy()}
    if not mapped:
        return None, "no layer's tokens have known positions in the picture", None

    # --- the pictures themselves ---
    guess = model(inputs, None)[0].argmax(-1).tolist()
    small = smaller(pixels, SIDE).numpy()
    pictures = Pictures(tuple(label), tuple(guess), tuple(task.names), tuple(index), pixels=small)
    return pictures, "", list(caches).index(mapped[(len(mapped) - 1) // 2])


def smaller(pictures: Tensor, most: int) -> Tensor:
    """Scale uint8 pictures [N, H, W, C] so that their larger side has at most `most` pixels."""
    height, width = pictures.shape[1:3]
    if max(height, width) <= most:
        return pictures
    size = [max(1, round(n * most / max(height, width))) for n in (height, width)]
    small = F.interpolate(pictures.permute(0, 3, 1, 2).float(), size, mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def choose_pictures(task: Task) -> tuple[list[int], list[int], Tensor]:
    """Choose pictures of the test split from as many classes as possible: returns indices, labels and inputs."""
    by_class: dict[int, list[tuple[int, Tensor]]] = {}
    start = 0
    for batch in task.batches("test", BATCH):
        for i, label in enumerate(batch.targets.tolist()):
            rows = by_class.setdefault(label, [])
            if len(rows) < PICTURES:
                rows.append((start + i, batch.inputs[i].clone()))
        start += len(batch.inputs)
        if len(by_class) >= PICTURES or start >= 2000:
            break
    # The first picture of each class, then the second of each, and so on.
    order = sorted((turn, label, i, x) for label, rows in by_class.items() for turn, (i, x) in enumerate(rows))
    chosen = sorted((label, i, x) for _, label, i, x in order[:PICTURES])
    return [i for _, i, _ in chosen], [label for label, _, _ in chosen], torch.stack([x for _, _, x in chosen])
