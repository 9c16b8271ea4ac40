"""What each kind of memory wrote, read and became in a segment, from what `observe` noted and the states around it.

A memory has K units: slots, memory tokens, or the strongest directions of a sum. A reader is made for each memory of
a model and is given one segment after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.attention.gated import CacheState, GatedBranch
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.row_caches import BlockState
from mnemos.memory.key_values import KeyValues
from mnemos.memory.slots import SlotState
from mnemos.memory.tokens import TokenState
from mnemos.models.memformer import Memformer
from mnemos.models.segments import SegmentModel
from mnemos.ops.gated_cache import resample
from mnemos.types import State

from .observe import Added, Attended, CacheWritten, Call, Calls, Mixed, SlotsWritten

Kind = Literal["slots", "cache", "window", "sums", "tokens"]
REACH = 256  # earlier tokens whose attention received is recorded, of a window that is longer or has no end
C = TypeVar("C", bound=Call)
N = TypeVar("N")
Array = np.ndarray


@dataclass
class Memory:
    """One memory over S segments of at most L tokens. What a kind does not have is empty.

    units: the names of its K units. about: what the panel shows, a sentence. moved [S, K]: how far each unit came in a
    segment, as a share of its length (of directions: 1 − the cosine). values: further curves [S, K] by name. written
    [S, K, L]: the weight of each token in what was written to each unit. readers [S, L, K]: the weight of each unit in
    what each token read. received [S, R + L]: the mean weight that tokens got from those of the segment: the R tokens
    before it, and its own.
    offset: `written` is about the tokens that stand so many places before the segment's.
    """

    name: str
    kind: Kind
    units: tuple[str, ...]
    about: str
    moved: Array = field(default_factory=lambda: np.zeros((0, 0)))
    values: dict[str, Array] = field(default_factory=dict)
    written: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    readers: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    received: Array = field(default_factory=lambda: np.zeros((0, 0)))
    offset: int = 0


@dataclass
class Sources:
    """What each token took from each source in one layer: share [N, n] of n sources, which sum to 1.

    The share of a source is its attention weight, or the length of what it adds, divided by the sum of these lengths.
    """

    name: str
    parts: tuple[str, ...]
    share: Array


def nodes(state: State, kind: type[N] | tuple[type[N], ...]) -> list[N]:
    """The parts of a state of one class, in order."""
    found = pytree.tree_leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def last(calls: Calls, name: str, kind: type[C]) -> C | None:
    """The last call of a kind that a module had."""
    return next((call for call in reversed(calls.get(name, ())) if isinstance(call, kind)), None)


class Reader:
    """Base of the readers. `read` is given what happened in a segment; `memory` is what came of it."""

    kind: ClassVar[Kind]
    all_of_kind: ClassVar[str]  # what the memories of all layers of a model are called together
    about: str
    offset = 0

    def __init__(self, name: str, units: Sequence[str]) -> None:
        self.name, self.units = name, tuple(units)
        self.rows: dict[str, list[Tensor]] = {}
        self.shares: list[tuple[str, tuple[str, ...], list[Tensor]]] = []

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
        """The state with all units but one as in a new row."""
        if (part := self.part(state)) is None:
            return None
        kept = self.start(state).to(part.dtype)[None].clone()
        kept[:, unit] = part[:, unit]
        return self.with_part(state, kept)

    def groups(self, state: State) -> dict[str, State]:
        """The state with several units as in a new row, by name."""
        return {}

    def put(self, **found: Tensor) -> None:
        """Keep some arrays of the segment."""
        for name, value in found.items():
            self.rows.setdefault(name, []).append(value.detach().float().cpu())

    def put_shares(self, place: int, name: str, parts: tuple[str, ...], lengths: Sequence[Tensor]) -> None:
        """Keep the sources of the segment's tokens: a length [n] of each part."""
        while len(self.shares) <= place:
            self.shares.append((name, parts, []))
        both = torch.stack([one.detach().float().cpu() for one in lengths], -1)
        self.shares[place][2].append(both / both.sum(-1, keepdim=True).clamp(min=1e-12))

    def memory(self) -> Memory:
        """What was recorded."""
        own = {"moved", "written", "readers", "received"}
        rows = {name: _stacked(values) for name, values in self.rows.items()}
        values = {name: rows.pop(name) for name in list(rows) if name not in own}
        return Memory(self.name, self.kind, self.units, self.about, values=values, offset=self.offset, **rows)

    def sources(self) -> list[Sources]:
        """What the tokens took from where, by layer."""
        return [Sources(name, parts, torch.cat(share).numpy()) for name, parts, share in self.shares]


