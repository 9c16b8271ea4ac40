"""Readers of what layers keep of earlier tokens: windows of keys and values, and gated recurrent caches."""

from typing import Any

import torch
from torch import Tensor

from mnemos.attention.gated import CacheState, GatedBranch
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.row_caches import BlockState
from mnemos.memory.key_values import KeyValues
from mnemos.ops.gated_cache import resample
from mnemos.types import State

from .memories import Reader, calls_of, distance_moved, nodes, replaced
from .observe import Attended, CacheWritten, Calls, Mixed

REACH = 256  # earlier tokens whose attention received is recorded, of a window that is longer or has no end


class WindowReader(Reader):
    """Keys and values of the last tokens in one layer of softmax attention."""

    kind = "window"
    plural = "keys and values"
    own = ("earlier words of the window",)

    def __init__(self, name: str, title: str, layer: SoftmaxAttention, index: int) -> None:
        super().__init__(f"{title}, window")
        self.module, self.title, self.index = name, title, index
        self.cached = name.removesuffix(".inner") if name.endswith(".inner") else None  # the layer with a gated cache
        self.reach = REACH if layer.window is None else min(REACH, layer.window - 1)
        past = "all earlier tokens" if layer.window is None else f"the last {layer.window - 1:,} tokens"
        self.about = f"The layer attends to the keys and values of {past}."

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        weights = calls_of(calls, self.module, Attended)[-1].weights()[0].mean(0)  # [T, N]
        n = weights.shape[1] - count
        received = torch.zeros(self.reach + count)
        seen = min(n, self.reach)
        received[self.reach - seen :] = weights.mean(0)[n - seen :]
        self.add(received=received)
        parts: tuple[str, ...] = ("this segment", "earlier words of the window")
        lengths = [weights[:, n:].sum(1), weights[:, :n].sum(1)]
        if self.cached is not None:
            own, memory = branches(calls, self.cached)
            parts, lengths = (*parts, "cache"), [*(one * own for one in lengths), memory]
        self.add_shares(self.title, parts, lengths)

    def emptied(self, state: State, unit: int | None) -> State | None:
        """A window without a token, at the same position of the row."""
        windows = nodes(state, KeyValues)
        if unit is not None or self.index >= len(windows):
            return None
        own = windows[self.index]
        return replaced(state, own, KeyValues(own.k, own.v, torch.zeros_like(own.valid), own.seen))


class CacheReader(Reader):
    """A gated recurrent cache: its gates, the tokens its slots took, what was read, and how far each slot moved."""

    kind = "cache"
    plural = "caches"
    own = ("cache",)

    def __init__(self, name: str, title: str, layer: GatedBranch, index: int) -> None:
        super().__init__(f"{title}, cache", [f"slot {i + 1}" for i in range(layer.cache.shape[0])])
        self.about = "An update gate of 0 keeps a slot, 1 replaces it by its candidate."
        if layer.grc.constant:
            self.about = "A constant that was learned: nothing is written to it."
        elif not layer.grc.write:
            self.about = "Every update starts from the stored cache, and not from the update before."
        self.module, self.title, self.layer, self.index = name, title, layer, index

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        k = len(self.units)
        if not isinstance(getattr(self.layer, "inner", None), SoftmaxAttention):  # else the window's reader says it
            self.add_shares(self.title, ("the attention", "cache"), branches(calls, self.module))

        # --- what the updates of the segment did to each slot; a segment of no whole block has none ---
        writes = calls_of(calls, self.module, CacheWritten)
        none = torch.full((k,), torch.nan)
        moved, update, reset, candidate, written = torch.zeros(k), none, none, none, torch.zeros(k, count)
        if writes:
            moved = distance_moved(writes[0].before[0].float(), writes[-1].after[0].float())
            update, reset = (
                torch.stack([getattr(one.gates, gate)[0].float().mean(-1) for one in writes]).mean(0)
                for gate in ("update", "reset")
            )
            steps = [
                (one.after[0] - one.before[0]).float() / one.gates.update[0].float().clamp(min=1e-3) for one in writes
            ]
            candidate = torch.stack(steps).square().mean((0, 2)).sqrt()
            if sum(one.source.shape[1] for one in writes) == count:  # the segment is whole blocks
                written = torch.cat([_weights_of_tokens(one, self.layer.grc.resample) for one in writes], 1)
        self.add(moved=moved, update=update, reset=reset, candidate=candidate, written=written)

        reads = [call.weights()[0].mean(0) for call in calls_of(calls, self.module, Attended)]
        self.add(readers=torch.cat(reads)[-count:] if reads else torch.zeros(count, k))

    def _of_state(self, state: State) -> CacheState | BlockState | None:
        caches: list[Any] = nodes(state, (CacheState, BlockState))
        return caches[self.index] if self.index < len(caches) else None

    def part(self, state: State) -> Tensor | None:
        own = self._of_state(state)
        return None if own is None else own.cache if bool(own.seen[0]) else self.start(state)[None]

    def start(self, state: State) -> Tensor:
        """Zeros, or the stored cache."""
        stored = self.layer.contents()
        zero = isinstance(self._of_state(state), BlockState) and self.layer.grc.scope == "stream"
        return torch.zeros_like(stored) if zero else stored

    def with_part(self, state: State, part: Tensor) -> State:
        own = self._of_state(state)
        assert own is not None
        return replaced(state, own, own._replace(cache=part))


def branches(calls: Calls, name: str) -> list[Tensor]:
    """The lengths [T] that a layer's own branch and its memory's add, along a segment read block by block."""
    own, memory = zip(*calls_of(calls, name, Mixed), strict=True)
    return [torch.cat(own, 1)[0], torch.cat(memory, 1)[0]]


def _weights_of_tokens(write: CacheWritten, method: str) -> Tensor:
    """How much of each slot [K] came from each token [T]: the mean update gate, shared among the tokens it took."""
    t, k = write.source.shape[1], write.after.shape[1]
    eye = torch.eye(t, device=write.source.device)[None]
    return write.gates.update[0].float().mean(-1, keepdim=True) * resample(eye, k, None, method)[0]
