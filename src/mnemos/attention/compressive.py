"""The Compressive Transformer's attention (Rae et al. 2019): relative attention over slots, memory and segment."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.config import AttentionConfig, check_fields
from mnemos.memory.compressive import (
    Blocks,
    CompressedSegments,
    Compression,
    CompressionGrid,
    compressor,
    push,
)
from mnemos.memory.projection import own_weight
from mnemos.modes import reads_without_waiting
from mnemos.ops.padding import padding_first, take, valid_last
from mnemos.ops.relative_position import relative_weights
from mnemos.registry import register
from mnemos.types import Device, InputError, add_auxiliary_loss

from .relative import RelativeHeads
from .softmax import attend, open_empty_rows


@register
@dataclass(frozen=True)
class CompressiveConfig(AttentionConfig):
    """Relative attention over the segment, a memory of inputs before it, and slots that compress older inputs.

    Attributes:
        memory: the number of tokens kept as they are; at least `block`.
        compressed: the number of slots; they stand for compressed·ratio tokens before the memory.
        ratio: the number of tokens that become one slot.
        compression: how. "convolution" and "dilated" are learned; "most-used" keeps the tokens that were attended to
            most, and computes the weights of the attention twice.
        block: tokens that are compressed at once, a multiple of the ratio; 0: the ratio. It matters for "most-used",
            which keeps the best block/ratio tokens of a block.
        reconstruction: weight of the attention-reconstruction loss, which trains a learned compression; 0: none.
        same_length: a query reads exactly memory + compressed positions before it; otherwise the later queries of a
            segment read more than the first one.
        clamp: the greatest distance in positions; larger distances count as this one. 0: no limit.
        detached: no gradient flows into an earlier call. If False it does, and reaches the compression too: training
            by back-propagation through time, which memory replay can carry.
    """

    name: ClassVar[str] = "compressive"
    knows_distances: ClassVar[bool] = True
    at_evaluation: ClassVar[tuple[str, ...]] = ("memory", "compressed", "same_length", "clamp")
    memory: int = 64
    compressed: int = 64
    ratio: int = 4
    compression: Compression = "convolution"
    block: int = 0
    reconstruction: float = 1.0
    same_length: bool = False
    clamp: int = 0
    detached: bool = True

    @property
    def causal_modes(self) -> frozenset[bool]:
        """A memory of earlier tokens is for causal attention only; otherwise `RelativeConfig` serves."""
        return frozenset({True})

    @property
    def remembers(self) -> bool:
        """It has a memory of segments, and slots."""
        return True

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "CompressiveAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return CompressiveAttention(dim, num_heads, causal, dropout, self)


class CompressiveAttention(RelativeHeads[CompressedSegments]):
    """Multi-head attention over [slots; memory; segment]: `y, state = layer(x, state=None, mask=None)`; causal.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. The state is a `CompressedSegments`: the layer's inputs at
    the last `memory` tokens, and K slots for the ratio·K tokens before them. Scores are those of `RelativeAttention`
    with positions counted over slots, memory and segment in a row, as the paper concatenates them. The model around the
    layer needs no positions (`position="none"`).

    At the end of a call whole blocks of tokens move from the memory into slots (`CompressionGrid`: on an absolute grid,
    so the slots of a layer's inputs are the same however these were cut into calls, except for "most-used"). What a
    query reads depends on the cuts, as in Transformer-XL (splits = "segments").

    Training a learned compression: in training mode each call that compresses adds an auxiliary loss
    (`mnemos.add_auxiliary_loss`), the paper's attention reconstruction: the mean of
    |attend(x, old inputs) − attend(x, their slots)|², with the layer's own queries, keys and values and without
    distances. The paper takes the norm; the mean does not grow with the batch. Its gradient reaches the compression and
    nothing else; the keys and values of slots, as of all inputs, still train the projections through the output. The
    paper's other loss, a decoder that reproduces the inputs from the slots, is left out: the paper found it worse.

    Cost of a call with N = compressed + memory + T: that of `RelativeAttention`, plus O(T·D²) for learned compression
    and O(T²·D) for the loss. The state has (compressed + memory)·D numbers per row at any length.
    Raises InputError if D is not divisible by H, for sizes that do not fit, or a state of another shape.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = True,
        dropout: float = 0.0,
        config: CompressiveConfig | None = None,
    ) -> None:
        c = config or CompressiveConfig()
        block = c.block or c.ratio
        _check(c, block, causal)
        reach = c.memory + c.compressed
        window = reach + 1 if c.same_length else None
        super().__init__(dim, num_heads, causal, dropout, "segments", reach, c.clamp, c.detached, window)
        self.config, self.grid = c, CompressionGrid(c.memory, block, window)
        self.compressor = compressor(c.compression, dim, c.ratio, block)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> CompressedSegments:
        """No tokens."""
        sizes = self.config.compressed, self.config.memory, self.dim
        return CompressedSegments.empty(batch_size, sizes, self.compressor.needs_usage, device, dtype)

    def check_state(self, state: CompressedSegments, batch_size: int) -> None:
        """Raise InputError unless the state holds slots [B, K, D] and inputs [B, N, D] of this layer's sizes."""
        c, found = self.config, type(state).__name__
        slots, inputs = (batch_size, c.compressed, self.dim), (batch_size, c.memory, self.dim)
        if isinstance(state, CompressedSegments):
            if state.slots.shape == slots and state.x.shape == inputs:
                return
            found = f"slots {list(state.slots.shape)} and inputs {list(state.x.shape)}"
        raise InputError(
            f"expected a state of slots {list(slots)} and inputs {list(inputs)}, found {found}; use initial_state"
        )

    def compute_heads(
        self, x: Tensor, state: CompressedSegments | None, mask: Tensor | None
    ) -> tuple[Tensor, CompressedSegments | None]:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        b, t, _ = x.shape
        order: Tensor | None = None
        count: Tensor | int = t
        if mask is not None:  # distances are counted in columns: padding goes in front of its row
            order, count = valid_last(mask), mask.sum(1)
            x, mask = take(x, order), take(mask, order)
        valid = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask
        before = self.empty(b, x.device, x.dtype) if state is None else state
        before = before.detach() if self.config.detached else before
        whole, whole_valid = (
            torch.cat([before.slots, before.x, x], 1),
            torch.cat([before.filled, before.valid, valid], 1),
        )
        usage = before.usage
        if self.compressor.needs_usage:
            usage = F.pad(usage, (self.config.compressed, t))
        if mask is not None and state is not None:  # and then in front of what its row has read before
            front = padding_first(whole.shape[1] - t, mask)
            whole, whole_valid = take(whole, front), take(whole_valid, front)
            usage = take(usage, front) if self.compressor.needs_usage else usage
        first = whole.shape[1] - t if state is None else _unused(whole_valid, t)
        context, seen = whole[:, first:], whole_valid[:, first:] if mask is not None or state is not None else None
        heads = self.read(x, context, seen)
        k = self.config.compressed
        if self.compressor.needs_usage:
            new_usage = F.pad(self.measure_attention(x, context, seen, valid), (first, 0))
            usage = (usage + new_usage.to(usage.dtype))[:, k:]
        most = -(-k // (self.grid.block // self.config.ratio))
        if state is None:  # known without reading a tensor
            most = min(most, max(0, -(-(t - self.config.memory) // self.grid.block)))
        inputs, kept = whole[:, k:], whole_valid[:, k:]
        if mask is not None and state is not None:  # padding in front has moved slots here
            kept = kept & (torch.arange(kept.shape[1], device=x.device) >= (~mask).sum(1, keepdim=True))
        after = self._move_blocks(before, inputs, kept, usage, x, valid, count, most)
        heads = heads if order is None else take(heads, order.argsort(1))
        return heads, after.detach() if self.config.detached else after

    def _move_blocks(
        self,
        before: CompressedSegments,
        inputs: Tensor,
        valid: Tensor,
        usage: Tensor,
        x: Tensor,
        asking: Tensor,
        count: int | Tensor,
        most: int,
    ) -> CompressedSegments:
        """The state after the segment x: blocks that are older than the memory become slots, the last `most` at most.

        inputs [B, memory + T, D], valid and usage: memory and segment; asking [B, T] bool: the valid tokens of x;
        count: their number, of each row [B] if they differ.
        """
        c = self.config
        slots, filled, seen = before.slots, before.filled, before.seen + count
        blocks = self.grid.leaving(inputs, valid, usage, before.seen, seen, x.shape[1], most)
        if blocks is not None:
            new, new_valid = self._compress(blocks, x, asking)
            moved = blocks.moved * (self.grid.block // c.ratio)
            slots, filled = push(slots, new, moved), push(filled, new_valid, moved)
        n = inputs.shape[1] - c.memory
        kept = valid[:, n:] & self.grid.uncompressed(seen)
        # A copy, because a view would keep the keys' inputs of the whole call alive.
        return CompressedSegments(slots, filled, inputs[:, n:].clone(), kept, usage[:, n:], seen)

    def _compress(self, blocks: Blocks, x: Tensor, asking: Tensor) -> tuple[Tensor, Tensor]:
        """Slots and which are valid; adds the loss that trains a learned compression."""
        c, old = self.config, blocks.x.detach()
        slots, valid = self.compressor(old if c.detached else blocks.x, blocks.valid, blocks.usage)
        if self.training and self.compressor.learned and c.reconstruction:  # without gradient too: replay compares
            # Through time the task's loss trains the compression too; this loss must not go on into the inputs.
            alone = slots if c.detached else self.compressor(old, blocks.valid, blocks.usage)[0]
            loss = self._reconstruction(x, asking, old, blocks.valid, alone, valid)
            add_auxiliary_loss(c.reconstruction * loss)
        return slots, valid

    def _reconstruction(
        self, x: Tensor, asking: Tensor, old: Tensor, old_valid: Tensor, slots: Tensor, slots_valid: Tensor
    ) -> Tensor:
        """The mean over valid queries and channels of |attend(x, old) − attend(x, slots)|², which trains `slots`."""
        with torch.no_grad():
            q = self.query(x).unflatten(-1, (self.num_heads, -1))
        weight = own_weight(self.key_value).detach()

        def read(inputs: Tensor, valid: Tensor) -> Tensor:
            k, v = F.linear(inputs, weight).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
            return attend(q, k, v, open_empty_rows(valid)[:, None, None], False)

        with torch.no_grad():
            wanted = read(old, old_valid)
        error = (read(slots, slots_valid) - wanted).square().mean((2, 3))
        counted = asking & old_valid.any(1, keepdim=True)
        return (error * counted).sum() / counted.sum().clamp(min=1)

    @torch.no_grad()
    def measure_attention(self, x: Tensor, context: Tensor, mask: Tensor | None, asking: Tensor) -> Tensor:
        """The attention that each input of the context [B, N, D] received, a mean over heads: [B, N]."""
        n, heads = context.shape[1], (self.num_heads, -1)
        q, k = (
            self.query(x).unflatten(-1, heads),
            F.linear(context, own_weight(self.key_value)[: self.dim]).unflatten(-1, heads),
        )
        r = self.position(self.distances(n, 1 - x.shape[1], x)).unflatten(-1, heads)
        weights = relative_weights(q, k, r, self.content_bias, self.position_bias, True, mask, self.window)
        return (weights.mean(0) * asking[..., None]).sum(1)


def _unused(valid: Tensor, t: int) -> int:
    """How many positions at the front no row can attend to, of all but the last T; 0 where reading would wait."""
    n = valid.shape[1] - t
    if not reads_without_waiting(valid):
        return 0
    some_row = valid[:, :n].any(0)
    return int(some_row.int().argmax()) if bool(some_row.any()) else n


def _check(c: CompressiveConfig, block: int, causal: bool) -> None:
    check_fields(c, "attention")
    if not causal:
        raise InputError(
            "compressive attention: expected causal=True, its only mode, found causal=False; use RelativeConfig"
        )
    if c.ratio < 1 or c.block < 0 or block % c.ratio:
        raise InputError(
            f"expected a ratio of at least 1 and a block that is a multiple of it, or 0; found ratio {c.ratio}, block "
            f"{c.block}; change one"
        )
    if c.memory < block or c.compressed < block // c.ratio:
        raise InputError(
            f"expected a memory of at least one block, {block} tokens, and {block // c.ratio} compressed slots for it; "
            f"found memory {c.memory}, compressed {c.compressed}; raise them"
        )
    if c.reconstruction < 0:
        raise InputError(f"reconstruction: expected a weight of at least 0, found {c.reconstruction}; use 0 for none")
    if c.compression in ("convolution", "dilated") and c.detached and not c.reconstruction:
        raise InputError(
            f"compression {c.compression!r}: expected something that trains it, found reconstruction 0 and a detached "
            "memory; set one of them, or use another compression"
        )
