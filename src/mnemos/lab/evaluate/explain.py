"""Record what a trained model's memory does: controls of its state, and what its gated caches do, hold and cost.

Nothing is trained and nothing is plotted here. The trained model processes some segments and pictures of the test
split, or of the validation split where there is no other, and two files are written to the run folder for the
report (`recorded.Explanation`).

What slots hold: a slot C_i is a gated average of update candidates C̃ (eq. 5), not of tokens, so slots and tokens lie
in different spaces. A token s is therefore compared with slot i by its candidate c_i(s) = C̃(s, C_i): the value of the
slot after an update by this token alone with a fully open gate (g_u = 1). Let μ_i be the mean of c_i over all compared
tokens. The similarity of s and C_i is cos(C_i − μ_i, c_i(s) − μ_i). At most one token per picture is among the nearest.

The average of many tokens need not be near any one of them. So the numbers of each layer include
- `cosine` and `chance`: the similarity of the nearest token, and the same for a random mixture of the candidates;
- `distance`: ‖C_i − μ_i‖ in units of the candidates' spread about μ_i. Far below 1, the slot is closer to the mean
  candidate than a typical candidate is;
- `place`: the share of C_i − μ_i explained by the mean of the tokens at the positions that the slot is written from;
  1 if the slot is the average of its position;
- `distinct`: the effective number of different tokens that are nearest to some slot.
"""

import contextlib
import copy
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated import GatedBranch
from mnemos.lab.tasks.augment import normalise
from mnemos.lab.tasks.task import Task
from mnemos.modes import evaluating
from mnemos.ops.gated_cache import gated_update, resample
from mnemos.ops.gated_cache.cost import Shape, inference_macs, training_macs

from .branches import TokenPositions, first_calls, maps, positions_of, rounded
from .controls import SEGMENTS, state_controls
from .recorded import NO_PICTURES, CachedLayer, Explanation, LayerCost, Left, Pictures, SlotContents

PICTURES = 8  # of the test split, recorded
SIDE = 96  # maximum side of a recorded picture, in pixels
SEARCHED = 6  # layers whose slots are compared with tokens, evenly spaced
PATCH = 32  # maximum side of a recorded patch, in pixels
BATCH = 32
IMAGES = 256  # training pictures used
TOKENS = 8192  # tokens compared per layer, equally many per picture
SLOTS = 32  # slots compared per layer, evenly spaced
SHOWN = 8  # slots recorded with their patches
NEAREST = 6


@torch.no_grad()
def explain(
    model: nn.Module, task: Task, folder: Path, segment_length: int = 0, segments: int = SEGMENTS
) -> Explanation:
    """Record a trained model's memory in explain.json and explain.safetensors of a run folder; what was recorded.

    `layers` has the layers with a gated cache; for a task without pictures only their costs are recorded.
    segment_length: that of the run's rollout. segments: see `state_controls`. The result is deterministic and
    smaller than 4 MB; the model and the random generators are unchanged.
    Cost: that of `state_controls`; with gated caches also forward passes for about 260 pictures, and about 10⁶·Dm²
    multiply-adds for the slots in each of at most six layers.
    """
    pictures, left, middle = None, "the model has no gated cache", None
    shown: defaultdict[str, dict[str, Any]] = defaultdict(dict)  # what pictures show of a layer, by its name
    costs: dict[str, LayerCost | None] = {}
    with evaluating(model):
        memory = state_controls(model, task, "test" if task.has_test else "valid", segment_length, segments)
        parameter = next(model.parameters())
        if (parameter.device.type, parameter.dtype) != ("cpu", torch.float32):  # of `mnemos.fit`, whose model stays so
            model = copy.deepcopy(model).cpu().float()
        caches = {name: module for name, module in model.named_modules() if isinstance(module, GatedBranch)}
        if caches:
            costs, left = _costs(model, caches, task), NO_PICTURES
            if (pictured := task.pictured(model)) is not None:
                pictures, left, middle = _record_pictures(*pictured, model, caches, shown)
    layers = tuple(
        CachedLayer(
            name, tuple(torch.sigmoid(layer.mix.float()).tolist()), layer.grc.inference, costs[name], **shown[name]
        )
        for name, layer in caches.items()
    )
    explanation = Explanation(layers, memory, pictures, None if pictures else left, middle)
    explanation.write(folder)
    return explanation


