"""What attentions keep of earlier tokens: keys and values, a layer's inputs, and what the rows of a search share.

One idea: states are values, yet a token costs no copy of those before it. The newest state of a stream writes its
tokens into the spare capacity of a buffer, behind all that earlier states read (`Buffer`, `append`); every other state
copies. `KeyValues` and `Segments` stand on that. `BranchedKeyValues` and `Encoded` are of rows that share entries.
"""

import contextlib
import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, pytree, transformed
from mnemos.modes import in_graph, reads_without_waiting
from mnemos.ops.padding import take, valid_last, zero_invalid
from mnemos.ops.positions import count_seen
from mnemos.types import Device, InputError, Rows, SharedRows

# --- A buffer that states share ---

_claiming = threading.Lock()


class Buffer:
    """Storage for `capacity` tokens. The first `used` belong to some state and are not written again."""

    def __init__(self, tokens: tuple[Tensor, ...], capacity: int) -> None:
        def room(x: Tensor) -> Tensor:
            b, n, *rest = x.shape
            if len(rest) < 2:
                space = x.new_zeros(b, capacity, *rest)
            else:  # heads before tokens in memory, so that attention reads the keys of a head contiguously
                h, d = rest
                space = torch.empty(b, h, capacity, d, device=x.device, dtype=x.dtype).transpose(1, 2)
            space[:, :n] = x
            return space

        self.tensors = tuple(room(x) for x in tokens)
        self.capacity, self.used = capacity, tokens[0].shape[1]

    def claim(self, begin: int, end: int) -> bool:
        """Take the places from `begin` to `end` for one state; False where there are none, or another state has them.

        In one step, because threads may go on from the same state. One lock for all buffers: it is held for a moment.
        """
        with contextlib.nullcontext() if torch.compiler.is_compiling() else _claiming:
            free = self.used == begin and end <= self.capacity
            if free:
                self.used = end
        return free


