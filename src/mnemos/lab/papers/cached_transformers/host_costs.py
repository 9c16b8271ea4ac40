"""Costs of the paper's models at their real size, with and without a cache: counted in full and as the paper counts.

G is 10⁹ multiply-adds per sample; the paper calls them FLOPs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mnemos import registry
from mnemos.hosts.attach import cache, uncache
from mnemos.lab.measure.flops import flops_by_operation
from mnemos.lab.vision.classifiers import ImageConfig
from mnemos.memory.grc import GRC

# The paper's names, and the recipes of the same models at their real size; "-cached" selects the cached variant.
RECIPES = {
    "ViT-S": "imagenet-vit-s",
    "PVT-Tiny": "imagenet-pvt-tiny",
    "PVT-Small": "imagenet-pvt-small",
    "PVT-Medium": "imagenet-pvt-medium",
    "Swin-T": "imagenet-swin-t",
    "PVTv2-B2": "imagenet-pvt-v2-b2",
    "PVTv2-B3": "imagenet-pvt-v2-b3",
    "PVTv2-B4": "imagenet-pvt-v2-b4",
    "Swin-T, 22k": "imagenet-22k-swin-t",
}
_ATTENTION = ("bmm", "baddbmm", "_scaled_dot_product")  # products of two activations
_KEPT: dict[tuple[str, GRC | None], "Cost"] = {}


class Cost(NamedTuple):
    """The cost of one model: parameters, and G of a forward pass in training and in evaluation.

    added: G that a cache adds to a forward pass in training, by the formula of `ops.gated_cache.cost`. papers: G of a
    forward pass in training in the paper's convention, without attention products (of queries with keys, and of weights
    with values). It counts this library's module, so it may differ from the paper's table.
    """

    parameters: int
    training: float
    inference: float
    added: float
    papers: float


def config(name: str) -> ImageConfig:
    """The configuration of one of the paper's models, without a cache."""
    return replace(registry.load("recipe", RECIPES[name])().model, cache=None)


def costs(name: str, grcs: Sequence[GRC]) -> list[Cost]:
    """The costs of a model without a cache and with each cache in `grcs`. It is built once and runs one image each."""
    wanted = [None, *grcs]
    if any((name, grc) not in _KEPT for grc in wanted):
        made = config(name)
        model, x = made.build(), torch.zeros(1, made.channels, made.image, made.image)
        training, inference, papers = _count(model, x)
        _KEPT[name, None] = Cost(_parameters(model), training, inference, 0.0, papers)
        for grc in grcs:
            report = cache(model.host, grc)
            training, inference, papers = _count(model, x)
            _KEPT[name, grc] = Cost(_parameters(model), training, inference, report.flops / 2e9, papers)
            uncache(model.host)
    return [_KEPT[name, grc] for grc in wanted]


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def _count(model: torch.nn.Module, x: torch.Tensor) -> tuple[float, float, float]:
    """G of a forward pass in training and in evaluation, and in training without attention products."""
    found = flops_by_operation(lambda: model.train()(x))
    model.eval()(x)  # a frozen cache's keys and values are projected once
    inference = flops_by_operation(lambda: model(x))
    apart = sum(n for operation, n in found.items() if operation.startswith(_ATTENTION))
    return sum(found.values()) / 2e9, sum(inference.values()) / 2e9, (sum(found.values()) - apart) / 2e9
