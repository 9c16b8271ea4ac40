"""What the gates and the caches of a model are doing, as numbers for the run's log."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import pytree
from mnemos.attention.gated_walk import Walk
from mnemos.data.batch import Batch
from mnemos.memory.gated_cache import GatedCache, hold_caches, traced
from mnemos.modes import evaluating

from .metrics import fed

_KINDS = ("mean", "saturated")


def probe(model: nn.Module, batch: Batch) -> dict[str, Any] | None:
    """Gate activity on a batch, as in training but with nothing written; None for a model without gated caches.

    {"layers": [{"name", "mix": σ(λ) a head, "update" and "reset": {"mean", "saturated"} (the share of gate values
    below 0.05 or above 0.95; means over the updates, null where there was none), "cache": {"rms", "max", "rank"}}]}.
    The rank is the effective one, exp of the entropy of the singular values' shares: 1 where all slots hold the
    same, min(Tm, Dm) where they hold most.
    Leaves the mode and every random generator as they were.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, GatedCache)]
    if not layers:
        return None
    batch = fed(batch, model)
    with (
        generators.kept(),
        torch.no_grad(),
        evaluating(model, training=True),
        hold_caches(model),
        traced(model) as records,
    ):
        _, state = model(batch.inputs, None, batch.mask)
    # A cache a stream lies in the state, in the order of the layers; the module's own stays empty.
    walks = [w for w in pytree.tree_leaves(state, is_leaf=_is_walk) if _is_walk(w)]
    streams = iter(walks if len(walks) == len(layers) else [])
    found = []
    for name, layer in layers:
        # A causal cache that met no whole block has no gates to tell of.
        record = {key: float(torch.stack(values).mean()) for key, values in records[name].items()}
        gates = {gate: {kind: record.get(f"{gate}_{kind}") for kind in _KINDS} for gate in ("update", "reset")}
        mix = torch.sigmoid(layer.mix.detach()).tolist()
        walk = next(streams, None)
        held = layer.cache[None] if layer.grc.scope == "shared" or walk is None else walk.cache
        found.append({"name": name, "mix": mix, **gates, "cache": _describe(held)})
    return {"layers": found}


def _is_walk(node: Any) -> bool:
    return isinstance(node, Walk)


def _describe(caches: Tensor) -> dict[str, float]:
    """Of caches [rows, Tm, Dm]; the rank is the mean over rows."""
    values = torch.linalg.svdvals(caches.float())
    share = values / values.sum(-1, keepdim=True).clamp(min=1e-30)
    rank = torch.exp(-(share * share.clamp(min=1e-30).log()).sum(-1)) * (values.sum(-1) > 0)
    rms, largest = caches.square().mean().sqrt(), caches.abs().max()
    return {"rms": float(rms), "max": float(largest), "rank": float(rank.mean())}
