"""The gated recurrent cache as a module: gates around a stored cache (stored.py says when it is updated)."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos.ops.gated_cache import GateWeights, gated_update, places, resample
from mnemos.types import InputError, check_heads

from .grc import GRC
from .projection import Projection
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
        super().__init__(grc.length, d)
        self.grc = grc = grc.resolved()
        self.writes = grc.write
        self.cache_dim = d
        self.update_gate, self.reset_gate, self.candidate = (self.linear(2 * d, d) for _ in range(3))
        self.candidate_norm = nn.LayerNorm(d) if grc.candidate == "layernorm_gelu" else None
        self.mix = nn.Parameter(torch.full((num_heads,), float(grc.gate_init or 0.0)))
        self.trace: dict[str, list[Tensor]] | None = None

    def update(
        self, source: Tensor, cache: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """C_t [B, Tm, Dm] of tokens `source` [B, T, Dm] (valid where mask [B, T]) and cache [Tm, Dm] or [B, Tm, Dm].

        Computed in float32 under any autocast. A row without a valid token keeps its cache.
        """
        tokens, length, takes = source.shape[1], cache.shape[-2], None
        fits = not torch.compiler.is_exporting() and tokens in (0, length)  # an exported program has one form for all T
        if mask is None and self.grc.resample == "nearest" and not fits:
            takes = places(
                tokens, length, source.device
            )  # the backward resamples again, which saves keeping the result
        else:
            source = resample(source.to(cache.dtype), length, mask, self.grc.resample, grid)
        written = None if mask is None else mask.any(1)[:, None, None]
        if written is not None:
            source = torch.where(written, source, 0)  # padding may hold anything, also NaN in the backward

        def weights(module: nn.Linear | Projection | nn.LayerNorm) -> tuple[Tensor, Tensor]:
            # Sharding with mixed precision gathers weights in half precision; the cache keeps its dtype.
            return module.weight.to(cache.dtype), module.bias.to(cache.dtype)

        new, gates = gated_update(
            source,
            cache,
            update=weights(self.update_gate),
            reset=weights(self.reset_gate),
            candidate=weights(self.candidate),
            norm=None if self.candidate_norm is None else weights(self.candidate_norm),
            places=takes,
        )
        if written is not None:
            new = torch.where(written, new, cache)
        if self.trace is not None:
            self._record(gates)
        return new

    def _record(self, gates: GateWeights) -> None:
        assert self.trace is not None
        for name, gate in gates._asdict().items():
            gate = gate.detach()
            self.trace.setdefault(f"{name}_mean", []).append(gate.mean())
            saturated = ((gate < 0.05) | (gate > 0.95)).to(gate.dtype).mean()
            self.trace.setdefault(f"{name}_saturated", []).append(saturated)

    def batch_mean(self, new: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean [Tm, Dm] of C_t [B, Tm, Dm] over `rows` ([B] bool, None: all), and the number of rows."""
        if rows is None:
            return new.mean(0), torch.full((), new.shape[0], dtype=new.dtype, device=new.device)
        share = rows.to(new.dtype)
        count = share.sum()
        return torch.einsum("b,btd->td", share, new) / count.clamp(min=1), count

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
        written = "" if self.grc.write else ", write=False"
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
            cache.trace = records[name]
        yield records
    finally:
        for cache in found.values():
            cache.trace = None
