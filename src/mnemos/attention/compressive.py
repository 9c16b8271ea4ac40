"""The Compressive Transformer's attention (Rae et al. 2019): relative attention over slots, memory and segment."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.config import AttentionConfig, check_fields
from mnemos.memory.gated_cache import own_weight
from mnemos.modes import reads_without_waiting
from mnemos.ops.dense_layer import Linear, dense
from mnemos.ops.padding import padding_first, take
from mnemos.registry import register
from mnemos.types import Device, InputError, add_auxiliary_loss

from .relative import RelativeHeads
from .softmax import attend, open_empty_rows

Compression = Literal["convolution", "mean", "max"]


@register
@dataclass(frozen=True)
class CompressiveConfig(AttentionConfig):
    """Relative attention over the segment, a memory of inputs before it, and slots that compress older inputs.

    Attributes:
        memory: the number of tokens kept as they are; at least `ratio`.
        compressed: the number of slots; they stand for compressed·ratio tokens before the memory.
        ratio: the number of tokens that become one slot.
        compression: how. "convolution" is learned; "mean" and "max" are those of each channel.
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
    reconstruction: float = 1.0
    same_length: bool = False
    clamp: int = 0
    detached: bool = True

    @property
    def causal_modes(self) -> frozenset[bool]:
        # A memory of earlier tokens is for causal attention only; otherwise `RelativeConfig` serves.
        return frozenset({True})

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "CompressiveAttention":
        return CompressiveAttention(dim, num_heads, causal, dropout, self)


@exportable
class CompressedSegments(NamedTuple):
    """The inputs of a layer at the last tokens of every row, and slots for those before them; a row of zeros is new.

    slots [B, K, D]: compressed inputs, the newest last; filled [B, K] bool: those that may be attended to. x [B, N, D]:
    the last N inputs; valid [B, N] bool: those that are neither padding nor compressed. seen [B] int64: valid tokens
    since the row began. The size is constant: a new row has the space that a long one needs.
    """

    slots: Tensor
    filled: Tensor  # no field's name begins with another's: torch.export replaces them as text
    x: Tensor
    valid: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        return "compressed segments"

    def detach(self) -> "CompressedSegments":
        """The same values without the graph that computed them."""
        return CompressedSegments(*(part.detach() for part in self))


class Compressor(nn.Module):
    """`slots, filled = compressor(x, valid)`: N inputs of each row become N/ratio slots.

    x [B, N, D]; valid [B, N] bool: padding does not influence a slot; a convolution reads it as zeros. slots
    [B, N/ratio, D], finite; filled [B, N/ratio] bool: those of at least one valid input. The convolution has kernel and
    stride of the ratio, so it is one product: `linear.weight` [D, ratio·D] is its weight [D, D, ratio] with the last
    two axes exchanged.
    """

    def __init__(self, compression: Compression, dim: int, ratio: int) -> None:
        super().__init__()
        self.compression, self.ratio = compression, ratio
        self.linear = Linear(ratio * dim, dim) if compression == "convolution" else None

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        x, valid = x.unflatten(1, (-1, self.ratio)), valid.unflatten(1, (-1, self.ratio))
        filled, valid = valid.any(-1), valid[..., None]
        if self.linear is not None:
            return self.linear((x * valid).flatten(2)), filled
        if self.compression == "mean":
            return (x * valid).sum(2) / valid.sum(2).clamp(min=1), filled
        return x.masked_fill(~valid, -torch.inf).amax(2).masked_fill(~filled[..., None], 0), filled


