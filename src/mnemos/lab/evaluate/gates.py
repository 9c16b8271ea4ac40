"""Measurements of the gates and contents of gated caches, for a run's metrics.jsonl."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from mnemos import generators
from mnemos._compat import pytree
from mnemos.lab.tasks.batch import to_model
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.memory.gated_cache import GatedCache, hold_caches, traced
from mnemos.memory.row_blocks import CacheState
from mnemos.modes import in_mode
from mnemos.types import JSONObject

from .records import to_json


@dataclass(frozen=True)
class Gate:
    """The values of a gate: their mean, and the share below 0.05 or above 0.95; NaN without an update."""

    mean: float = math.nan
    saturated: float = math.nan


@dataclass(frozen=True)
class Contents:
    """A cache: root mean square, maximum and effective rank.

    The effective rank is exp of the entropy of the normalised singular values: 1 if all slots are proportional, at most
    min(Tm, Dm).
    """

    rms: float = math.nan
    max: float = math.nan
    rank: float = math.nan


@dataclass(frozen=True)
class LayerGates:
    """A layer with a gated cache: σ(λ) per head, its gates, its cache."""

    name: str
    mix: tuple[float, ...] = ()
    update: Gate = Gate()
    reset: Gate = Gate()
    cache: Contents = Contents()


@dataclass(frozen=True)
class Gates:
    """The values of a line of metrics.jsonl of kind "gates"."""

    layers: tuple[LayerGates, ...]


def measure_gates(model: nn.Module, batch: object, task: Task = SUPERVISED) -> JSONObject | None:
    """Measure gate activity on a batch in training mode, without writing: the JSON of `Gates`, or None without gated
    caches.

    Gate values are means over the updates. Cost: one forward pass and one SVD per layer.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, GatedCache)]
    if not layers:
        return None
    batch = to_model(batch, model)
    with (
        generators.preserve(),
        torch.no_grad(),
        in_mode(model, training=True),
        hold_caches(model),
        traced(model) as records,
    ):
        _, state = task.forward(model, batch, None)
    # Caches per stream are in the state, in the order of the layers; the modules' own caches stay empty.
    leaves = pytree.tree_leaves(state, is_leaf=lambda node: isinstance(node, CacheState))
    streams = [node for node in leaves if isinstance(node, CacheState)]
    measured = []
    for i, (name, layer) in enumerate(layers):
        # A causal cache without a complete block made no update, so there are no gate values.
        means = {key: float(torch.stack(values).mean()) for key, values in records[name].items()}
        update, reset = (
            Gate(*(means.get(f"{gate}_{of}", math.nan) for of in ("mean", "saturated"))) for gate in ("update", "reset")
        )

        # --- its cache [rows, Tm, Dm]; the rank is the mean over rows ---
        per_stream = layer.grc.scope != "shared" and len(streams) == len(layers)
        cache = (streams[i].cache if per_stream else layer.cache[None]).detach()  # a constant is a parameter
        singular = torch.linalg.svdvals(cache.float())
        share = singular / singular.sum(-1, keepdim=True).clamp(min=1e-30)
        rank = torch.exp(-(share * share.clamp(min=1e-30).log()).sum(-1)) * (singular.sum(-1) > 0)
        contents = Contents(float(cache.square().mean().sqrt()), float(cache.abs().max()), float(rank.mean()))
        measured.append(LayerGates(name, tuple(torch.sigmoid(layer.mix.detach()).tolist()), update, reset, contents))
    return dict(to_json(Gates(tuple(measured))))
