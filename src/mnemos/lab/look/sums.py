"""Readers of the sums of linear attentions, by their strongest directions: what words add to them and read."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mnemos.attention.recurrent import RecurrentSums
from mnemos.hosts.linearised import Linearised, LinearisedState
from mnemos.ops.linear import LinearState
from mnemos.types import State

from .memories import Reader, calls_of, nodes, replaced
from .observe import Calls, Summed, Windowed

DIRECTIONS = 3  # of each head's sum; 1 of more than 8 heads


class Terms(NamedTuple):
    """What a segment asked of the sums before it, φ(q) [H, T, D], and added to them, φ(k) [H, T, D] and v [H, T, M]."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None


class SumsReader(Reader):
    """The sums of one layer of linear attention, by the strongest directions of each head's S (singular vectors).

    S = Σ_t φ(k_t) v_tᵀ = Σ_i σ_i u_i w_iᵀ, so σ_i = Σ_t (u_i·φ(k_t)) (v_t·w_i): the share of a token in a direction.
    """

    kind = "sums"
    plural = "sums"
    own = ("sums of earlier segments",)
    about = "Each head keeps one matrix, of which the strongest directions are shown."
    of: ClassVar[type] = LinearState  # the part of a state that has them, and their field in it
    field: ClassVar[str] = "s"

    def __init__(self, name: str, title: str, layer: Any, index: int) -> None:
        super().__init__(f"{title}, sums")  # the first read names the units: layers do not say how many heads they have
        self.module, self.title, self.index = name, title, index

    def sums(self, state: State) -> Any:
        every: list[Any] = nodes(state, self.of)
        return every[self.index] if every else None

    def matrix(self, sums: Any) -> Tensor:
        s: Tensor = getattr(sums, self.field)[0]
        return s

    def numbers(self, heads: int) -> Sequence[int]:
        """What so many heads are called, from 1 on."""
        return range(1, heads + 1)

    def with_matrix(self, state: State, s: Tensor, heads: Sequence[int] = ()) -> State:
        """The state with another S [H, D, M], and with z = 0 in some heads, where it has one."""
        sums = self.sums(state)
        new = {self.field: s[None]}
        if hasattr(sums, "z"):
            new["z"] = sums.z.clone()
            new["z"][:, list(heads)] = 0
        return replaced(state, sums, sums._replace(**new))

    def terms(self, calls: Calls, old: Any, count: int) -> Terms | None:
        """What the segment asked and added, with its shares kept; None: not known. old: the sums before, or None."""
        call = calls_of(calls, self.module, Summed)[-1]
        q, k, v = (x[0].float().transpose(0, 1) for x in (call.q, call.k, call.v))
        own = ((q @ k.mT).tril()).sum(-1)  # [H, T]
        earlier = torch.zeros_like(own) if old is None else (q * old.z[0].float()[:, None]).sum(-1)
        self.add_shares(self.title, ("this segment", "sums of earlier segments"), [own.mean(0), earlier.mean(0)])
        return Terms(q, k, v)

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        old = None if before is None else self.sums(before)
        terms = self.terms(calls, old, count)
        s = self._s(after)
        if s is None:  # a linearised layer of a window alone, or sums that are no part of the model's state
            self.add(moved=torch.zeros(0))
            return
        u, sigma, w = directions(s)
        heads, r = sigma.shape
        self.units = tuple(f"head {h}, direction {i + 1}" for h in self.numbers(heads) for i in range(r))
        moved, readers = torch.full_like(sigma, torch.nan), torch.zeros(count, len(self.units))
        if old is not None:
            u0, sigma0, w0 = directions(self.matrix(old))
            moved = 1 - (u0 * u).sum(-1).abs() * (w0 * w).sum(-1).abs()
        self.add(moved=moved.flatten(), strength=sigma.flatten())
        if terms is None:
            return

        # --- the share of each token in a direction, and of each direction in what a token read ---
        written = torch.zeros(len(self.units), count)
        if terms.k is not None and terms.v is not None:
            loads = (terms.k @ u.mT) * (terms.v @ w.mT) / sigma[:, None].clamp(min=1e-12)  # [H, T, r]
            written = loads.abs().clamp(max=1).transpose(1, 2).flatten(0, 1)
        if old is not None:
            answer = terms.q @ self.matrix(old).float()  # [H, T, M]
            parts = (terms.q @ u0.mT).abs() * sigma0[:, None]  # [H, T, r]
            share = (parts / answer.norm(dim=-1, keepdim=True).clamp(min=1e-12)).clamp(max=1)
            readers = (share / heads).permute(1, 0, 2).flatten(1)  # heads have equal weight
        self.add(written=written, readers=readers)

    def _s(self, state: State) -> Tensor | None:
        sums = self.sums(state)
        return None if sums is None or not self.matrix(sums).shape[-2] else self.matrix(sums).clone()

    def emptied(self, state: State, unit: int | None) -> State | None:
        if (s := self._s(state)) is None:
            return None
        if unit is None:
            return self.with_matrix(state, torch.zeros_like(s), range(len(s)))
        head, direction = _direction(s, unit)
        s[head] -= direction
        return self.with_matrix(state, s)

    def alone(self, state: State, unit: int) -> State | None:
        """S of one direction alone, and the other heads' S and z as 0."""
        s = self.matrix(self.sums(state))
        head, direction = _direction(s, unit)
        alone = torch.zeros_like(s)
        alone[head] = direction
        return self.with_matrix(state, alone, [h for h in range(len(s)) if h != head])

    def groups(self, state: State) -> dict[str, State]:
        states: dict[str, State] = {}
        if (whole := self._s(state)) is not None:
            for h, number in enumerate(self.numbers(len(whole))):
                s = whole.clone()
                s[h] = 0
                states[f"{self.name}: head {number}"] = self.with_matrix(state, s, [h])
        return states


