"""The gated recurrent cache as a module: gates around a stored cache (stored.py says when it is updated)."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos.libraries import loaded_weights
from mnemos.ops.gated_cache import GateValues, Written, batch_mean, write
from mnemos.types import InputError, check_heads

from .grc import GRC
from .projection import Projection, own_weight
from .stored import (
    StoredCache,
    accumulate_caches,
    begin_forward,
    clear_caches,
    end_forward,
    hold_caches,
    promote,
    recomputing,
    several_processes,
    stored,
)

__all__ = [
    "GatedCache",
    "accumulate_caches",
    "begin_forward",
    "caches",
    "clear_caches",
    "end_forward",
    "hold_caches",
    "promote",
    "recomputing",
    "several_processes",
    "stored",
    "traced",
]


class GatedCache(StoredCache):
    """Base of every gated-cache layer: update_gate, reset_gate, candidate, mix (λ, [H]) and cache [Tm, Dm].

    Dm = ratio·D, rounded down to a multiple of H. Raises InputError unless `grc.length` is one number and Dm ≥ H.
    """

    linear: type[nn.Linear] | type[Projection] = nn.Linear  # the class of its linear maps

    def __init__(self, dim: int, num_heads: int, grc: GRC) -> None:
        check_heads(dim, num_heads)
        if not isinstance(grc.length, int):
            raise InputError(
                f"GRC.length: expected a number of slots for a single layer, found {grc.length!r}; give GRC(length=…)"
            )
        d = int(grc.ratio * dim) // num_heads * num_heads
        if d == 0:
            raise InputError(
                f"GRC.ratio: expected at least one channel for each of {num_heads} heads, found {grc.ratio} of dim "
                f"{dim}; raise it"
            )
        resolved = grc.resolved()
        super().__init__(grc.length, d, learned=resolved.constant)
        self.grc = grc = resolved
        self.writes = grc.write
        self.cache_dim = d
        self.update_gate, self.reset_gate, self.candidate = (self.linear(2 * d, d) for _ in range(3))
        self.candidate_norm = nn.LayerNorm(d) if grc.candidate == "layernorm_gelu" else None
        self.mix = nn.Parameter(torch.full((num_heads,), float(grc.gate_init or 0.0)))
        self.observer_of_gates: Callable[[GateValues], None] | None = None  # called with those of every update

    def update(
        self, source: Tensor, cache: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """C_t [B, Tm, Dm] of tokens `source` [B, T, Dm] (valid where mask [B, T]) and cache [Tm, Dm] or [B, Tm, Dm].

        Computed in float32 under any autocast. A row without a valid token keeps its cache.
        """
        return self.written(source, cache, mask, grid, mean=False).new

    def written(
        self,
        source: Tensor,
        cache: Tensor,
        mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        mean: bool = True,
    ) -> Written:
        """C_t as `update` computes it, with its mean over the rows that have a valid token, and their number."""
        modules, norm = self._gates(), self.candidate_norm
        with loaded_weights(*modules):
            weights: list[Tensor | None] = [w for one in modules for w in (own_weight(one), one.bias)]
        weights += [None, None] if norm is None else []
        # Sharding with mixed precision gathers weights in half precision; the cache keeps its dtype.
        weights = [w if w is None or w.dtype == cache.dtype else w.to(cache.dtype) for w in weights]
        return write(source, cache, weights, mask, self.grc.resample, grid, mean, self.observer_of_gates)

    def batch_mean(self, new: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean [Tm, Dm] of C_t [B, Tm, Dm] over `rows` ([B] bool, None: all), and the number of rows."""
        return batch_mean(new, rows)

    def _gates(self) -> list[Any]:
        """The modules whose weights an update reads without calling them."""
        modules = self.update_gate, self.reset_gate, self.candidate, self.candidate_norm
        return [module for module in modules if module is not None]

    def beside_gates(self, y: Tensor) -> Tensor:
        """y, which no update took part in, with a gradient of zero for the gates.

        Without it they would have none, and DistributedDataParallel would wait for it. No value of a parameter is read.
        """
        if not torch.is_grad_enabled():
            return y
        modules = self._gates()
        with loaded_weights(*modules):
            parameters = [p for one in modules for p in one.parameters() if p.requires_grad]
        return y + torch.stack([p[:0].sum() for p in parameters]).sum().to(y.dtype) if parameters else y

    def read_mean(self, mean: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mean that `read="mean"` attends to, over all processes and with gradient, and its number of rows."""
        if not several_processes():
            return mean, rows
        from torch.distributed.nn.functional import all_reduce  # absent from a torch built without it

        total = all_reduce(mean * rows)
        dist.all_reduce(count := rows.clone())
        return total / count.clamp(min=1), count

    def extra_repr(self) -> str:
        """Slots, width and preset, and whether it is never written."""
        written = "" if self.grc.write else ", constant" if self.grc.constant else ", write=False"
        return f"slots={self.cache.shape[0]}, cache_dim={self.cache_dim}, preset={self.grc.preset!r}{written}"


def caches(model: nn.Module) -> list[GatedCache]:
    """Every gated cache in a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, GatedCache)]


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, dict[str, list[Tensor]]]]:
    """Forwards inside record the gates of each cache, one value per update: {module name: {"update_mean": […], …}}."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, GatedCache)}
    records: dict[str, dict[str, list[Tensor]]] = {name: {} for name in found}
    try:
        for name, cache in found.items():
            cache.observer_of_gates = partial(_record, records[name])
        yield records
    finally:
        for cache in found.values():
            cache.observer_of_gates = None


def _record(record: dict[str, list[Tensor]], gates: GateValues) -> None:
    for name, gate in gates._asdict().items():
        gate = gate.detach()
        record.setdefault(f"{name}_mean", []).append(gate.mean())
        saturated = ((gate < 0.05) | (gate > 0.95)).to(gate.dtype).mean()
        record.setdefault(f"{name}_saturated", []).append(saturated)
