"""The memory of a fused step, as its kernel reads and writes it: running sums, or keys and values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import literal
from mnemos.attention.linear import PlacedSums
from mnemos.memory.branched import BranchedKeyValues, Encoded
from mnemos.memory.key_values import KeyValues
from mnemos.ops.linear import LinearState
from mnemos.types import State

KIND: Any = {"dtype": torch.float32, "device": "cpu"}  # explicit: the defaults may differ
NO_SUMS, NO_KEYS = [0] * 4, [0] * 5  # `Sums` and `Keys` of native/decode.h
NOTHING = [0, 0, 1, 0]  # a `Visible` without entries


class Prepared(NamedTuple):
    """What a step hands to the kernel, and the states that the kernel then completes.

    words: a `Sums` or a `Keys` per layer; visible: a `Visible`, all of native/decode.h. held: what their addresses
    belong to.
    """

    words: list[list[int]]
    visible: list[int]
    layers: tuple[State, ...]
    held: tuple[Tensor, ...]


def prepared_sums(layers: Sequence[State], shape: tuple[int, ...], seen: Tensor | None) -> Prepared | None:
    """For linear attention with states s [B, H, D, D]; None where the kernel cannot read a state.

    seen [B]: of the model's state where positions are rotary, which that of every layer must equal; else None.
    """
    given: list[LinearState] = []
    counted = seen
    for layer in layers:
        if (type(layer) is PlacedSums) != (seen is not None):
            return None
        if isinstance(layer, PlacedSums) and seen is not None:
            if layer.seen is not counted and not torch.equal(layer.seen, seen):
                return None
            counted, layer = layer.seen, layer.sums
        if type(layer) is not LinearState or layer.s.shape != shape or layer.z.shape != shape[:3]:
            return None
        if not all(x.dtype == torch.float32 and x.is_contiguous() and is_literal(x) for x in layer):
            return None
        given.append(layer)
    n = len(given)
    s, z = torch.empty(n, *shape, **KIND), torch.empty(n, *shape[:3], **KIND)
    new: tuple[Any, ...] = tuple(map(LinearState, s.unbind(), z.unbind()))
    words = [[x.data_ptr() for pair in both for x in pair] for both in zip(given, new, strict=True)]
    if seen is not None:
        later = seen + 1
        new = tuple(PlacedSums(sums, later) for sums in new)
    return Prepared(words, NOTHING, new, ())


def prepared_keys(
    layers: Sequence[Any], shape: tuple[int, int, int], window: int | None, seen: Tensor
) -> Prepared | None:
    """For softmax attention of `shape`: rows, heads and their width; None where the kernel cannot read a state.

    The kernel has one number of entries and one set of marks for all layers. seen [B]: of the model's state.
    """
    rows, *heads = shape
    first: Any = layers[0]
    if type(first) not in (KeyValues, BranchedKeyValues) or len(first.seen) != rows:
        return None
    branched = isinstance(first, BranchedKeyValues)
    if not all(_readable(layer, heads) and _alike(layer, first, seen) for layer in layers):
        return None
    visible = first.visible_after() if branched else None
    words, kept, attended = [], [], []
    for layer in layers:
        new: Any = layer.with_room(visible, first.seen + 1) if branched else layer.with_room()
        attended.append(new if window is None else new.last(window))
        kept.append(new if window is None else new.last(window - 1))
        words.append(_keys(attended[-1].k, attended[-1].v))
    marks = _marks(attended[0]).contiguous()
    copies = first.copies if branched else 1
    return Prepared(words, [marks.data_ptr(), marks.shape[1], copies, 0], tuple(kept), (marks,))


def prepared_source(source: Encoded, shape: tuple[int, int, int], layers: int) -> Prepared | None:
    """For the attention to a source; None where the kernel cannot read it."""
    rows, *heads = shape
    if len(source.layers) != layers or source.rows != rows or source.valid.dtype != torch.bool:
        return None
    words = []
    for k, v in source.layers:
        if [*k.shape[2:]] != heads or k.shape[:2] != source.valid.shape or not _same_layout(k, v):
            return None
        words.append(_keys(k, v))
    marks = source.valid.contiguous()
    return Prepared(words, [marks.data_ptr(), marks.shape[1], source.copies, 1], (), (marks,))


def _keys(k: Tensor, v: Tensor) -> list[int]:
    return [k.data_ptr(), v.data_ptr(), *k.stride()[:3]]


def _readable(layer: Any, heads: list[int]) -> bool:
    """Whether the kernel can read a layer's keys and values, of which there is at least one entry."""
    if type(layer) not in (KeyValues, BranchedKeyValues) or not layer.k.dtype == layer.v.dtype == torch.float32:
        return False
    fits = layer.k.shape[1] > 0 and [*layer.k.shape[2:]] == heads and layer.k.shape == layer.v.shape
    return fits and is_literal(layer.k) and is_literal(layer.v)


def _alike(layer: Any, first: Any, seen: Tensor) -> bool:
    """Whether a layer has read the tokens that the first one has, and its rows attend to the same entries."""
    if type(layer) is not type(first) or layer.k.shape != first.k.shape or not torch.equal(layer.seen, seen):
        return False
    if isinstance(layer, BranchedKeyValues) and (layer.copies, layer.shared) != (first.copies, first.shared):
        return False
    return layer is first or torch.equal(_marks(layer), _marks(first))


def _marks(layer: Any) -> Tensor:
    """Which entries a row attends to."""
    marks: Tensor = layer.visible if isinstance(layer, BranchedKeyValues) else layer.valid
    return marks


def _same_layout(k: Tensor, v: Tensor) -> bool:
    """Whether both are float32, with one layout whose last axis lies together."""
    if not (k.dtype == v.dtype == torch.float32 and is_literal(k) and is_literal(v)):
        return False
    return k.shape == v.shape and k.stride() == v.stride() and (k.stride(3) == 1 or k.shape[3] == 1)


def is_literal(x: Tensor) -> bool:
    """Whether the tensor's memory on the CPU holds its numbers as they are."""
    return x.is_cpu and literal(x)