def directions(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The strongest of each head: u [H, r, D], σ [H, r], w [H, r, M]."""
    u, sigma, w = torch.linalg.svd(s.double(), full_matrices=False)
    r = DIRECTIONS if len(s) <= 8 else 1
    return u[..., :r].mT.float(), sigma[:, :r].float(), w[:, :r].float()


def _direction(s: Tensor, unit: int) -> tuple[int, Tensor]:
    """The head of a unit, and its part [D, M] of that head's S."""
    u, sigma, w = directions(s)
    h, i = divmod(unit, sigma.shape[1])
    return h, (sigma[h, i] * torch.outer(u[h, i], w[h, i])).to(s.dtype)


class RecurrentReader(SumsReader):
    """The sums of a layer that decays or corrects them: their directions alone, without the words' shares."""

    of, field = RecurrentSums, "sums"

    def terms(self, calls: Calls, old: Any, count: int) -> Terms | None:
        return None


class LinearisedReader(SumsReader):
    """A linearised attention of a decoder: its window, its sinks, and the sums of the words between."""

    own = ("sums of the words between",)

    def __init__(self, name: str, title: str, layer: Linearised, index: int) -> None:
        super().__init__(name, title, layer, index)
        self.layer, self.offset = layer, layer.settings.window
        if layer.settings.state == "none":
            self.name, self.own = f"{title}, window", ("earlier words of the window",)
            self.about = "The layer keeps the keys and values of its last words alone, and of its first ones."
        if layer.full_heads:
            named = ", ".join(str(head + 1) for head in layer.full_heads)
            self.about += f" Not its key heads {named}: these keep all words and are not shown."

    def numbers(self, heads: int) -> Sequence[int]:
        return [head + 1 for head in self.layer.far_heads]

    def sums(self, state: State) -> Any:
        every = nodes(state, LinearisedState)
        return every[self.index].window if every else None

    def terms(self, calls: Calls, old: Any, count: int) -> Terms | None:
        call = calls_of(calls, self.module, Windowed)[-1]
        parts = ("this segment", "earlier words of the window", "first words", "sums of the words between")
        self.add_shares(self.title, parts, _shares(self.layer, call))
        if (far := self.layer.far()) is None:
            return None
        unrotated, sizes = call.tokens.unrotated if self.layer.raw else None, call.tokens.sizes
        q, heads = call.tokens.q if unrotated is None else unrotated[0], call.tokens.k.shape[1]
        features = far.query(q.float())[0].unflatten(0, (heads, q.shape[1] // heads)).mean(1)
        full = old is not None and int(old.seen) >= sizes.window + sizes.sinks and count <= sizes.window
        if not full or far.beta is not None:
            return Terms(features, None, None)
        # The words that left the window in this call, each decayed by those that left after it.
        raw = old.raw if old.raw.shape[-1] else old.k
        k = far.key(raw[:, :, :count].float())[0]
        later = torch.arange(count - 1, -1, -1, device=k.device)
        return Terms(features, k * torch.exp(far.decay * later)[:, None], old.v[0, :, :count].float())


def _shares(layer: Linearised, call: Windowed) -> list[Tensor]:
    """The weights of what the call's words, its window, its sinks and its sums held when it began, [T] each.

    The outputs are sums of values with these weights, so the layer itself computes them from values that say where they
    were: (1, 0, 0, 0) of the call's own words, (0, 1, 0, 0) of those in the window, and so on. Means over heads.
    """
    own, window, sinks, sums = torch.eye(4, device=call.tokens.v.device)
    tokens, state = call.tokens._replace(v=own.expand(*call.tokens.v.shape[:-1], 4)), call.state
    if state is not None:
        held = state.window
        marked = held._replace(
            v=window.expand(*held.v.shape[:-1], 4),
            sink_v=sinks.expand(*held.sink_v.shape[:-1], 4),
            s=held.z[..., None] * sums,
        )
        state = state._replace(window=marked)
    shares, _ = Linearised.read(layer, tokens, state)  # not the observed one
    return list(shares[0].float().mean(1).T)
