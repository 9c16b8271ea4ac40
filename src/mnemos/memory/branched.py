"""What rows share, stored once: the tokens before the beams of a search branch, and the sources that they read."""

import math

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import Rows, SharedRows

from .key_values import Buffer, KeyValues, append, with_room

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

    __slots__ = ("_buffer", "_end", "copies", "k", "seen", "shared", "v", "visible")

    def __init__(
        self,
        entries: tuple[Tensor, Tensor],
        visible: Tensor,
        seen: Tensor,
        copies: int,
        shared: int,
        buffer: tuple[Buffer | None, int] = (None, 0),
    ) -> None:
        (self.k, self.v), self.visible, self.seen = entries, visible, seen
        self.copies, self.shared = copies, shared  # K and P
        self._buffer, self._end = buffer

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "keys and values"

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
        buffer, end = None, 0
        if self.k.shape[1]:
            (k, v), buffer, end = append((self.k, self.v), (k, v), self._buffer, self._end)
        return BranchedKeyValues((k, v), self.visible_after(), self.seen + 1, self.copies, self.shared, (buffer, end))

    def visible_after(self) -> Tensor:
        """`visible` after one more token, [G·K, E + K]: a row's own entry is visible to it."""
        own = torch.eye(self.copies, dtype=torch.bool, device=self.visible.device)
        return torch.cat([self.visible, own.repeat(len(self.visible) // self.copies, 1)], 1)

    def with_room(self, visible: Tensor, seen: Tensor) -> "BranchedKeyValues":
        """`append`, E > 0, of keys and values that the caller writes into the last K entries of `k` and `v`.

        visible, seen: those after it, which are the same in all layers.
        """
        (k, v), buffer, end = with_room((self.k, self.v), self.copies, self._buffer, self._end)
        return BranchedKeyValues((k, v), visible, seen, self.copies, self.shared, (buffer, end))

    def last(self, n: int) -> "BranchedKeyValues":
        """The state with only the last n tokens of every row, in the same buffer."""
        since = self.since
        if n >= since + self.shared:
            return self
        shared = max(0, n - since)
        drop = self.shared - shared + self.copies * max(0, since - n)
        return BranchedKeyValues(
            (self.k[:, drop:], self.v[:, drop:]),
            self.visible[:, drop:],
            *(self.seen, self.copies, shared, (self._buffer, self._end)),
        )

    def select_rows(self, rows: Rows) -> "BranchedKeyValues | KeyValues":
        """The given rows. Rows that stay K to a group copy nothing, or only whole groups where groups are dropped."""
        groups = rows.groups(self.copies)
        if groups is None:
            found = self.unshare()
            k, v, valid, seen = (x.index_select(0, rows.index) for x in (found.k, found.v, found.valid, found.seen))
            return KeyValues(k, v, valid, seen)
        visible, seen = rows.take(self.visible), rows.take(self.seen)
        if groups == list(range(len(self.k))):
            buffer = self._buffer, self._end
            same = BranchedKeyValues((self.k, self.v), visible, seen, self.copies, self.shared, buffer)
            attempt = self.since and self.since % MERGE == 0 and self.k.device.type == "cpu"
            return same.merged() if attempt else same
        kept = torch.tensor(groups, dtype=torch.int64, device=self.k.device)  # also where there are none
        entries = self.k.index_select(0, kept), self.v.index_select(0, kept)
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
        taken = p + n * torch.arange(m, device=self.k.device) + paths[:, 0, :m]  # [G, m]
        group = torch.arange(len(self.k), device=self.k.device)[:, None]

        def merge(x: Tensor) -> Tensor:
            return torch.cat([x[:, :p], x[group, taken], x[:, p + n * m :]], 1)

        marks = self.visible.gather(1, taken.repeat_interleave(n, 0))
        visible = torch.cat([self.visible[:, :p], marks, self.visible[:, p + n * m :]], 1)
        return BranchedKeyValues((merge(self.k), merge(self.v)), visible, self.seen, n, p + m)

    def unshare(self) -> KeyValues:
        """The keys and values of every row by itself."""
        n, rows = self.copies, len(self.visible)
        device = self.k.device
        shared = torch.arange(self.shared, device=device).expand(rows, -1)
        since = self._paths()
        place = torch.cat([shared, since + self.shared + n * torch.arange(since.shape[1], device=device)], 1)
        group = torch.arange(rows, device=device)[:, None] // n
        return KeyValues(self.k[group, place], self.v[group, place], self.visible.gather(1, place), self.seen)

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
    def memory_name(self) -> str:
        """Its name in reports."""
        return "source"

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.valid.shape[0] * self.copies

    def select_rows(self, rows: Rows) -> "Encoded":
        """The given rows. A source of which rows are taken several times in a row is stored once."""
        sources = [row // self.copies for row in rows.listed]
        copies = _copies(sources)
        kept = sources[::copies]
        if kept == list(range(len(self.valid))):
            return Encoded(self.layers, self.valid, copies)
        index = torch.tensor(kept, device=self.valid.device, dtype=torch.int64)
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