class CompressiveAttention(RelativeHeads[CompressedSegments]):
    """Multi-head attention over [slots; memory; segment]: `y, state = layer(x, state=None, mask=None)`; causal.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. The state is a `CompressedSegments`: the layer's inputs at
    the last `memory` tokens, and K slots for the ratio·K tokens before them. Scores are those of `RelativeAttention`
    with positions counted over slots, memory and segment in a row, as the paper concatenates them. The model around the
    layer needs no positions (`position="none"`).

    At the end of a call tokens move from the memory into slots, in groups of `ratio` counted from the beginning of a
    row: a group as soon as one of its tokens is older than the last `memory` ones. So the uncompressed inputs are
    `memory` tokens, or up to ratio − 1 fewer, none is lost, and the slots are the same however the inputs were cut into
    calls. What a query reads depends on the cuts, as in Transformer-XL (splits = "segments").

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
        check_fields(c, "attention")
        if not causal:
            raise InputError(
                "compressive attention: expected causal=True, its only mode, found causal=False; use RelativeConfig"
            )
        if c.ratio < 1 or c.memory < c.ratio or c.compressed < 1:
            raise InputError(
                "expected a ratio of at least 1, a memory of at least as many tokens and at least 1 compressed slot, "
                f"found ratio {c.ratio}, memory {c.memory}, compressed {c.compressed}; change one"
            )
        if c.reconstruction < 0:
            raise InputError(
                f"reconstruction: expected a weight of at least 0, found {c.reconstruction}; use 0 for none"
            )
        if c.compression == "convolution" and c.detached and not c.reconstruction:
            raise InputError(
                f"compression {c.compression!r}: expected something that trains it, found reconstruction 0 and a "
                "detached memory; set one of them, or use another compression"
            )
        reach = c.memory + c.compressed
        window = reach + 1 if c.same_length else None
        super().__init__(dim, num_heads, causal, dropout, "segments", reach, c.clamp, c.detached, window)
        self.config, self.compressor = c, Compressor(c.compression, dim, c.ratio)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> CompressedSegments:
        c, like = self.config, torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype)
        return CompressedSegments(
            like.new_zeros(batch_size, c.compressed, self.dim),
            like.new_zeros(batch_size, c.compressed, dtype=torch.bool),
            like.new_zeros(batch_size, c.memory, self.dim),
            like.new_zeros(batch_size, c.memory, dtype=torch.bool),
            like.new_zeros(batch_size, dtype=torch.int64),
        )

    def check_state(self, state: CompressedSegments, batch_size: int) -> None:
        c, shapes = self.config, type(state).__name__
        slots, inputs = (batch_size, c.compressed, self.dim), (batch_size, c.memory, self.dim)
        if isinstance(state, CompressedSegments):
            if state.slots.shape == slots and state.x.shape == inputs:
                return
            shapes = f"slots {list(state.slots.shape)} and inputs {list(state.x.shape)}"
        raise InputError(
            f"expected a state of slots {list(slots)} and inputs {list(inputs)}, found {shapes}; use initial_state"
        )

    def compute(
        self, x: Tensor, state: CompressedSegments | None, mask: Tensor | None
    ) -> tuple[Tensor, CompressedSegments | None]:
        # --- what is read: slots, memory and segment, without what no row can attend to ---
        c, (b, t, _) = self.config, x.shape
        count: Tensor | int = t if mask is None else mask.sum(1)
        valid = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask
        before = self.empty(b, x.device, x.dtype) if state is None else state
        before = before.detach() if c.detached else before
        whole = torch.cat([before.slots, before.x, x], 1)
        whole_valid = torch.cat([before.filled, before.valid, valid], 1)
        if mask is not None and state is not None:  # and then in front of what its row has read before
            front = padding_first(whole.shape[1] - t, mask)
            whole, whole_valid = take(whole, front), take(whole_valid, front)
        first = whole.shape[1] - t
        if state is not None:
            readable = whole_valid[:, :first].any(0)
            if not reads_without_waiting(readable):
                first = 0
            elif bool(readable.any()):
                first = int(readable.int().argmax())
        heads = self.read(
            x, whole[:, first:], whole_valid[:, first:] if mask is not None or state is not None else None
        )

        # --- how many groups leave the memory: of each row `leaving` [B], of all rows `most` at most ---
        inputs, present = whole[:, c.compressed :], whole_valid[:, c.compressed :]
        if mask is not None and state is not None:  # padding in front has moved slots here
            present = present & (torch.arange(present.shape[1], device=x.device) >= (~mask).sum(1, keepdim=True))
        seen = before.seen + count
        passed = self._groups_passed(seen)
        leaving = passed - self._groups_passed(before.seen)
        most = c.compressed
        if state is None:  # known without reading a tensor
            most = min(most, max(0, -(-(t - c.memory) // c.ratio)))
        if isinstance(t, int):  # else an exported program, which has one form for all T
            most = min(most, -(-t // c.ratio))
        if reads_without_waiting(leaving):
            most = min(most, int(leaving.max()) if b else 0)

        # --- they become slots ---
        slots, filled, n = before.slots, before.filled, inputs.shape[1]
        if most:
            index = ((passed - most) * c.ratio - seen + n)[:, None] + torch.arange(most * c.ratio, device=x.device)
            # A row of fewer groups than `most` has compressed inputs in their place, or, for those before it, the first
            # one. It is compressed too: a row whose first input is the first of a group moves as many as any.
            index, rows = index.clamp(min=0), torch.arange(b, device=x.device)[:, None]
            old, old_valid = inputs[rows, index], present[rows, index]
            new, new_filled = self.compressor(old.detach() if c.detached else old, old_valid)
            if self.training and c.compression == "convolution" and c.reconstruction:  # also in replay's first pass
                # Through time the task's loss trains the compression too; this loss must not go on into the inputs.
                alone = new if c.detached else self.compressor(old.detach(), old_valid)[0]
                loss = self._reconstruction(x, valid, old.detach(), old_valid, alone, new_filled)
                add_auxiliary_loss(c.reconstruction * loss)
            moved = leaving.clamp(max=most)
            slots, filled = _push(slots, new, moved), _push(filled, new_filled, moved)

        # --- what is kept: a copy, because a view would keep the keys' inputs of the whole call alive ---
        position = seen[:, None] + torch.arange(-c.memory, 0, device=x.device)
        present = present[:, n - c.memory :] & (position >= (passed * c.ratio)[:, None])
        after = CompressedSegments(slots, filled, inputs[:, n - c.memory :].clone(), present, seen)
        return heads, after.detach() if c.detached else after

    def _groups_passed(self, seen: Tensor) -> Tensor:
        """The number of groups that are compressed after `seen` tokens [B]."""
        c = self.config
        return ((seen - c.memory).clamp(min=0) + c.ratio - 1) // c.ratio

    def _reconstruction(
        self, x: Tensor, asking: Tensor, old: Tensor, old_valid: Tensor, slots: Tensor, slots_valid: Tensor
    ) -> Tensor:
        """The mean over valid queries and channels of |attend(x, old) − attend(x, slots)|², which trains `slots`."""
        with torch.no_grad():
            q = self.query(x).unflatten(-1, (self.num_heads, -1))
        weight = own_weight(self.key_value).detach()

        def read(inputs: Tensor, valid: Tensor) -> Tensor:
            k, v = dense(inputs, weight).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
            return attend(q, k, v, open_empty_rows(valid)[:, None, None], False)

        with torch.no_grad():
            wanted = read(old, old_valid)
        error = (read(slots, slots_valid) - wanted).square().mean((2, 3))
        counted = asking & old_valid.any(1, keepdim=True)
        return (error * counted).sum() / counted.sum().clamp(min=1)


def _push(slots: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """The last K of `slots` [B, K, ..] followed by the last `count` [B] of `new` [B, M, ..]."""
    k, m = slots.shape[1], new.shape[1]
    column = torch.arange(k, device=slots.device)
    index = column + count[:, None]
    index = torch.where(index < k, index, column + m)
    rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
    return torch.cat([slots, new.to(slots.dtype)], 1)[rows, index]