class Room(NamedTuple):
    """The buffer of a state's tokens, and where in it they end."""

    buffer: Buffer
    end: int

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None in pickles and deep copies, which would hold every token twice; the state copies at its next append."""
        return type(None), ()


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def append(
    tokens: tuple[Tensor, ...], new: tuple[Tensor, ...], room: Room | None
) -> tuple[tuple[Tensor, ...], Room | None]:
    """`tokens` [B, N, ..], N > 0, which are in `room` (None: in no buffer), followed by `new` [B, T, ..]; their room.

    `tokens` are first converted to the types of `new`, but under autocast, which converts what attention reads: numbers
    of more bits are not lost in it. No tensor that is passed changes.
    """
    if [x.dtype for x in tokens] != [x.dtype for x in new] and not _autocasts(new[0].device.type):
        tokens, room = tuple(x.to(y.dtype) for x, y in zip(tokens, new, strict=True)), None
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, *new))
    tangents = not torch.compiler.is_compiling() and (forward_differentiated() or transformed(*tokens, *new))
    if differentiates or tangents or torch.compiler.is_exporting():  # an exported program has no buffer to write into
        return tuple(torch.cat(pair, 1) for pair in zip(tokens, new, strict=True)), None
    more = new[0].shape[1]
    tensors, room = with_room(tokens, more, room)
    for tensor, x in zip(tensors, new, strict=True):
        # By `data`, so that it does not count as a write to earlier states, which a graph or replay may have kept: they
        # share the buffer and read none of these places.
        tensor.data[:, -more:] = x
    return tensors, room


def with_room(tokens: tuple[Tensor, ...], more: int, room: Room | None) -> tuple[tuple[Tensor, ...], Room]:
    """`tokens` [B, N, ..], N > 0, and behind them `more` tokens, which the caller writes; else as `append`."""
    before = tokens[0].shape[1]
    if (
        room is None
        # A tensor of inference mode may be written there only.
        or (room.buffer.tensors[0].is_inference() and not torch.is_inference_mode_enabled())
        or not room.buffer.claim(room.end, room.end + more)
    ):
        room = Room(Buffer(tokens, 2 * (before + more)), before)
        room.buffer.claim(before, before + more)
    buffer, end = room.buffer, room.end + more
    return tuple(x[:, end - more - before : end] for x in buffer.tensors), Room(buffer, end)


def mostly_unread(x: Tensor, room: Room | None) -> bool:
    """Whether tokens x [B, N, ..] of a state, in `room` or in none, are under a quarter of what they keep in memory.

    They may be the last of a long call, or a part of a projection. A buffer has twice the tokens that were written into
    it, so a state that is read on token by token never says yes.
    """
    if room is not None:
        return not torch.compiler.is_compiling() and room.buffer.capacity > 4 * x.shape[1]
    return not (in_graph() or transformed(x)) and x.untyped_storage().nbytes() > 4 * x.nbytes


def pad_front(x: Tensor, length: int) -> Tensor:
    """x [B, N, ..] with zeros in front, up to `length` on axis 1; unchanged if it has as many."""
    missing = length - x.shape[1]
    return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1) if missing > 0 else x


# --- Keys and values, and inputs ---


class KeyValues:
    """Keys and values of the tokens a causal attention has read; a `State`, which no operation changes.

    k, v: [B, N, H, D/H], the last N tokens of every row: all tokens, or those of a window.
    valid [B, N] bool: the tokens that may be attended to (not padding, and not the past of a reset row).
    seen [B] int64: valid tokens since the row began, which is the position of the next token.

    `append` costs O(T) for T new tokens, amortised. Without gradient the tensors are slices of a buffer with spare
    capacity, and the newest state of a stream writes its tokens there, where no earlier state reads. A state that is
    not the newest (a fork), or that was rebuilt from its leaves, copies its tokens once.
    """

    __slots__ = ("_room", "k", "seen", "v", "valid")

    def __init__(self, k: Tensor, v: Tensor, valid: Tensor, seen: Tensor, _room: Room | None = None) -> None:
        self.k, self.v, self.valid, self.seen, self._room = k, v, valid, seen, _room

    @property
    def memory_name(self) -> str:
        return "keys and values"

    @staticmethod
    def empty(
        batch: int, heads: int, width: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> "KeyValues":
        """The state before the first token: B rows, H heads of `width` channels."""
        nothing = torch.zeros(batch, 0, heads, width, device=device, dtype=dtype)
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return KeyValues(nothing, nothing.clone(), valid, torch.zeros(batch, device=device, dtype=torch.int64))

    def last(self, n: int) -> "KeyValues":
        """The state with only the last n tokens, in the same buffer."""
        if n >= self.k.shape[1]:
            return self
        start = self.k.shape[1] - n
        return KeyValues(self.k[:, start:], self.v[:, start:], self.valid[:, start:], self.seen, self._room)

    def kept(self) -> "KeyValues":
        """The state to be returned: a copy where the rest of a call would stay in memory with it, also when pickled."""
        if mostly_unread(self.k, self._room) or mostly_unread(self.v, self._room):
            return KeyValues(self.k.clone(), self.v.clone(), self.valid.clone(), self.seen)
        return self

    def trimmed(self) -> "KeyValues":
        """The state without its first tokens that are invalid in every row."""
        if torch.compiler.is_compiling() or transformed(self.valid):  # the length would depend on values
            return self
        read = self.valid.any(0)
        return self.last(int(read.flip(0).nonzero().max()) + 1 if bool(read.any()) else 0).kept()

    def packed(self) -> "KeyValues":
        """The same state with the tokens that may be attended to behind the others, which become zeros."""
        order = valid_last(self.valid)
        valid = take(self.valid, order)
        k, v = (zero_invalid(take(x, order), valid) for x in (self.k, self.v))
        return KeyValues(k, v, valid, self.seen)

    def is_packed(self) -> bool:
        """Whether no invalid token is behind a valid one; taken to hold where it cannot be read without waiting."""
        return not reads_without_waiting(self.valid) or not bool((self.valid[:, :-1] > self.valid[:, 1:]).any())

    def is_unbroken(self) -> bool:
        """Whether no invalid token is between valid ones. Reads them, for which a device waits."""
        begins = self.valid[:, 1:] > self.valid[:, :-1]
        return not bool((begins.sum(1) + self.valid[:, 0] > 1).any())

    def pad_to(self, n: int) -> "KeyValues":
        """The same state with at least n tokens: those that are new, in front, are not valid."""
        return KeyValues(pad_front(self.k, n), pad_front(self.v, n), pad_front(self.valid, n), self.seen)

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> "KeyValues":
        """The state after T more tokens: k, v [B, T, H, D/H], mask [B, T] bool, True = valid."""
        seen = count_seen(k, self.seen, mask)
        valid = k.new_ones(k.shape[:2], dtype=torch.bool) if mask is None else mask.clone()  # the caller's to change
        if self.k.shape[1] == 0:
            return KeyValues(k, v, valid, seen)
        (k, v, valid), room = append((self.k, self.v, self.valid), (k, v, valid), self._room)
        return KeyValues(k, v, valid, seen, room)

    def with_room(self) -> "KeyValues":
        """The state after one more valid token, N > 0, whose key and value the caller writes into `k` and `v`."""
        (k, v, valid), room = with_room((self.k, self.v, self.valid), 1, self._room)
        valid[:, -1] = True
        return KeyValues(k, v, valid, self.seen + 1, room)

    def __repr__(self) -> str:
        return f"KeyValues(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, seen={tuple(self.seen.shape)})"


# PyTorch's tree functions see the tensors. A rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    KeyValues,
    lambda s: ([s.k, s.v, s.valid, s.seen], None),
    lambda children, _: KeyValues(*children),
    serialized_type_name="mnemos.KeyValues",
)


def check_key_values(state: object, batch: int, heads: int, width: int) -> None:
    """Raise InputError unless the state's keys are [batch, N, heads, width]."""
    shape = tuple(state.k.shape) if isinstance(state, KeyValues) else type(state).__name__
    if not isinstance(state, KeyValues) or (shape[0], *shape[2:]) != (batch, heads, width):
        raise InputError(
            f"expected a state of keys [{batch}, N, {heads}, {width}], found {shape}; use the layer's own initial_state"
        )


