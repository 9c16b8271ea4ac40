"""The keys and values of encoded sources, stored once per source however many rows read them."""

import math

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.states import Rows, SharedRows


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

    def unshared(self) -> "Encoded":
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
