"""Record the two branches of a cached layer, o_self and o_mem, as they are mixed, and turn them into images."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated import GatedCacheAttention
from mnemos.attention.gated_branch import GatedBranch
from mnemos.hosts.branch import HostBranch
from mnemos.hosts.grids import Grid
from mnemos.types import JSON, JSONObject

from .places import Places

MAP = 56  # maximum side of a recorded map, in tokens; larger maps are averaged down


class BranchOutputs(NamedTuple):
    """One call of a cached layer: the tokens it summarises [B, T, ·], and o_self and o_mem [B, T, ·] before mixing."""

    source: Tensor
    o_self: Tensor
    o_mem: Tensor


@contextlib.contextmanager
def observe_branches(layers: dict[str, GatedBranch], observe: Callable[[str, BranchOutputs], None]) -> Iterator[None]:
    """Within the context, call observe(name, outputs) for every call of every cached layer in `layers`.

    The model must be in eval mode and its inputs without padding.
    """
    handles = []
    inputs: dict[GatedBranch, tuple[Tensor, Grid | None]] = {}

    def keep_input(layer: GatedBranch, args: tuple, kwargs: dict) -> None:
        inputs[layer] = args[0], kwargs.get("grid")

    def observe_host(name: str) -> Callable[[HostBranch, Tensor, Tensor], None]:
        def report(layer: HostBranch, y: Tensor, o_mem: Tensor) -> None:
            x, grid = inputs[layer]
            source = (x if layer.grc.source == "input" else y)[..., : layer.cache_dim]
            observe(name, BranchOutputs(layer.summarised(source, None, grid)[0], y, o_mem))

        return report

    def observe_own(name: str) -> Callable[[GatedCacheAttention, tuple], None]:
        return lambda layer, args: observe(name, _computed(layer, args[0]))

    try:
        for name, layer in layers.items():
            if isinstance(layer, HostBranch):
                handles.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))
                layer.observer = observe_host(name)
            else:
                handles.append(layer.register_forward_pre_hook(observe_own(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers.values():
            if isinstance(layer, HostBranch):
                layer.observer = None


def _computed(layer: GatedCacheAttention, x: Tensor) -> BranchOutputs:
    """Compute the branches of a `GatedCacheAttention` for input [B, T, D]; it has no submodule to hook."""
    o_self = layer.inner.heads(x, None, None)[0]
    projected = layer.inner.project(o_self)
    source = x if layer.grc.source == "input" else projected
    summary = layer.summarised(source[..., : layer.cache_dim], None)[0]
    query = layer.queries(x[..., : layer.cache_dim])
    o_mem = layer.lifted(layer.read(query, layer.current(summary, None)) if layer.moves else layer.frozen(query))
    return BranchOutputs(summary, (o_self if layer.lift is None else projected).flatten(2), o_mem.flatten(2))


def first_calls(model: nn.Module, layers: dict[str, GatedBranch], inputs: Tensor) -> dict[str, BranchOutputs]:
    """The first call of each cached layer in one forward pass. Layers that were not called are missing."""
    found: dict[str, BranchOutputs] = {}
    with observe_branches(layers, lambda name, outputs: found.setdefault(name, outputs) and None):
        model(inputs, None)
    return found


def maps(layer: GatedBranch, place: Places, outputs: BranchOutputs) -> tuple[JSONObject, Tensor, Tensor]:
    """Numbers for explain.json, and the maps of o_self and o_mem [N, h, w]: means over heads and channels.

    weight: m/(m + s) for the root mean squares m of σ(λ)·o_mem and s of (1 − σ(λ))·o_self. correlation: Pearson's
    correlation of the two maps of each picture. memory_own, self_own: the share of a map's variance that differs
    between pictures at the same position; the remaining variance is an image common to all pictures.
    """
    both = [place.unfolded(o.float().mean(-1)) for o in (outputs.o_self, outputs.o_mem)]
    share = torch.sigmoid(layer.mix.detach().float()).repeat_interleave(outputs.o_mem.shape[-1] // layer.num_heads)
    own = (outputs.o_self * (1 - share)).square().mean().sqrt()
    memory = (outputs.o_mem * share).square().mean().sqrt()
    flat = [m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in both]
    cosine = F.cosine_similarity(flat[0], flat[1], dim=1)
    numbers = {
        "grid": list(place.grid),
        "weight": float(memory / (own + memory).clamp(min=1e-30)),
        "correlation": rounded(cosine),
        "self_own": _share_per_picture(both[0]),
        "memory_own": _share_per_picture(both[1]),
    }
    largest = max(place.grid)
    if largest > MAP:
        height, width = (max(1, round(n * MAP / largest)) for n in place.grid)
        both = [F.adaptive_avg_pool2d(m[:, None], (height, width))[:, 0] for m in both]
    return numbers, both[0], both[1]


def _share_per_picture(maps: Tensor) -> float | None:
    """The share of the variance of maps [N, h, w] that is between pictures; None for one picture or constant maps."""
    if len(maps) < 2:
        return None
    within = maps.var(0).mean()
    # The mean over N pictures still contains 1/N of the variance between pictures.
    between = (maps.mean(0).var() - within / len(maps)).clamp(min=0)
    total = within + between
    return float(within / total) if total > 0 else None


def rounded(values: Tensor) -> JSON:
    """The values as nested lists, rounded to four decimals."""
    return values.double().mul(1e4).round().div(1e4).tolist()