class Segments:
    """A layer's inputs at the last N tokens of every row; a `State`, which no operation changes.

    x [B, N, D]: the inputs, from which every call computes keys and values. valid [B, N] bool: the tokens that may be
    attended to (not padding, and not the past of a reset row); a row of zeros is therefore a new row.

    `append` costs O(T) for T new tokens, amortised, as for `KeyValues`.
    """

    __slots__ = ("_room", "valid", "x")

    def __init__(self, x: Tensor, valid: Tensor, _room: Room | None = None) -> None:
        self.x, self.valid, self._room = x, valid, _room

    @property
    def memory_name(self) -> str:
        return "segments"

    @staticmethod
    def empty(batch: int, dim: int, device: Device = None, dtype: torch.dtype | None = None) -> "Segments":
        """The state before the first token: B rows of width D."""
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return Segments(torch.zeros(batch, 0, dim, device=device, dtype=dtype), valid)

    def append(self, x: Tensor, valid: Tensor) -> "Segments":
        """The state after T more tokens: x [B, T, D], valid [B, T] bool."""
        if self.x.shape[1] == 0:
            return Segments(x, valid)
        (x, valid), room = append((self.x, self.valid), (x, valid), self._room)
        return Segments(x, valid, room)

    def last(self, n: int) -> "Segments":
        """The state with only the last n tokens, in the same buffer."""
        if n >= self.x.shape[1]:
            return self
        start = self.x.shape[1] - n
        return Segments(self.x[:, start:], self.valid[:, start:], self._room)

    def kept(self, copied: bool = False) -> "Segments":
        """The state to be returned: a copy where it is asked for, or as `KeyValues.kept`."""
        if copied or mostly_unread(self.x, self._room):
            return Segments(self.x.clone(), self.valid.clone())
        return self

    def pad_to(self, n: int) -> "Segments":
        """The same state with at least n tokens: those that are new, in front, are not valid."""
        return Segments(pad_front(self.x, n), pad_front(self.valid, n))

    def detach(self) -> "Segments":
        """The same values without the graph that computed them."""
        return Segments(self.x.detach(), self.valid, self._room)

    def __repr__(self) -> str:
        return f"Segments(x={tuple(self.x.shape)})"


pytree.register_pytree_node(
    Segments,
    lambda s: ([s.x, s.valid], None),
    lambda children, _: Segments(*children),
    serialized_type_name="mnemos.Segments",
)


# --- What rows share, stored once: the tokens before the beams of a search branch, and the sources that they read ---

MERGE = 8  # tokens between two attempts to merge the entries of tokens that all rows of every group have in common


