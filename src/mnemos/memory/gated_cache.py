"""The gated recurrent cache as a module: its gates around a stored cache (see `stored` for when it is committed)."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos.ops.gated_cache import GateWeights, gated_update, places, resample
from mnemos.types import InputError, check_heads

from .grc import GRC
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
    """What every gated-cache layer has: update_gate, reset_gate, candidate, mix (λ, [H]) and cache [Tm, Dm].

    Dm = ratio·D rounded down to a multiple of H. `grc.length` must be one number here.
    """

    def __init__(self, dim: int, num_heads: int, grc: GRC) -> None:
        check_heads(dim, num_heads)
        if not isinstance(grc.length, int):
            raise InputError(f"a single layer needs GRC(length=<number of slots>), found length={grc.length!r}")
        d = int(grc.ratio * dim) // num_heads * num_heads
        if d == 0:
            raise InputError(
                f"ratio {grc.ratio} of width {dim} leaves no channel for each of {num_heads} heads; raise it"
            )
        super().__init__(grc.length, d)
        self.grc = grc = grc.resolved()
        self.writes = grc.write
        self.cache_dim = d
        self.update_gate, self.reset_gate, self.candidate = (nn.Linear(2 * d, d) for _ in range(3))
        self.candidate_norm = nn.LayerNorm(d) if grc.candidate == "layernorm_gelu" else None
        self.mix = nn.Parameter(torch.full((num_heads,), float(grc.gate_init or 0.0)))
        self.trace: dict[str, list[Tensor]] | None = None

    def update(
        self, source: Tensor, cache: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """C_t [B, Tm, Dm] of tokens `source` [B, T, Dm] (valid where mask [B, T]) and cache [Tm, Dm] or [B, Tm, Dm].

        In float32, whatever autocast says. A row without a valid token keeps its cache.
        """
        tokens, length, takes = source.shape[1], cache.shape[-2], None
        if mask is None and self.grc.resample == "nearest" and tokens not in (0, length):
            takes = places(tokens, length, source.device)  # again in the backward, rather than kept
        else:
            source = resample(source.to(cache.dtype), length, mask, self.grc.resample, grid)
        written = None if mask is None else mask.any(1)[:, None, None]
        if written is not None:
            source = torch.where(written, source, 0)  # whatever padding holds, also in the backward

        def weights(module: nn.Linear | nn.LayerNorm) -> tuple[Tensor, Tensor]:
            # Sharding with mixed precision lends them in half precision, and the cache as it is.
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
        """The mean [Tm, Dm] of C_t [B, Tm, Dm] over the rows that count ([B] bool, None: all), and how many."""
        if rows is None:
            return new.mean(0), torch.full((), new.shape[0], dtype=new.dtype, device=new.device)
        share = rows.to(new.dtype)
        count = share.sum()
        return torch.einsum("b,btd->td", share, new) / count.clamp(min=1), count

    def read_mean(self, mean: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The batch mean that `read="mean"` attends to, over all processes, differentiably, and its rows."""
        if not several_processes():
            return mean, rows
        from torch.distributed.nn.functional import all_reduce  # only where torch is built with it

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
    """Forwards inside record each cache's gate activity, a value an update: {module name: {"update_mean": […], …}}."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, GatedCache)}
    records: dict[str, dict[str, list[Tensor]]] = {name: {} for name in found}
    try:
        for name, cache in found.items():
            cache.trace = records[name]
        yield records
    finally:
        for cache in found.values():
            cache.trace = None