def _costs(model: nn.Module, caches: dict[str, GatedBranch], task: Task) -> dict[str, LayerCost | None]:
    """What each layer adds for one sample: its parameters are counted, its multiply-adds follow from a formula.

    None for a causal cache, and for a layer that the sample does not call.
    """
    shapes: dict[str, tuple[int, int]] = {}  # (rows, tokens) of each layer's first call

    def note_shape(name: str, _: nn.Module, args: tuple) -> None:
        shapes.setdefault(name, args[0].shape[:2])

    with contextlib.ExitStack() as stack:
        for name, layer in caches.items():
            stack.callback(layer.register_forward_pre_hook(partial(note_shape, name)).remove)
        task.forward(model, task.example(), None)
    costs: dict[str, LayerCost | None] = dict.fromkeys(caches)
    for name, layer in caches.items():
        if name not in shapes or getattr(layer, "causal", False):
            continue
        rows, tokens = map(int, shapes[name])
        if getattr(layer, "windows", None) is not None:  # one cache for all windows of a sample
            rows, tokens = 1, rows * tokens
        shape = Shape(
            tokens,
            layer.cache.shape[0],
            layer.dim,
            layer.cache_dim,
            layer.num_heads,
            getattr(layer, "out_dim", layer.dim),
            rows,
            math.prod(layer.grid or (0,)),
            layer.lift is not None,
        )
        costs[name] = LayerCost(
            rows=rows,
            tokens=tokens,
            slots=shape.length,
            width=shape.width,
            cache_width=shape.cache_width,
            heads=shape.heads,
            parameters=sum(p.numel() for part, p in layer.named_parameters() if not part.startswith("inner.")),
            training_macs=training_macs(shape, layer.grc),
            inference_macs=inference_macs(shape, layer.grc),
        )
    return costs