class BranchedKeyValues(SharedRows):
    """The keys and values of G groups of K rows. A group's rows share their first tokens and branch from there.

    k, v [G, E, H, D/H]: the entries of a group: P tokens that its rows share, then K tokens for every token since, one
    of each row. visible [G·K, E] bool: the entries that are a row's own past. `select` of rows within their groups
    changes `visible` alone: no key or value is copied when beams are reordered. seen [G·K] int64: tokens since the row
    began. Memory: O(P + K·N) entries per group for N tokens since the branching. A query reads them all and attends to
    P + N. The rows of a search soon descend from one of them, so on a CPU every `MERGE` tokens the entries that all
    rows of every group have in common are merged: these tokens are shared from then on, and N is small.
    """

    __slots__ = ("_room", "copies", "k", "seen", "shared", "v", "visible")

    def __init__(
        self,
        entries: tuple[Tensor, Tensor],
        visible: Tensor,
        seen: Tensor,
        copies: int,
        shared: int,
        _room: Room | None = None,
    ) -> None:
        (self.k, self.v), self.visible, self.seen, self._room = entries, visible, seen, _room
        self.copies, self.shared = copies, shared  # K and P

    def fits(self, rows: int, heads: int, width: int) -> bool:
        """Whether the state is one of `rows` rows, with heads of `width` channels."""
        return (len(self.visible), *self.k.shape[2:]) == (rows, heads, width)

    @staticmethod
    def of(state: KeyValues, copies: int) -> "BranchedKeyValues":
        """`copies` rows for every row of a state, next to each other. No key or value is copied."""
        visible, seen = state.valid.repeat_interleave(copies, 0), state.seen.repeat_interleave(copies)
        return BranchedKeyValues((state.k, state.v), visible, seen, copies, state.k.shape[1])

    def append(self, k: Tensor, v: Tensor) -> "BranchedKeyValues":
        """The state after one more token of every row: k, v [G·K, 1, H, D/H]. Cost: O(G·K), amortised."""
        k, v = (x.squeeze(1).unflatten(0, (-1, self.copies)) for x in (k, v))
        entries, room = append((self.k, self.v), (k, v), self._room) if self.k.shape[1] else ((k, v), None)
        return BranchedKeyValues(entries, self.visible_after(), self.seen + 1, self.copies, self.shared, room)  # type: ignore[arg-type]

    def visible_after(self) -> Tensor:
        """`visible` after one more token, [G·K, E + K]: a row's own entry is visible to it."""
        own = torch.eye(self.copies, dtype=torch.bool, device=self.visible.device)
        return torch.cat([self.visible, own.repeat(len(self.visible) // self.copies, 1)], 1)

    def with_room(self, visible: Tensor, seen: Tensor) -> "BranchedKeyValues":
        """`append`, E > 0, of keys and values that the caller writes into the last K entries of `k` and `v`.

        visible, seen: those after it, which are the same in all layers.
        """
        (k, v), room = with_room((self.k, self.v), self.copies, self._room)
        return BranchedKeyValues((k, v), visible, seen, self.copies, self.shared, room)

    def last(self, n: int) -> "BranchedKeyValues":
        """The state with only the last n tokens of every row, in the same buffer."""
        since = self.since
        if n >= since + self.shared:
            return self
        shared = max(0, n - since)
        drop = self.shared - shared + self.copies * max(0, since - n)
        entries = self.k[:, drop:], self.v[:, drop:]
        return BranchedKeyValues(entries, self.visible[:, drop:], self.seen, self.copies, shared, self._room)

    def select_rows(self, rows: Rows) -> "BranchedKeyValues | KeyValues":
        """The given rows. Rows that stay K to a group copy nothing, or only whole groups where groups are dropped."""
        groups = rows.groups(self.copies)
        if groups is None:
            rest = self.unshare()
            k, v, valid, seen = (x.index_select(0, rows.index) for x in (rest.k, rest.v, rest.valid, rest.seen))
            return KeyValues(k, v, valid, seen)
        visible, seen = rows.take(self.visible), rows.take(self.seen)
        if groups == list(range(len(self.k))):
            same = BranchedKeyValues((self.k, self.v), visible, seen, self.copies, self.shared, self._room)
            attempt = self.since and self.since % MERGE == 0 and self.k.device.type == "cpu"
            return same.merged() if attempt else same
        index = torch.tensor(groups, dtype=torch.int64, device=self.k.device)  # also where there are none
        entries = self.k.index_select(0, index), self.v.index_select(0, index)
        return BranchedKeyValues(entries, visible, seen, self.copies, self.shared)

    @property
    def since(self) -> int:
        """N, the number of tokens of every row that are not shared."""
        return (self.k.shape[1] - self.shared) // self.copies

    def _paths(self) -> Tensor:
        """[G·K, N]: the row of the group whose entry is a row's own token."""
        return self.visible[:, self.shared :].unflatten(1, (-1, self.copies)).int().argmax(-1)

    def merged(self) -> "BranchedKeyValues":
        """The state with the first tokens that are the same in all rows of every group as shared ones; a copy."""
        n, p = self.copies, self.shared
        paths = self._paths().unflatten(0, (-1, n))  # [G, K, N]
        common = (paths == paths[:, :1]).flatten(0, 1).all(0)
        m = int(common.cumprod(0).sum())
        if not m:
            return self
        entries = p + n * torch.arange(m, device=self.k.device) + paths[:, 0, :m]  # [G, m]
        group = torch.arange(len(self.k), device=self.k.device)[:, None]

        def merge(x: Tensor) -> Tensor:
            return torch.cat([x[:, :p], x[group, entries], x[:, p + n * m :]], 1)

        marks = self.visible.gather(1, entries.repeat_interleave(n, 0))
        visible = torch.cat([self.visible[:, :p], marks, self.visible[:, p + n * m :]], 1)
        return BranchedKeyValues((merge(self.k), merge(self.v)), visible, self.seen, n, p + m)

    def unshare(self) -> KeyValues:
        """The keys and values of every row by itself."""
        n, rows = self.copies, len(self.visible)
        device = self.k.device
        shared = torch.arange(self.shared, device=device).expand(rows, -1)
        since = self._paths()
        entry = torch.cat([shared, since + self.shared + n * torch.arange(since.shape[1], device=device)], 1)
        group = torch.arange(rows, device=device)[:, None] // n
        return KeyValues(self.k[group, entry], self.v[group, entry], self.visible.gather(1, entry), self.seen)

    def __repr__(self) -> str:
        return f"BranchedKeyValues(k={tuple(self.k.shape)}, copies={self.copies}, seen={tuple(self.seen.shape)})"


# The first leaf leads with the batch, as `select` expects of a state.
pytree.register_pytree_node(
    BranchedKeyValues,
    lambda s: ([s.seen, s.visible, s.k, s.v], (s.copies, s.shared)),
    lambda children, context: BranchedKeyValues((children[2], children[3]), children[1], children[0], *context),
    serialized_type_name="mnemos.BranchedKeyValues",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)


class Encoded(SharedRows):
    """What the rows of a decoder read of their sources: keys and values per decoder layer, of S source tokens.

    layers: (k, v) of each layer, [G, S, H, D/H] for G sources; valid [G, S] bool: tokens that are not padding. Each
    source has `copies` rows, next to each other: one, or the beams of a search. `select` of rows that stay with their
    sources copies nothing; where whole sources are dropped, it copies those that are kept.
    """

    __slots__ = ("copies", "layers", "valid")

    def __init__(self, layers: tuple[tuple[Tensor, Tensor], ...], valid: Tensor, copies: int = 1) -> None:
        self.layers, self.valid, self.copies = layers, valid, copies

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.valid.shape[0] * self.copies

    def last(self, n: int) -> "Encoded":
        """The state with only the last n tokens of every source."""
        start = max(0, self.valid.shape[1] - n)
        layers = tuple((k[:, start:], v[:, start:]) for k, v in self.layers)
        return Encoded(layers, self.valid[:, start:], self.copies)

    def select_rows(self, rows: Rows) -> "Encoded":
        """The given rows. A source of which rows are taken several times in a row is stored once."""
        sources = [row // self.copies for row in rows.listed]
        copies = _copies(sources)
        groups = sources[::copies]
        if groups == list(range(len(self.valid))):
            return Encoded(self.layers, self.valid, copies)
        index = torch.tensor(groups, device=self.valid.device, dtype=torch.int64)
        layers = tuple((k.index_select(0, index), v.index_select(0, index)) for k, v in self.layers)
        return Encoded(layers, self.valid.index_select(0, index), copies)

    def unshare(self) -> "Encoded":
        """One source for each row."""
        if self.copies == 1:
            return self
        n = self.copies
        layers = tuple((k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)) for k, v in self.layers)
        return Encoded(layers, self.valid.repeat_interleave(n, 0))

    def __repr__(self) -> str:
        return f"Encoded({len(self.layers)} layers, valid={tuple(self.valid.shape)}, copies={self.copies})"


def _copies(sources: list[int]) -> int:
    """The greatest n such that each n numbers, taken in order, are equal."""
    copies, start = 0, 0
    for i in range(1, len(sources) + 1):
        if i == len(sources) or sources[i] != sources[start]:
            copies, start = math.gcd(copies, i - start), i
    return max(1, copies)


pytree.register_pytree_node(
    Encoded,
    lambda s: ([s.layers, s.valid], s.copies),
    lambda children, copies: Encoded(tuple(children[0]), children[1], copies),
    serialized_type_name="mnemos.Encoded",
)