def _stacked(values: list[Tensor]) -> Array:
    """Arrays of the segments, stacked; those of a short segment are filled with zeros at the end."""
    size = [max(one.shape[i] for one in values) for i in range(values[0].dim())]
    out = torch.zeros(len(values), *size)
    for row, one in zip(out, values, strict=True):
        row[tuple(slice(n) for n in one.shape)] = one
    return out.numpy()


class SlotReader(Reader):
    """Memformer's slots: the writer's attention, what encoder and decoder read, and how far each slot moved."""

    kind: ClassVar[Kind] = "slots"
    all_of_kind = "slots"

    def __init__(self, model: Memformer) -> None:
        assert model.memory is not None
        self.about = "Slots are written once a segment, by attention to its tokens and to themselves."
        if not model.memory.config.write:
            self.about = "These slots are never written."
        super().__init__("slots", [f"slot {i + 1}" for i in range(model.config.memory.slots)])
        self.model = model

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        model, k = self.model, len(self.units)
        assert model.memory is not None
        old = model.memory.start()[None] if before is None else model.slots(before.memory)
        new = model.slots(after.memory)
        assert old is not None
        assert new is not None
        weights = torch.zeros(k, 1 + count)
        weights[:, 0] = 1
        if (write := last(calls, "memory", SlotsWritten)) is not None:
            weights = write.weights[0].float().mean(0)[:, : 1 + count]
        self.put(moved=_moved(old[0], new[0]), keeps=weights[:, 0], written=weights[:, 1:])
        found, place = [], 0
        for half, sources in (("encoder", 1), ("decoder", 1 + model.decoder.memory)):
            for i in range(len(getattr(model, half).blocks)):
                names = [f"{half}.blocks.{i}.attention", *(f"{half}.blocks.{i}.reads.{j}" for j in range(sources))]
                added = [last(calls, name, Added) for name in names]
                reads = last(calls, names[-1], Attended)
                slots = half == "encoder" or model.decoder.memory
                if reads is not None and slots and reads.q.shape[1] >= count:
                    found.append((half, reads.weights()[0, :, :count].mean(0)))
                parts = ("this segment", "slots") if half == "encoder" else _DECODER[: 1 + sources]
                if all(one is not None and one.length.shape[1] >= count for one in added):
                    lengths = [one.length[0, :count] for one in added if one is not None]
                else:  # the encoder reads whole segments, and this one is not
                    lengths = [torch.full((count,), torch.nan) for _ in names]
                self.put_shares(place, f"{half}, layer {i + 1}", parts, lengths)
                place += 1
        decoders = [weights for half, weights in found if half == "decoder"] or [weights for _, weights in found]
        self.put(readers=torch.stack(decoders).mean(0) if decoders else torch.zeros(count, k))

    def part(self, state: State) -> Tensor | None:
        """The slots."""
        assert self.model.memory is not None
        return self.model.memory.contents(state.memory)

    def start(self, state: State) -> Tensor:
        """Their learned start."""
        assert self.model.memory is not None
        return self.model.memory.start()

    def with_part(self, state: State, part: Tensor) -> State:
        """See the base class."""
        return state._replace(memory=SlotState(part, state.memory.writes))


_DECODER = ("this segment", "the segment before", "slots")


class EncodedReader(Reader):
    """The encoding of the segment before, which Memformer's decoder attends to."""

    kind: ClassVar[Kind] = "window"
    all_of_kind = "encoding of the segment before"
    about = "The decoder attends to the encoded tokens of the segment before."

    def __init__(self, model: Memformer) -> None:
        super().__init__("the segment before", ())
        self.model = model

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        names = [f"decoder.blocks.{i}.reads.0" for i in range(self.model.config.decoder_layers)]
        length = self.model.config.segment
        found = [one for name in names if (one := last(calls, name, Attended)) is not None]
        received = torch.stack([one.weights()[0].mean((0, 1)) for one in found]).mean(0)
        if before is None:  # of the token for the beginning, which is no word of the text
            received = torch.zeros_like(received)
        self.put(received=torch.cat([received, torch.zeros(length)]))

    def emptied(self, state: State, unit: int | None) -> State | None:
        """Nothing to attend to."""
        if unit is not None:
            return None
        return state._replace(encoded=torch.zeros_like(state.encoded), valid=torch.zeros_like(state.valid))


