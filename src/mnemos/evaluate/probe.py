"""What the gates and the caches of a model are doing, as numbers for the run's log."""

from typing import Any

import torch
from torch import Tensor, nn

from mnemos.data.batch import Batch
from mnemos.memory.gated_cache import GatedCache, hold, traced

from .metrics import evaluating, to_device

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
    device = next(model.parameters()).device
    batch = to_device(batch, device)
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        evaluating(model, training=True),
        hold(model),
        traced(model) as records,
    ):
        model(batch.inputs, None, batch.mask)
    found = []
    for name, layer in layers:
        # A causal cache that met no whole block has no gates to tell of.
        record = {key: float(torch.stack(values).mean()) for key, values in records[name].items()}
        gates = {gate: {kind: record.get(f"{gate}_{kind}") for kind in _KINDS} for gate in ("update", "reset")}
        mix = torch.sigmoid(layer.mix.detach()).tolist()
        found.append({"name": name, "mix": mix, **gates, "cache": _describe(layer.cache)})
    return {"layers": found}


def _describe(cache: Tensor) -> dict[str, float]:
    values = torch.linalg.svdvals(cache.float())
    share = values / values.sum().clamp(min=1e-30)
    rank = torch.exp(-(share * share.clamp(min=1e-30).log()).sum()) if values.sum() > 0 else torch.zeros(())
    return {"rms": float(cache.square().mean().sqrt()), "max": float(cache.abs().max()), "rank": float(rank)}
