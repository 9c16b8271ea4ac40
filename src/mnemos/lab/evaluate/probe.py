"""Measurements of the gates and contents of gated caches, for a run's metrics.jsonl."""

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import pytree
from mnemos.attention.gated import Walk
from mnemos.lab.tasks.batch import to_model
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.memory.gated_cache import GatedCache, hold_caches, traced
from mnemos.modes import evaluating
from mnemos.types import JSONObject

_KINDS = ("mean", "saturated")


def probe(model: nn.Module, batch: object, task: Task = SUPERVISED) -> JSONObject | None:
    """Measure gate activity on a batch in training mode, without writing; None for a model without gated caches.

    The result is {"layers": [{"name", "mix": σ(λ) per head, "update" and "reset": {"mean", "saturated"}, "cache":
    {"rms", "max", "rank"}}]}. "saturated" is the share of gate values below 0.05 or above 0.95. Gate values are means
    over the updates, and null without an update. "rank" is the effective rank, exp of the entropy of the normalised
    singular values: 1 if all slots are proportional, at most min(Tm, Dm).
    The model's mode and all random generators are restored. Cost: one forward pass and one SVD per layer.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, GatedCache)]
    if not layers:
        return None
    batch = to_model(batch, model)
    with (
        generators.kept(),
        torch.no_grad(),
        evaluating(model, training=True),
        hold_caches(model),
        traced(model) as records,
    ):
        _, state = task.forward(model, batch, None)
    # Caches per stream are in the state, in the order of the layers; the modules' own caches stay empty.
    walks = [w for w in pytree.tree_leaves(state, is_leaf=_is_walk) if _is_walk(w)]
    streams = iter(walks if len(walks) == len(layers) else [])
    found = []
    for name, layer in layers:
        # A causal cache without a complete block made no update, so there are no gate values.
        record = {key: float(torch.stack(values).mean()) for key, values in records[name].items()}
        gates = {gate: {kind: record.get(f"{gate}_{kind}") for kind in _KINDS} for gate in ("update", "reset")}
        mix = torch.sigmoid(layer.mix.detach()).tolist()
        walk = next(streams, None)
        contents = layer.cache[None] if layer.grc.scope == "shared" or walk is None else walk.cache
        found.append({"name": name, "mix": mix, **gates, "cache": _describe(contents)})
    return {"layers": found}


def _is_walk(node: object) -> bool:
    return isinstance(node, Walk)


def _describe(caches: Tensor) -> dict[str, float]:
    """Root mean square, maximum and effective rank of caches [rows, Tm, Dm]; the rank is the mean over rows."""
    values = torch.linalg.svdvals(caches.float())
    share = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    rank = torch.exp(-(share * share.clamp(min=1e-30).log()).sum(-1)) * (values.sum(-1) > 0)
    rms, largest = caches.square().mean().sqrt(), caches.abs().max()
    return {"rms": float(rms), "max": float(largest), "rank": float(rank.mean())}
