"""The sums of linear attentions by their strongest directions: what words add to them and read from them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mnemos.attention.recurrent import RecurrentSums
from mnemos.hosts.linearised import Linearised, LinearisedState
from mnemos.ops.linear import LinearState
from mnemos.types import State

from .memories import Kind, Reader, last, nodes, replaced
from .observe import Calls, Summed, Windowed

DIRECTIONS = 3  # of each head's sum; 1 of more than 8 heads


class SumsReader(Reader):
    """The sums of one layer of linear attention, by the strongest directions of each head's S (singular vectors).

    S = Σ_t φ(k_t) v_tᵀ = Σ_i σ_i u_i w_iᵀ, so σ_i = Σ_t (u_i·φ(k_t)) (v_t·w_i): the share of a token in a direction.
    """

    kind: ClassVar[Kind] = "sums"
    all_of_kind = "sums"
    about = "Each head keeps one matrix, of which the strongest directions are shown."

    def __init__(self, name: str, title: str, heads: int, place: int) -> None:
        count = DIRECTIONS if heads <= 8 else 1
        units = [f"head {h + 1}, direction {i + 1}" for h in range(heads) for i in range(count)]
        super().__init__(f"{title}, sums", units)
        self.module, self.title, self.heads, self.count, self.place = name, title, heads, count, place

    def sums(self, state: State) -> Any:
        """The layer's sums in a state."""
        found = nodes(state, LinearState)
        return found[self.place] if found else None

    def matrix(self, part: Any) -> Tensor:
        """S [H, D, M]."""
        s: Tensor = part.s[0]
        return s

    def directions(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u [H, r, D], σ [H, r], w [H, r, M]."""
        u, sigma, w = torch.linalg.svd(s.double(), full_matrices=False)
        r = self.count
        return u[..., :r].mT.float(), sigma[:, :r].float(), w[:, :r].float()

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        new = self.matrix(self.sums(after))
        u, sigma, w = self.directions(new)
        call = last(calls, self.module, Summed)
        assert call is not None
        k, v, q = (x[0].float().transpose(0, 1) for x in (call.k, call.v, call.q))  # [H, T, ·]
        loads = (k @ u.mT) * (v @ w.mT) / sigma[:, None].clamp(min=1e-12)  # [H, T, r]
        old = self.sums(before) if before is not None else None
        own = ((q @ k.mT).tril()).sum(-1)  # [H, T]
        if old is None:
            moved, readers = torch.full_like(sigma, torch.nan), torch.zeros(count, len(self.units))
            earlier = torch.zeros_like(own)
        else:
            u0, sigma0, w0 = self.directions(self.matrix(old))
            moved = 1 - (u0 * u).sum(-1).abs() * (w0 * w).sum(-1).abs()
            readers = _read_directions(q @ self.matrix(old).float(), q, u0, sigma0)
            earlier = (q * old.z[0].float()[:, None]).sum(-1)
        self.put(moved=moved.flatten(), strength=sigma.flatten(), readers=readers)
        self.put(written=loads.abs().clamp(max=1).transpose(1, 2).flatten(0, 1))
        self.put_shares(0, self.title, ("this segment", "sums of earlier segments"), [own.mean(0), earlier.mean(0)])

    def with_matrix(self, state: State, s: Tensor, heads: Sequence[int] = ()) -> State:
        """The state with another S [1, H, D, M], and with z = 0 in some heads."""
        part = self.sums(state)
        z = part.z.clone()
        z[:, list(heads)] = 0
        return replaced(state, part, part._replace(s=s, z=z))

    def emptied(self, state: State, unit: int | None) -> State | None:
        """S without one of its directions, or S = 0 and z = 0."""
        if (part := self.sums(state)) is None or not self.matrix(part).shape[-2]:
            return None
        s = self.matrix(part)[None].clone()
        if unit is None:
            return self.with_matrix(state, torch.zeros_like(s), range(self.heads))
        h = unit // self.count
        s[0, h] -= self._direction(s[0], unit)
        return self.with_matrix(state, s)

    def alone(self, state: State, unit: int) -> State | None:
        """S of one direction alone, and the other heads' S and z as 0."""
        if (part := self.sums(state)) is None or not self.matrix(part).shape[-2]:
            return None
        head, s = unit // self.count, torch.zeros_like(self.matrix(part)[None])
        s[0, head] = self._direction(self.matrix(part), unit)
        return self.with_matrix(state, s, [h for h in range(self.heads) if h != head])

    def _direction(self, s: Tensor, unit: int) -> Tensor:
        u, sigma, w = self.directions(s)
        h, i = divmod(unit, self.count)
        return (sigma[h, i] * torch.outer(u[h, i], w[h, i])).to(s.dtype)

    def groups(self, state: State) -> dict[str, State]:
        """One head's S and z as 0."""
        if (part := self.sums(state)) is None or not self.matrix(part).shape[-2]:
            return {}
        found = {}
        for h in range(self.heads):
            s = self.matrix(part)[None].clone()
            s[:, h] = 0
            found[f"{self.name}: head {h + 1}"] = self.with_matrix(state, s, [h])
        return found


def _read_directions(answer: Tensor, q: Tensor, u: Tensor, sigma: Tensor) -> Tensor:
    """The length of each direction's part in what tokens read, as a share of all that they read: [T, H·r].

    answer [H, T, M] = φ(q)·S. Heads have equal weight.
    """
    parts = (q @ u.mT).abs() * sigma[:, None]  # [H, T, r]
    share = parts / answer.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return (share.clamp(max=1) / len(q)).permute(1, 0, 2).flatten(1)


class LinearisedReader(SumsReader):
    """A linearised attention of a decoder: its window, its sinks, and the sums of the words between."""

    def __init__(self, name: str, title: str, layer: Linearised, heads: int, place: int) -> None:
        super().__init__(name, title, heads, place)
        self.layer, self.offset = layer, layer.settings.window

    def sums(self, state: State) -> Any:
        """The window's state of the layer."""
        found = nodes(state, LinearisedState)
        return found[self.place].window if found else None

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        call = last(calls, self.module, Windowed)
        assert call is not None
        part = self.sums(after)
        names = ("this segment", "earlier words of the window", "first words", "sums of the words between")
        self.put_shares(0, self.title, names, _masses(self.layer, call))
        if not part.s.shape[-2]:  # state="none"
            self.put(moved=torch.zeros(0))
            return
        u, sigma, w = self.directions(self.matrix(part))
        far = self.layer.far()
        assert far is not None
        old = None if before is None else self.sums(before)
        loads = torch.zeros(len(self.units), count)
        moved, readers = torch.full_like(sigma, torch.nan), torch.zeros(count, len(self.units))
        if old is not None:
            u0, sigma0, w0 = self.directions(self.matrix(old))
            moved = 1 - (u0 * u).sum(-1).abs() * (w0 * w).sum(-1).abs()
            if (
                far.beta is None
                and int(old.seen) >= call.tokens.sizes.window + call.tokens.sizes.sinks
                and count <= call.tokens.sizes.window
            ):
                left = slice(0, count)  # the words that left the window in this call
                raw = old.raw if old.raw.shape[-1] else old.k
                k, v = far.key(raw[:, :, left].float())[0], old.v[0, :, left].float()
                later = torch.arange(count - 1, -1, -1, device=k.device)  # words that leave after each
                k = k * torch.exp(far.decay * later)[:, None]
                found = (k @ u.mT) * (v @ w.mT) / sigma[:, None].clamp(min=1e-12)
                loads = found.abs().clamp(max=1).transpose(1, 2).flatten(0, 1)
            unrotated = call.tokens.unrotated if self.layer.raw else None
            q = call.tokens.q if unrotated is None else unrotated[0]
            group = q.shape[1] // self.heads
            features = far.query(q.float())[0].unflatten(0, (self.heads, group)).mean(1)
            readers = _read_directions(features @ self.matrix(old).float(), features, u0, sigma0)
        self.put(moved=moved.flatten(), strength=sigma.flatten(), readers=readers, written=loads)

    def with_matrix(self, state: State, s: Tensor, heads: Sequence[int] = ()) -> State:
        """See the base class."""
        part = self.sums(state)
        z = part.z.clone()
        z[:, list(heads)] = 0
        return replaced(state, part, part._replace(s=s, z=z))


def _masses(layer: Linearised, call: Windowed) -> list[Tensor]:
    """The weights of this call's words, of the window's earlier ones, of the sinks and of the sums, [T] each.

    Means over heads of the terms of the common denominator (`mnemos.ops.window_state`). The sinks that have left the
    window are met by the query at its own position here, where the layer lets it meet them at the window's end. With
    the delta rule, the sums are those before the call.
    """
    tokens, state = call.tokens, None if call.state is None else call.state.window
    q, own, sizes = tokens.q[0].float(), tokens.k[0].float(), tokens.sizes
    raw_q, raw_k = (tokens.unrotated if layer.raw else None) or (tokens.q, tokens.k)
    features, keys = raw_k[0].float(), own
    seen = held = 0
    if state is not None:
        seen = int(state.seen)
        held = min(seen, sizes.window)
        past = state.k.shape[2] - held
        keys = torch.cat([state.k[0, :, past:].float(), own], 1)
        old = state.raw if state.raw.shape[-1] else state.k
        features = torch.cat([old[0, :, past:].float(), features], 1)
    group, t, w = q.shape[0] // own.shape[0], q.shape[1], sizes.window

    def score(those: Tensor) -> Tensor:
        found = q @ those.repeat_interleave(group, 0).mT * sizes.scale
        return found if sizes.softcap is None else sizes.softcap * torch.tanh(found / sizes.softcap)

    number = torch.arange(held + t, device=q.device) + seen - held  # of each key in the row
    distance = torch.arange(held, held + t, device=q.device)[:, None] - torch.arange(held + t, device=q.device)
    near, left = (distance >= 0) & (distance < w), distance >= w
    scores = score(keys).masked_fill(~(near | (left & (number < sizes.sinks))), -torch.inf)
    kept = min(sizes.sinks, seen - held)  # sinks that had left before the call
    sinks = score(state.sink_k[0, :, :kept].float()) if state is not None and kept else q.new_zeros(len(q), t, 0)
    top = torch.cat([scores, sinks], -1).amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    first = torch.exp(sinks - top).sum(-1) + weights.masked_fill(near, 0).sum(-1)
    weights = weights.masked_fill(~near, 0)
    far = torch.zeros_like(first)
    if (maps := layer.far()) is not None:
        mapped, gone = maps.query(raw_q.float())[0], left & (number >= sizes.sinks)  # what left the window in this call
        if state is not None:
            far = (mapped * state.z[0].float().repeat_interleave(group, 0)[:, None]).sum(-1)
            far = far * torch.exp(maps.decay * gone.sum(-1))
        if maps.beta is None:
            kernel = mapped @ maps.key(features[None])[0].repeat_interleave(group, 0).mT
            kernel = kernel * torch.exp(maps.decay * (distance - w).clamp(min=0))
            far = far + kernel.masked_fill(~gone, 0).sum(-1)
        far = maps.gamma.float()[:, None] * far.clamp(min=0)
    masses = torch.stack([weights[..., held:].sum(-1), weights[..., :held].sum(-1), first, far])
    return list((masses / masses.sum(0)).mean(1))


class RecurrentReader(SumsReader):
    """The sums of a layer that decays or corrects them: their directions alone, without the words' shares."""

    def sums(self, state: State) -> Any:
        """The layer's sums."""
        found = nodes(state, RecurrentSums)
        return found[self.place] if found else None

    def matrix(self, part: Any) -> Tensor:
        """S [H, D, M]."""
        s: Tensor = part.sums[0]
        return s

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        u, sigma, w = self.directions(self.matrix(self.sums(after)))
        moved = torch.full_like(sigma, torch.nan)
        if before is not None:
            u0, _, w0 = self.directions(self.matrix(self.sums(before)))
            moved = 1 - (u0 * u).sum(-1).abs() * (w0 * w).sum(-1).abs()
        self.put(moved=moved.flatten(), strength=sigma.flatten())

    def with_matrix(self, state: State, s: Tensor, heads: Sequence[int] = ()) -> State:
        """See the base class."""
        part = self.sums(state)
        return replaced(state, part, part._replace(sums=s))
