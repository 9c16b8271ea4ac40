"""The two branches of a cached layer, o_self and o_mem, as they are mixed, and as images where positions are known."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated import GatedBranch
from mnemos.hosts.branch import HostBranch

from .recorded import BranchMaps

MAP = 56  # maximum side of a recorded map, in tokens; larger maps are averaged down


class BranchOutputs(NamedTuple):
    """One call of a cached layer: o_self and o_mem [B, T, ·] before mixing."""

    o_self: Tensor
    o_mem: Tensor


@contextlib.contextmanager
def observe_mixing(layer: GatedBranch, see: Callable[[Tensor, Tensor], object]) -> Iterator[None]:
    """In the context, a cached layer calls see(o_self, o_mem), [B, T, ·], as it mixes them: a causal one by blocks."""
    # A hook keeps kernels away, which would read the cache and mix in one step.
    hook = layer.map("query").register_forward_hook(lambda *_: None)
    if isinstance(layer, HostBranch):
        before, layer.observer = layer.observer, lambda _, own, memory: see(own, memory)
        undo = partial(setattr, layer, "observer", before)
    else:
        mix = layer.mix_heads

        def seen(own: Tensor, memory: Tensor) -> Tensor:
            see(own.flatten(2), memory.flatten(2))
            return mix(own, memory)

        vars(layer)["mix_heads"] = seen
        undo = partial(delattr, layer, "mix_heads")
    try:
        yield
    finally:
        undo()
        hook.remove()


@contextlib.contextmanager
def observe_branches(layers: dict[str, GatedBranch], observe: Callable[[str, BranchOutputs], None]) -> Iterator[None]:
    """Within the context, call observe(name, outputs) for every call of cached layers, in eval mode and without
    padding.
    """

    def see(name: str, own: Tensor, memory: Tensor) -> None:
        observe(name, BranchOutputs(own, memory))

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(observe_mixing(layer, partial(see, name)))
        yield


def first_calls(model: nn.Module, layers: dict[str, GatedBranch], inputs: Tensor) -> dict[str, BranchOutputs]:
    """The first call of each cached layer in one forward pass. Layers that were not called are missing."""
    calls: dict[str, BranchOutputs] = {}
    with observe_branches(layers, lambda name, outputs: calls.setdefault(name, outputs) and None):
        model(inputs, None)
    return calls


@dataclass(frozen=True)
class TokenPositions:
    """The positions of one picture's tokens in one layer: R rows, each with `prefix` class tokens and T other tokens.

    A row is a window; layers without windows have R = 1. grid: (height, width); index [R, T] int64: the position
    y·width + x of each token, −1 for padding.
    """

    grid: tuple[int, int]
    prefix: int
    index: Tensor

    def unfolded(self, values: Tensor) -> Tensor:
        """Arrange one value per token [B·R, prefix + T] by position: [B, height, width]."""
        rows, tokens = self.index.shape
        values = values[:, self.prefix :].reshape(-1, rows * tokens)
        index = self.index.flatten()
        picture = values.new_zeros(values.shape[0], self.grid[0] * self.grid[1])
        picture[:, index[index >= 0]] = values[:, index >= 0]
        return picture.unflatten(1, self.grid)


def token_positions(
    model: nn.Module, name: str, layer: GatedBranch, rows: int, tokens: int, picture: tuple[int, int]
) -> TokenPositions | str:
    """The positions of a layer called with `rows` rows of `tokens` tokens per picture; a str says why none are known.

    picture: (height, width) in pixels, which is the grid of a layer whose tokens are pixels.
    """
    # --- the windows of a Swin block that contains the layer, as timm and Hugging Face divide the grid ---
    modules, parts = dict(model.named_modules()), name.split(".")
    parents = (modules.get(".".join(parts[:end])) for end in range(len(parts) - 1, 0, -1))
    sizes = ("input_resolution", "window_size", "shift_size")
    block: Any = next((one for one in parents if all(hasattr(one, size) for size in sizes)), None)
    if block is not None:
        values = [getattr(block, size) for size in sizes]
        grid, window, shift = (
            (int(one[0]), int(one[1])) if isinstance(one, (tuple, list)) else (int(one), int(one)) for one in values
        )
        padded = [-(-n // w) * w for n, w in zip(grid, window, strict=True)]
        if rows * tokens == padded[0] * padded[1] and tokens == window[0] * window[1]:
            image = torch.arange(grid[0] * grid[1]).view(grid)
            back = (-shift[0], -shift[1])
            fill = (0, padded[1] - grid[1], 0, padded[0] - grid[0])
            # Hugging Face pads before it shifts; timm shifts before it pads.
            if hasattr(block, "maybe_pad"):
                image = F.pad(image, fill, value=-1).roll(back, (0, 1))
            else:
                image = F.pad(image.roll(back, (0, 1)), fill, value=-1)
            cut = image.view(padded[0] // window[0], window[0], padded[1] // window[1], window[1]).transpose(1, 2)
            return TokenPositions(grid, 0, cut.reshape(rows, tokens))

    # --- one row: a grid that the layer knows, or the picture's own ---
    if rows != 1:
        return f"its {rows} rows per picture are windows with unknown positions"
    tokens -= layer.prefix
    for shape in (layer.grid, picture):
        if shape is not None and shape[0] * shape[1] == tokens:
            return TokenPositions(shape, layer.prefix, torch.arange(tokens)[None])
    return f"its {tokens} tokens form no known grid"


def positions_of(
    model: nn.Module,
    calls: dict[str, BranchOutputs],
    layers: dict[str, GatedBranch],
    count: int,
    picture: tuple[int, int],
) -> dict[str, TokenPositions | str]:
    """`token_positions` of each layer in its first call, which read `count` pictures."""
    positions: dict[str, TokenPositions | str] = {}
    for name, layer in layers.items():
        positions[name] = "the model did not call it"
        if name in calls:
            rows, tokens = calls[name].o_self.shape[0] // count, calls[name].o_self.shape[1]
            positions[name] = token_positions(model, name, layer, rows, tokens, picture)
    return positions


def maps(layer: GatedBranch, positions: TokenPositions, outputs: BranchOutputs) -> tuple[BranchMaps, Tensor, Tensor]:
    """Numbers, and the maps of o_self and o_mem [N, h, w]: means over heads and channels.

    weight: m/(m + s) for the root mean squares m of σ(λ)·o_mem and s of (1 − σ(λ))·o_self. correlation: Pearson's
    correlation of the two maps of each picture. memory_own, self_own: the share of a map's variance that differs
    between pictures at the same position; the remaining variance is an image common to all pictures.
    """
    both = [positions.unfolded(o.float().mean(-1)) for o in (outputs.o_self, outputs.o_mem)]
    share = torch.sigmoid(layer.mix.detach().float()).repeat_interleave(outputs.o_mem.shape[-1] // layer.num_heads)
    own = (outputs.o_self * (1 - share)).square().mean().sqrt()
    memory = (outputs.o_mem * share).square().mean().sqrt()
    flat = [m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in both]
    numbers = BranchMaps(
        grid=positions.grid,
        weight=float(memory / (own + memory).clamp(min=1e-30)),
        correlation=tuple(round(one, 4) for one in F.cosine_similarity(flat[0], flat[1], dim=1).tolist()),
        self_own=_share_per_picture(both[0]),
        memory_own=_share_per_picture(both[1]),
    )
    largest = max(positions.grid)
    if largest > MAP:
        height, width = (max(1, round(n * MAP / largest)) for n in positions.grid)
        both = [F.adaptive_avg_pool2d(m[:, None], (height, width))[:, 0] for m in both]
    return numbers, both[0], both[1]


def _share_per_picture(maps: Tensor) -> float:
    """The share of the variance of maps [N, h, w] that is between pictures; NaN for one picture or constant maps."""
    if len(maps) < 2:
        return math.nan
    within = maps.var(0).mean()
    # The mean over N pictures still contains 1/N of the variance between pictures.
    between = (maps.mean(0).var() - within / len(maps)).clamp(min=0)
    total = within + between
    return float(within / total) if total > 0 else math.nan