class WindowReader(Reader):
    """Keys and values of the last tokens in one layer of softmax attention."""

    kind: ClassVar[Kind] = "window"
    all_of_kind = "keys and values"

    def __init__(self, name: str, title: str, layer: SoftmaxAttention, cached: str | None, place: int) -> None:
        super().__init__(f"{title}, window", ())
        self.module, self.cached, self.title, self.place = name, cached, title, place
        self.reach = REACH if layer.window is None else min(REACH, layer.window - 1)
        past = "all earlier tokens" if layer.window is None else f"the last {layer.window - 1:,} tokens"
        self.about = f"The layer attends to the keys and values of {past}."

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        call = last(calls, self.module, Attended)
        assert call is not None
        weights = call.weights()[0].mean(0)  # [T, N]
        n = weights.shape[1] - count
        received = torch.zeros(self.reach + count)
        taken = min(n, self.reach)
        received[self.reach - taken :] = weights.mean(0)[n - taken :]
        own, earlier = weights[:, n:].sum(1), weights[:, :n].sum(1)
        self.put(received=received)
        parts: tuple[str, ...] = ("this segment", "earlier words of the window")
        lengths = [own, earlier]
        if self.cached is not None:
            parts = (*parts, "cache")
            mixed = _mixed(calls, self.cached)
            lengths = [one * mixed.own[0] for one in lengths] + [mixed.memory[0]]
        self.put_shares(0, self.title, parts, lengths)

    def emptied(self, state: State, unit: int | None) -> State | None:
        """A window without a token, at the same position of the row."""
        parts = nodes(state, KeyValues)
        if unit is not None or self.place >= len(parts):
            return None
        part = parts[self.place]
        return replaced(state, part, KeyValues(part.k, part.v, torch.zeros_like(part.valid), part.seen))


class CacheReader(Reader):
    """A gated recurrent cache: its gates, the tokens its slots took, what was read, and how far each slot moved."""

    kind: ClassVar[Kind] = "cache"
    all_of_kind = "caches"

    def __init__(self, name: str, title: str, layer: GatedBranch, place: int) -> None:
        super().__init__(f"{title}, cache", [f"slot {i + 1}" for i in range(layer.cache.shape[0])])
        self.about = "An update gate of 0 keeps a slot, 1 replaces it by its candidate."
        if layer.grc.constant:
            self.about = "A constant that was learned: nothing is written to it."
        elif not layer.grc.write:
            self.about = "Every update starts from the stored cache, and not from the update before."
        self.module, self.layer, self.place, self.title = name, layer, place, title

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        k = len(self.units)
        if not isinstance(getattr(self.layer, "inner", None), SoftmaxAttention):  # else the window's reader says it
            mixed = _mixed(calls, self.module)
            self.put_shares(0, self.title, ("the attention", "cache"), [mixed.own[0], mixed.memory[0]])
        writes = [call for call in calls.get(self.module, ()) if isinstance(call, CacheWritten)]
        none = torch.full((k,), torch.nan)  # of a segment without an update
        moved, update, reset, candidate, written = torch.zeros(k), none, none, none, torch.zeros(k, count)
        if writes:
            first, end = writes[0].before[0].float(), writes[-1].after[0].float()
            moved = _moved(first, end)
            update, reset = (
                torch.stack([getattr(one.gates, gate)[0].float().mean(-1) for one in writes]).mean(0)
                for gate in ("update", "reset")
            )
            steps = [
                (one.after[0] - one.before[0]).float() / one.gates.update[0].float().clamp(min=1e-3) for one in writes
            ]
            candidate = torch.stack(steps).square().mean((0, 2)).sqrt()
            if sum(one.source.shape[1] for one in writes) == count:  # the segment is whole blocks
                parts = [_taken(one, self.layer.grc.resample) for one in writes]
                written = torch.cat(parts, 1)
        self.put(moved=moved, update=update, reset=reset, candidate=candidate, written=written)
        reads = [call.weights()[0].mean(0) for call in calls.get(self.module, ()) if isinstance(call, Attended)]
        found = torch.cat(reads)[-count:] if reads else torch.zeros(count, k)
        self.put(readers=found)

    def _walk(self, state: State) -> CacheState | BlockState | None:
        parts: list[Any] = nodes(state, (CacheState, BlockState))
        return parts[self.place] if self.place < len(parts) else None

    def part(self, state: State) -> Tensor | None:
        """The cache of the row."""
        walk = self._walk(state)
        return None if walk is None else walk.cache if bool(walk.seen[0]) else self.start(state)[None]

    def start(self, state: State) -> Tensor:
        """Zeros, or the stored cache."""
        start = self.layer.contents()
        zero = isinstance(self._walk(state), BlockState) and self.layer.grc.scope == "stream"
        return torch.zeros_like(start) if zero else start

    def with_part(self, state: State, part: Tensor) -> State:
        """See the base class."""
        walk = self._walk(state)
        assert walk is not None
        return replaced(state, walk, walk._replace(cache=part))


