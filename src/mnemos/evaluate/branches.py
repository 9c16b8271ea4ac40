"""The two branches of a cached layer as they are mixed, shown to whoever watches, and as images."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.adapt.branch import HostBranch
from mnemos.attention.gated import GatedCacheAttention
from mnemos.attention.gated_branch import GatedBranch

from .places import Places

MAP = 56  # tokens a side at most, of a map: beyond, neighbours are averaged


class BranchOutputs(NamedTuple):
    """One call of a cached layer: what is summarised [B, T, ·], and o_self and o_mem [B, T, ·] as they are mixed."""

    source: Tensor
    o_self: Tensor
    o_mem: Tensor


@contextlib.contextmanager
def watched(layers: dict[str, GatedBranch], see: Callable[[str, BranchOutputs], None]) -> Iterator[None]:
    """Forwards inside, in eval mode and without padding, show every call of every cached layer."""
    handles = []
    inputs: dict[GatedBranch, Tensor] = {}

    def keep(layer: GatedBranch, args: tuple) -> None:
        inputs[layer] = args[0]

    def beside_a_host(name: str) -> Callable[[HostBranch, Tensor, Tensor], None]:
        def look(layer: HostBranch, y: Tensor, o_mem: Tensor) -> None:
            see(name, BranchOutputs(_summary(layer, inputs[layer], y), y, o_mem))

        return look

    def of_ours(name: str) -> Callable[[GatedCacheAttention, tuple], None]:
        return lambda layer, args: see(name, _computed(layer, args[0]))

    try:
        for name, layer in layers.items():
            if isinstance(layer, HostBranch):
                handles.append(layer.register_forward_pre_hook(keep))
                layer.observer = beside_a_host(name)
            else:
                handles.append(layer.register_forward_pre_hook(of_ours(name)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in layers.values():
            if isinstance(layer, HostBranch):
                layer.observer = None


def _summary(layer: GatedBranch, x: Tensor, y: Tensor) -> Tensor:
    source = x if layer.grc.source == "input" else y
    return layer.summarised(source[..., : layer.cache_dim], None)[0]


def _computed(layer: GatedCacheAttention, x: Tensor) -> BranchOutputs:
    """What a layer of ours makes of its input [B, T, D], which it mixes head by head without a module to watch."""
    o_self = layer.inner.heads(x, None, None)[0]
    projected = layer.inner.project(o_self)
    summary = _summary(layer, x, projected)
    query = layer.queries(x[..., : layer.cache_dim])
    o_mem = layer.lifted(layer.read(query, layer.current(summary, None)) if layer.moves else layer.frozen(query))
    return BranchOutputs(summary, (o_self if layer.lift is None else projected).flatten(2), o_mem.flatten(2))


def looked_at(model: nn.Module, layers: dict[str, GatedBranch], inputs: Tensor) -> dict[str, BranchOutputs]:
    """The first call of each cached layer in a forward; a layer that was not called is missing."""
    found: dict[str, BranchOutputs] = {}
    with watched(layers, lambda name, seen: found.setdefault(name, seen) and None):
        model(inputs, None)
    return found


def maps(layer: GatedBranch, place: Places, seen: BranchOutputs) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Numbers for explain.json, and the maps of o_self and o_mem [N, h, w]: means over head and channel.

    weight: the size (root mean square) of σ(λ)·o_mem as a share of it and that of (1 − σ(λ))·o_self. correlation:
    Pearson's, of the two maps of each picture. memory_own, self_own: how much of a map's variance
    differs from picture to picture at one place; the rest is one image, whatever the picture.
    """
    both = [place.unfolded(o.float().mean(-1)) for o in (seen.o_self, seen.o_mem)]
    share = torch.sigmoid(layer.mix.detach().float()).repeat_interleave(seen.o_mem.shape[-1] // layer.num_heads)
    own, memory = ((seen.o_self * (1 - share)).square().mean().sqrt(), (seen.o_mem * share).square().mean().sqrt())
    flat = [m.flatten(1) - m.flatten(1).mean(1, keepdim=True) for m in both]
    cosine = F.cosine_similarity(flat[0], flat[1], dim=1)
    numbers = {
        "grid": list(place.grid),
        "weight": float(memory / (own + memory).clamp(min=1e-30)),
        "correlation": rounded(cosine),
        "self_own": _own(both[0]),
        "memory_own": _own(both[1]),
    }
    largest = max(place.grid)
    if largest > MAP:
        height, width = (max(1, round(n * MAP / largest)) for n in place.grid)
        both = [F.adaptive_avg_pool2d(m[:, None], (height, width))[:, 0] for m in both]
    return numbers, both[0], both[1]


def _own(maps: Tensor) -> float | None:
    """Of the variance of maps [N, h, w], the share within a place; None for one picture or a constant."""
    if len(maps) < 2:
        return None
    within = maps.var(0).mean()
    # The mean over N pictures still holds 1/N of what is within.
    between = (maps.mean(0).var() - within / len(maps)).clamp(min=0)
    total = within + between
    return float(within / total) if total > 0 else None


def rounded(values: Tensor) -> Any:
    """As nested lists of four decimals."""
    return values.double().mul(1e4).round().div(1e4).tolist()
