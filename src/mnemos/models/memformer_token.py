"""A token of a Memformer in operators alone, as an exported program needs it: rows may be at any places."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mnemos.memory.exported import changed_if_any
from mnemos.memory.grid import Unfinished
from mnemos.memory.slots import SlotState
from mnemos.types import map_state

from .memformer_blocks import DecoderCache, Read

if TYPE_CHECKING:
    from .memformer import Memformer, MemformerState

Past = tuple[Tensor, Tensor, SlotState | None]  # of the segments before: encoded, valid and memory of a state


def memformer_token(model: "Memformer", x: Tensor, state: "MemformerState") -> tuple[Tensor, "MemformerState"]:
    """The decoder's output for a token [B, 1] of each row after a `widened` state, in operators alone."""
    length = model.config.segment
    place, past = state.seen % length, (state.encoded, state.valid, state.memory)
    begins, ends = place == 0, place == length - 1
    encoded, valid = changed_if_any(
        state.seen == 0, lambda past, fresh: model.begun(past[0], past[1], fresh), past[:2], state.seen == 0
    )
    slots = model.slots(state.memory) if model.decoder.memory else None
    read = Read(encoded, valid, slots)

    def sources(caches: tuple[DecoderCache, ...], read: Read) -> tuple[DecoderCache, ...]:
        # For rows within a segment the result is the same again.
        pairs = zip(model.decoder.blocks, caches, strict=True)
        return tuple(cache._replace(sources=block.keys_values(read.given)) for block, cache in pairs)

    caches = changed_if_any(begins, sources, state.layers, read)
    y, caches = model.decoder(model.dropout(model.embedding(x)), None, place, read, caches)
    at = place[:, None] == torch.arange(length, device=x.device)
    segment = Unfinished(torch.where(at, x, state.pending), state.pending_valid | at)

    def written(past: Past, segment: Unfinished, ends: Tensor) -> Past:
        # The segments of the other rows are written too, and that is dropped: all of their tokens count.
        new = model.write(Unfinished(segment.tokens, segment.valid | ~ends[:, None]), False, past[2])

        def chosen(old: Tensor, x: Tensor) -> Tensor:
            return torch.where(ends.view(-1, *[1] * (x.dim() - 1)), x.to(old.dtype), old)

        found: Past = map_state(chosen, past, new)
        return found

    past = changed_if_any(ends, written, (encoded, valid, state.memory), segment, ends)
    tokens, marks = segment.tokens.masked_fill(ends[:, None], 0), segment.valid & ~ends[:, None]
    layers = tuple(cache.after(ends) for cache in caches)
    encoded, valid, memory = past
    return y, type(state)(state.seen + 1, memory, encoded, valid, tokens, marks, layers)
