"""The two branches of a cached layer, o_self and o_mem, as they are mixed, and as images where positions are known."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

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


def first_calls(model: nn.Module, layers: dict[str, GatedBranch], inputs: Tensor) -> dict[str, BranchOutputs]:
    """The first call of each cached layer in one forward pass. Layers that were not called are missing."""
    calls: dict[str, BranchOutputs] = {}

    def see(name: str, own: Tensor, memory: Tensor) -> None:
        calls.setdefault(name, BranchOutputs(own, memory))

    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            stack.enter_context(observe_mixing(layer, partial(see, name)))
        model(inputs, None)
    return calls


def picture_grid(layer: GatedBranch, calls: BranchOutputs, picture: tuple[int, int]) -> tuple[int, int] | str:
    """The grid of a layer's tokens in a picture of (height, width) pixels; a str says why none is known."""
    tokens = calls.o_self.shape[1] - layer.prefix
    known = [shape for shape in (layer.grid, picture) if shape is not None and shape[0] * shape[1] == tokens]
    return known[0] if known else f"its {tokens} tokens form no known grid"


def maps(layer: GatedBranch, grid: tuple[int, int], outputs: BranchOutputs) -> tuple[BranchMaps, Tensor, Tensor]:
    """Numbers, and the maps of o_self and o_mem [N, h, w]: means over heads and channels.

    weight: m/(m + s) for the root mean squares m of σ(λ)·o_mem and s of (1 − σ(λ))·o_self. correlation: Pearson's
    correlation of the two maps of each picture. memory_own, self_own: the share of a map's variance that differs
    between pictures at the same position; the remaining variance is an image common to all pictures.
    """
    both = [o.float().mean(-1)[:, layer.prefix :].unflatten(1, grid) for o in (outputs.o_self, outputs.o_mem)]
    share = torch.sigmoid(layer.mix.detach().float()).repeat_interleave(outputs.o_mem.shape[-1] // layer.num_heads)
    own = (outputs.o_self * (1 - share)).square().mean().sqrt()
    memory = (outputs.o_mem * share).square().mean().sqrt()
    flat = [m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in both]
    numbers = BranchMaps(
        grid=grid,
        weight=float(memory / (own + memory).clamp(min=1e-30)),
        correlation=tuple(round(one, 4) for one in F.cosine_similarity(flat[0], flat[1], dim=1).tolist()),
        self_own=_share_per_picture(both[0]),
        memory_own=_share_per_picture(both[1]),
    )
    if (largest := max(grid)) > MAP:
        height, width = (max(1, round(n * MAP / largest)) for n in grid)
        both = [F.adaptive_avg_pool2d(m[:, None], (height, width))[:, 0] for m in both]
    return numbers, both[0], both[1]


def _share_per_picture(maps: Tensor) -> float:
    """The share of the variance of maps [N, h, w] that is between pictures; NaN for one picture or constant maps."""
    if len(maps) == 1:
        return math.nan
    within = maps.var(0).mean()
    # The mean over N pictures still contains 1/N of the variance between pictures.
    between = (maps.mean(0).var() - within / len(maps)).clamp(min=0)
    return float(within / (within + between))