def _record_pictures(
    run: nn.Module, task: Any, model: nn.Module, caches: dict[str, GatedBranch], shown: dict[str, dict[str, Any]]
) -> tuple[Pictures | None, str, int | None]:
    """Add maps and slots of each layer to `shown`; the pictures or why there are none, and the middle layer's number.

    run, task: see `Task.pictured`.
    """
    # --- both branches of each layer, as images ---
    observed = {}
    for name, layer in caches.items():
        if layer.grc.scope == "stream" or getattr(layer, "causal", False):
            shown[name]["maps"] = Left("its cache changes along the sequence")
        else:
            observed[name] = layer
    index, label, inputs = choose_pictures(task)
    pixels = read_pictures(task, "test", index)
    calls = first_calls(run, observed, inputs)
    layouts: dict[str, TokenPositions] = {}
    size = (pixels.shape[1], pixels.shape[2])
    for name, positions in positions_of(model, calls, observed, len(index), size).items():
        if isinstance(positions, str):
            shown[name]["maps"] = Left(positions)
            continue
        layouts[name] = positions
        numbers, own, memory = maps(observed[name], positions, calls[name])
        shown[name] |= {"maps": numbers, "self_map": own.numpy(), "memory_map": memory.numpy()}
    if not layouts:
        return None, "no layer's tokens have known positions in the picture", None

    # --- the pictures themselves, and what the slots hold ---
    about = str(task.about) if run is not model else None
    guess = label if about else run(inputs, None)[0].argmax(-1).tolist()
    small = smaller(pixels, SIDE).numpy()
    pictures = Pictures(tuple(label), tuple(guess), tuple(task.names), tuple(index), about=about, pixels=small)
    written = {name: positions for name, positions in layouts.items() if not caches[name].grc.constant}
    for name in layouts.keys() - written.keys():
        shown[name]["slots"] = Left("its cache is a learned constant, which no token wrote")
    if written:
        _compare_layers(run, task, caches, written, shown)
    return pictures, "", list(caches).index(list(layouts)[(len(layouts) - 1) // 2])


def _compare_layers(
    run: nn.Module,
    task: Any,
    caches: dict[str, GatedBranch],
    layouts: dict[str, TokenPositions],
    shown: dict[str, dict[str, Any]],
) -> None:
    """Compare the slots of some layers with tokens of training pictures, and record the nearest patches."""
    # --- which tokens: of every picture equally many, at its own random positions, without padding ---
    chosen = {list(layouts)[i]: caches[list(layouts)[i]] for i in evenly_spaced(len(layouts), SEARCHED)}
    index = evenly_spaced(task.size("train"), IMAGES).tolist()
    pictures = read_pictures(task, "train", index)
    generator = torch.Generator().manual_seed(0)
    centres, picks = {}, {}
    for name, layer in chosen.items():
        positions = layouts[name]
        if getattr(layer, "windows", None) is not None:  # with length="paper" slots are a grid's squares
            positions = TokenPositions(positions.grid, 0, torch.arange(math.prod(positions.grid))[None])
        at = positions.centres(layer.cache.shape[0], layer.grc.resample, getattr(layer, "pool", 1))
        centres[name] = at.flatten(0, 1)
        real = centres[name].isfinite().all(-1).nonzero().flatten()
        each = min(len(real), max(1, TOKENS // len(index)))
        picks[name] = torch.stack([real[torch.randperm(len(real), generator=generator)[:each]] for _ in index])

    # --- these tokens, as the update reads them ---
    tokens: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for first in range(0, len(index), BATCH):
        part = index[first : first + BATCH]
        if task.inputs == "tokens":
            inputs = task.rows("train", part).inputs
        else:
            inputs = normalise(pictures[first : first + BATCH].numpy(), *task.colours)  # without augmentation
        calls = first_calls(run, chosen, inputs)
        for name, layer in chosen.items():
            grid = layouts[name].grid if layer.grc.resample == "grid" else None
            slots = resample(calls[name].source.float(), layer.cache.shape[0], None, layer.grc.resample, grid)
            slots = slots.reshape(len(part), -1, slots.shape[-1])
            pick = picks[name][first : first + BATCH, :, None]
            tokens[name].append(slots.gather(1, pick.expand(-1, -1, slots.shape[-1])))

    # --- the nearest of them ---
    for name, layer in chosen.items():
        pick = picks[name].flatten()
        image = torch.arange(len(index)).repeat_interleave(picks[name].shape[1])
        nearest = compare_slots(layer, torch.cat(tokens[name]).flatten(0, 1), pick % layer.cache.shape[0], image)
        if isinstance(nearest, str):
            shown[name]["slots"] = Left(nearest)
            continue
        where = centres[name][pick[nearest.token]]
        contents = SlotContents(
            **nearest.numbers,
            shown=tuple(nearest.slots.tolist()),
            image=tuple(tuple(index[i] for i in row) for row in image[nearest.token].tolist()),
            centres=rounded(where),
            nearest=rounded(nearest.cosine),
        )
        cut = patches(pictures, image[nearest.token], where, layouts[name].grid)
        shown[name] |= {"slots": contents, "patches": cut.numpy()}


def patches(pictures: Tensor, image: Tensor, where: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cut tokens' patches, with a margin of half a patch, from pictures [N, H, W, C]: [..., side, side, C] uint8.

    image [...]: the picture of each token; where [..., 2]: its centre (y, x) in [0, 1]; grid: a patch has
    H/grid[0] × W/grid[1] pixels. Pixels outside the picture are grey.
    """
    height, width, _ = pictures.shape[1:]
    patch = [max(1, round(n / g)) for n, g in zip((height, width), grid, strict=True)]
    margin = [-(-n // 2) for n in patch]
    padded = F.pad(pictures.permute(0, 3, 1, 2), (margin[1], margin[1], margin[0], margin[0]), value=128)
    crops = []
    for i, (y, x) in zip(image.flatten().tolist(), where.flatten(0, -2).tolist(), strict=True):
        # The padded picture is offset by the margin, so the crop with its margin starts at the patch's own coordinates.
        top = min(max(round(y * height - patch[0] / 2), 0), height - patch[0])
        left = min(max(round(x * width - patch[1] / 2), 0), width - patch[1])
        crops.append(padded[i, :, top : top + patch[0] + 2 * margin[0], left : left + patch[1] + 2 * margin[1]])
    cut = smaller(torch.stack(crops).permute(0, 2, 3, 1), PATCH)
    return cut.unflatten(0, tuple(image.shape))


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


def read_pictures(task: Any, split: str, index: list[int]) -> Tensor:
    """Pictures of a split as uint8 [N, H, W, 1 or 3]."""
    return torch.stack([torch.as_tensor(task.picture(split, i)) for i in index])


class NearestTokens(NamedTuple):
    """The tokens nearest to the slots of one layer, with the numbers of `SlotContents`.

    slots [SHOWN]: indices of the recorded slots; token [SHOWN, K]: indices of their nearest tokens; cosine [SHOWN, K]:
    the similarities.
    """

    numbers: dict[str, Any]
    slots: Tensor
    token: Tensor
    cosine: Tensor


def compare_slots(layer: GatedBranch, tokens: Tensor, slot: Tensor, image: Tensor) -> NearestTokens | str:
    """Compare tokens [M, Dm], as the update reads them, with the stored slots; a str says why that is impossible.

    slot [M]: the slot that each token is written to; image [M]: the picture it comes from. Cost: 4·M·Dm² multiply-adds
    per compared slot.
    """
    cache = layer.cache.float()
    if not cache.any():
        return "its stored cache is empty"
    generator = torch.Generator().manual_seed(0)

    def cosines(a: Tensor, b: Tensor) -> Tensor:
        return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T

    def chance(points: Tensor) -> Tensor:
        """The same for a random vector with the covariance of the centred points, up to scale."""
        return cosines(torch.randn(1, len(points), generator=generator) @ points, points).amax()

    chosen = evenly_spaced(len(cache), SLOTS)
    images = int(image.max()) + 1
    token, cosine, by_chance, distance = [], [], [], []
    off_mean = off_place = 0.0  # Σ ‖C_i − μ_i‖², and Σ ‖C_i − mean candidate of the tokens at its own position‖²
    for i in chosen.tolist():
        candidates = candidates_for(layer, tokens, i)
        mean = candidates.mean(0)
        around = candidates - mean
        similar = cosines((cache[i] - mean)[None], around)[0]
        # The nearest token of each picture, then the nearest pictures.
        best = similar.new_full((images,), -torch.inf).scatter_reduce(0, image, similar, "amax")
        value, picture = best.topk(min(NEAREST, images))
        cosine.append(value)
        token.append(((image == picture[:, None]) & (similar == value[:, None])).float().argmax(1))
        by_chance.append(chance(around))
        off = float((cache[i] - mean).square().sum())
        distance.append(math.sqrt(off / float(around.square().sum(1).mean().clamp(min=1e-30))))
        off_mean += off
        own = candidates[slot == i]
        if len(own) > 1:
            # Subtract the sampling error of the mean of these tokens.
            noise = own.var(0).sum() / len(own)
            off = float(((cache[i] - own.mean(0)).square().sum() - noise).clamp(min=0))
        off_place += off
    # The same comparison with the tokens themselves, to show that slots lie in the space of candidates.
    raw = cosines(cache[chosen] - cache.mean(0), tokens - tokens.mean(0)).amax(1)
    nearest, share = torch.stack(token), torch.stack(token)[:, 0].unique(return_counts=True)[1] / len(token)
    numbers = {
        "compared": len(chosen),
        "tokens": len(tokens),
        "images": images,
        "cosine": float(torch.stack(cosine)[:, 0].mean()),
        "chance": float(torch.stack(by_chance).mean()),
        "raw_cosine": float(raw.mean()),
        "distance": sum(distance) / len(distance),
        "place": 1 - off_place / off_mean if off_mean > 0 else math.nan,
        "distinct": float(torch.exp(-(share * share.log()).sum())),  # exp of the entropy of their frequencies
    }
    shown = evenly_spaced(len(chosen), SHOWN)
    return NearestTokens(numbers, chosen[shown], nearest[shown], torch.stack(cosine)[shown])


def candidates_for(layer: GatedBranch, tokens: Tensor, i: int) -> Tensor:
    """The candidates C̃ [M, Dm] of tokens [M, Dm] for slot i of the stored cache: the updated slot with g_u = 1."""
    d = layer.cache_dim
    norm = layer.candidate_norm
    open_gate = tokens.new_zeros(d, 2 * d), tokens.new_full((d,), torch.inf)
    new, _ = gated_update(
        tokens[:, None].float(),
        layer.cache[i][None].float(),
        update=open_gate,
        reset=(layer.reset_gate.weight.float(), layer.reset_gate.bias.float()),
        candidate=(layer.candidate.weight.float(), layer.candidate.bias.float()),
        norm=None if norm is None else (norm.weight.float(), norm.bias.float()),
    )
    return new[:, 0]


def evenly_spaced(count: int, most: int) -> Tensor:
    """At most `most` of the numbers 0 … `count` − 1, evenly spaced, including the first and the last."""
    return torch.linspace(0, count - 1, min(count, most)).round().long().unique()
