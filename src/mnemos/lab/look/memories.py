"""What came of reading one memory, and the base of what reads it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import State

from .observe import Call, Calls

Kind = Literal["slots", "cache", "window", "sums", "tokens"]
C = TypeVar("C", bound=Call)
N = TypeVar("N")
Array = np.ndarray


@dataclass
class Memory:
    """One memory over S segments of at most L tokens. What a kind does not have is empty."""

    name: str
    kind: Kind
    units: tuple[str, ...]  # K names: of slots, memory tokens, or the strongest directions of a sum
    about: str  # what the panel shows, a sentence
    # [S, K], how far each unit came in a segment, as a share of its length (of directions: 1 − the cosine)
    moved: Array = field(default_factory=lambda: np.zeros((0, 0)))
    values: dict[str, Array] = field(default_factory=dict)  # further curves [S, K]
    # [S, K, L], the weight of each token in what was written to each unit
    written: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    # [S, L, K], the weight of each unit in what each token read
    readers: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    # [S, R + L], the mean weight that the R tokens before the segment and its own got from its tokens
    received: Array = field(default_factory=lambda: np.zeros((0, 0)))
    offset: int = 0  # `written` is about the tokens so many places before the segment's
    own: tuple[str, ...] = ()  # the parts of `Sources` that are this memory's


@dataclass
class Sources:
    """What each token took from each source in one layer."""

    name: str
    parts: tuple[str, ...]  # the n sources
    # [N, n], which sum to 1: the attention weight of a source, or the share of its length in the sum of what all add.
    share: Array


class Reader:
    """Base of the readers: one for each memory of a model, which is given one segment after the other.

    plural: what the memories of all layers of a model are called together. own: see `Memory`.
    """

    kind: ClassVar[Kind]
    plural: ClassVar[str]
    own: tuple[str, ...]
    about: str
    offset = 0

    def __init__(self, name: str, units: Sequence[str] = ()) -> None:
        self.name, self.units = name, tuple(units)
        self.rows: dict[str, list[Tensor]] = {}
        self.shares: dict[str, tuple[tuple[str, ...], list[Tensor]]] = {}

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """Record a segment of `count` tokens, between two states of one row."""
        raise NotImplementedError

    def part(self, state: State) -> Tensor | None:
        """What the units hold, [1, K, D]; None: they are no rows of a tensor."""
        return None

    def start(self, state: State) -> Tensor:
        """What they hold in a new row, [K, D]."""
        raise NotImplementedError

    def with_part(self, state: State, part: Tensor) -> State:
        """The state with other contents [1, K, D]."""
        raise NotImplementedError

    def emptied(self, state: State, unit: int | None) -> State | None:
        """The state with a unit (None: all) as in a new row; None where that is not defined."""
        if (part := self.part(state)) is None:
            return None
        part, start = part.clone(), self.start(state).to(part.dtype)
        chosen = slice(None) if unit is None else unit
        part[:, chosen] = start[chosen]
        return self.with_part(state, part)

    def alone(self, state: State, unit: int) -> State | None:
        if (part := self.part(state)) is None:
            return None
        others = self.start(state).to(part.dtype)[None].clone()
        others[:, unit] = part[:, unit]
        return self.with_part(state, others)

    def groups(self, state: State) -> dict[str, State]:
        return {}

    def add(self, **arrays: Tensor) -> None:
        for name, value in arrays.items():
            self.rows.setdefault(name, []).append(value.detach().float().cpu())

    def add_shares(self, layer: str, parts: tuple[str, ...], lengths: Sequence[Tensor]) -> None:
        """Record the sources of the segment's tokens in a layer: a length [n] of each part."""
        every = torch.stack([one.detach().float().cpu() for one in lengths], -1)
        share = every / every.sum(-1, keepdim=True).clamp(min=1e-12)
        self.shares.setdefault(layer, (parts, []))[1].append(share)

    def memory(self) -> Memory:
        memory = Memory(self.name, self.kind, self.units, self.about, offset=self.offset, own=self.own)
        for name, values in self.rows.items():
            # The arrays of a short segment are filled with zeros at the end.
            size = [max(one.shape[i] for one in values) for i in range(values[0].dim())]
            stacked = torch.zeros(len(values), *size)
            for row, one in zip(stacked, values, strict=True):
                row[tuple(slice(n) for n in one.shape)] = one
            if name in ("moved", "written", "readers", "received"):
                setattr(memory, name, stacked.numpy())
            else:
                memory.values[name] = stacked.numpy()
        return memory

    def sources(self) -> list[Sources]:
        return [Sources(name, parts, torch.cat(share).numpy()) for name, (parts, share) in self.shares.items()]


def nodes(state: State, cls: type[N] | tuple[type[N], ...]) -> list[N]:
    """The parts of a state of one class, in order."""
    every = pytree.tree_leaves(state, is_leaf=lambda node: isinstance(node, cls))
    return [node for node in every if isinstance(node, cls)]


def replaced(state: State, part: object, new: object) -> State:
    """The state with one of its parts in place of another."""
    return pytree.tree_map(lambda node: new if node is part else node, state, is_leaf=lambda node: node is part)


def last(calls: Calls, name: str, cls: type[C]) -> C | None:
    """The last call of a class that a module had."""
    return next((call for call in reversed(calls.get(name, ())) if isinstance(call, cls)), None)


def calls_of(calls: Calls, name: str, cls: type[C]) -> list[C]:
    """All calls of a class that a module had, which may read a segment block by block."""
    return [call for call in calls.get(name, ()) if isinstance(call, cls)]


def distance_moved(before: Tensor, after: Tensor) -> Tensor:
    """‖after − before‖ / ‖after‖ of each unit, [K, D] -> [K]."""
    return (after - before).float().norm(dim=-1) / after.float().norm(dim=-1).clamp(min=1e-12)