def _mixed(calls: Calls, name: str) -> Mixed:
    """The branches of a layer along the segment, which it may have read block by block."""
    blocks = [call for call in calls[name] if isinstance(call, Mixed)]
    return Mixed(*(torch.cat(parts, 1) for parts in zip(*blocks, strict=True)))


def _taken(write: CacheWritten, method: str) -> Tensor:
    """How much of each slot [K] came from each token [T]: the mean update gate, shared among the tokens it took."""
    t, k = write.source.shape[1], write.after.shape[1]
    eye = torch.eye(t, device=write.source.device)[None]
    return write.gates.update[0].float().mean(-1, keepdim=True) * resample(eye, k, None, method)[0]


class TokenReader(Reader):
    """Memory tokens of a model of segments: what they attended to when they were written, and who attended to them."""

    kind: ClassVar[Kind] = "tokens"
    all_of_kind = "memory tokens"

    def __init__(self, model: SegmentModel) -> None:
        self.about = "The memory tokens stand before every segment, the same ones each time."
        if model.back:
            self.about = "The outputs of the memory tokens behind a segment stand before the next one."
        super().__init__("memory tokens", [f"token {i + 1}" for i in range(model.front)])
        self.model = model

    def read(self, calls: Calls, before: State, after: State, count: int) -> None:
        """See the class."""
        front, back = self.model.front, self.model.back
        names = [f"blocks.{i}.attention" for i in range(len(self.model.blocks))]
        found = [one.weights()[0].mean(0) for name in names if (one := last(calls, name, Attended)) is not None]
        whole = [one for one in found if one.shape == (front + count + back,) * 2]
        if not whole:  # a segment that is not complete: memory tokens in front alone
            whole = [torch.nn.functional.pad(one, (0, back, 0, back)) for one in found if one.shape[0] == front + count]
        mean = torch.stack(whole).mean(0) if whole else torch.zeros(front + count + back, front + count + back)
        words = slice(front, front + count)
        self.put(
            readers=mean[words, :front],
            written=mean[front + count :, words][:front] if back else torch.zeros(front, count),
        )
        tokens = [None if state is None else self.part(state) for state in (before, after)]
        self.put(moved=_moved(*(self.start(after) if one is None else one[0] for one in tokens)))
        self.put_shares(
            0, "all layers", ("this segment", "memory tokens"), [mean[words, words].sum(1), mean[words, :front].sum(1)]
        )

    def part(self, state: State) -> Tensor | None:
        """The memory tokens."""
        found = nodes(state.memory, TokenState)
        return found[0].tokens if found and int(found[0].writes) else None

    def start(self, state: State) -> Tensor:
        """Their learned start."""
        start: Tensor = self.model.memory.start  # type: ignore[union-attr, assignment]
        return start

    def with_part(self, state: State, part: Tensor) -> State:
        """See the base class."""
        (old,) = nodes(state.memory, TokenState)
        return replaced(state, old, old._replace(tokens=part))


def replaced(state: State, part: object, new: object) -> State:
    """The state with one of its parts in place of another."""
    return pytree.tree_map(lambda node: new if node is part else node, state, is_leaf=lambda node: node is part)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """‖after − before‖ / ‖after‖ of each unit, [K, D] -> [K]."""
    return (after - before).float().norm(dim=-1) / after.float().norm(dim=-1).clamp(min=1e-12)
