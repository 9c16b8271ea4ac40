"""Record, image by image, the two branches of every cached layer of a model of images, and the slots that answered."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.attention.gated import GatedBranch
from mnemos.lab.evaluate.branches import TokenPositions, first_calls, maps, positions_of
from mnemos.lab.evaluate.explain import SIDE, choose_pictures, read_pictures, smaller
from mnemos.lab.report.markup import shortened
from mnemos.modes import evaluating
from mnemos.types import InputError

from .effects import check_finite
from .memories import Array, calls_of
from .observe import Attended, observing

LAYERS, SLOTS = 6, 64  # recorded at most: layers, evenly spaced; slots of a layer, those that are read most


@dataclass
class PictureLayer:
    """One cached layer; arrays are of N pictures."""

    name: str
    share: float  # of the memory's branch by size, `BranchMaps.weight`
    gate: float  # σ(λ), the mean over heads
    own: Array  # [N, h, w], o_self at every token: the mean over heads and channels
    memory: Array  # o_mem alike
    slots: tuple[int, ...]  # numbers of the recorded ones
    answered: Array  # [N, K, h, w], the weight of each in what each token read
    count: int  # of the layer's slots


@dataclass
class PictureRecording:
    """N pictures of the test split, pixels [N, H, W, 1 or 3] uint8, their classes, the model's, and cached layers."""

    name: str
    about: str
    labels: tuple[str, ...]
    guesses: tuple[str, ...]
    pixels: Array
    layers: list[PictureLayer]


@torch.no_grad()
def record_pictures(model: nn.Module, task: Any, name: str = "", about: str = "") -> PictureRecording:
    """Show a model some pictures of its test split, of as many classes as possible.

    The model and all random generators are unchanged. Raises InputError for a model without gated caches or pictures,
    and where no cached layer's tokens have places in the picture.
    """
    caches = {name: module for name, module in model.named_modules() if isinstance(module, GatedBranch)}
    caches = {
        name: one for name, one in caches.items() if one.grc.scope != "stream" and not getattr(one, "causal", False)
    }
    if not caches or not task.pictured:
        lacking = "pictures" if not task.pictured else "gated cache that all tokens read"
        raise InputError(
            f"look: expected a causal model, or a model of images with gated caches, found no {lacking}; mnemos report "
            "shows what its memory is worth"
        )
    with generators.preserve(), evaluating(model):
        index, label, inputs = choose_pictures(task)
        shown = read_pictures(task, index)
        branches = first_calls(model, caches, inputs)
        with observing(model) as calls:
            outputs, _ = model(inputs, None)
        check_finite(outputs)
        guess = outputs.argmax(-1).tolist()
        positions = positions_of(model, branches, caches, len(index), (shown.shape[1], shown.shape[2]))
        of_tokens = {layer: at for layer, at in positions.items() if not isinstance(at, str)}
        if not of_tokens:
            raise InputError(
                "look: expected cached layers whose tokens have places in the picture, found none; see mnemos report"
            )
        count = len(of_tokens)
        spaced = torch.linspace(0, count - 1, min(count, LAYERS)).round().long()
        chosen = [list(of_tokens)[i] for i in spaced.tolist()]
        layers = []
        for layer, title in zip(chosen, shortened(chosen), strict=True):
            numbers, own, memory = maps(caches[layer], of_tokens[layer], branches[layer])
            call = calls_of(calls, layer, Attended)[-1]
            slots, answered = _answers(call, of_tokens[layer], len(index))
            gate = float(torch.sigmoid(caches[layer].mix.float()).mean())
            drawn = own.numpy(), memory.numpy(), slots, answered.numpy(), call.k.shape[-3]
            layers.append(PictureLayer(title, numbers.weight, gate, *drawn))
    names = [str(one) for one in task.names]
    labels, guesses = (tuple(names[i] if i < len(names) else str(i) for i in each) for each in (label, guess))
    return PictureRecording(name, about, labels, guesses, smaller(shown, SIDE).numpy(), layers)


def _answers(call: Attended, at: TokenPositions, count: int) -> tuple[tuple[int, ...], Tensor]:
    """The slots that were read most, and the weight of each at every token: [N, K, h, w]."""
    weights = call.weights().mean(1).cpu()  # [rows, T, K]; one row for all pictures where they share a cache
    weights = weights.reshape(at.index.shape[0] * count, -1, weights.shape[-1])
    most = weights.mean((0, 1)).argsort(descending=True, stable=True)[:SLOTS]
    answered = torch.stack([at.unfolded(weights[..., slot]) for slot in most.tolist()], 1)
    return tuple(int(slot) for slot in most), answered
