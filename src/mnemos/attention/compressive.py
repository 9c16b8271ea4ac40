"""The Compressive Transformer's attention (Rae et al. 2019): relative attention over slots, memory and segment."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.config import AttentionConfig, check_fields
from mnemos.memory.gated_cache import own_weight
from mnemos.modes import reads_without_waiting
from mnemos.ops.padding import padding_first, take, valid_last
from mnemos.ops.relative_position import relative_weights
from mnemos.registry import register
from mnemos.types import Device, InputError, add_auxiliary_loss

from .relative import RelativeHeads
from .softmax import attend, open_empty_rows

Compression = Literal["convolution", "mean", "max", "most-used", "dilated"]


@exportable
class CompressedSegments(NamedTuple):
    """The inputs of a layer at the last tokens of every row, and slots for those before them; a row of zeros is new.

    slots [B, K, D]: compressed inputs, the newest last; filled [B, K] bool: those that may be attended to. x [B, N, D]:
    the last N inputs; valid [B, N] bool: those that are neither padding nor compressed. usage [B, N], or [B, 0] where
    no compression needs it: the attention that each of them received, added over queries. seen [B] int64: valid tokens
    since the row began. The size is constant: a new row has the space that a long one needs.
    """

    slots: Tensor
    filled: Tensor  # no field's name begins with another's: torch.export replaces them as text
    x: Tensor
    valid: Tensor
    usage: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "compressed segments"

    @staticmethod
    def empty(
        batch: int,
        sizes: tuple[int, int, int],
        with_usage: bool,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> "CompressedSegments":
        """The state before the first token of B rows. sizes: K slots, N inputs, width D; with_usage: has a `usage`."""
        slots, inputs, dim = sizes

        def zeros(*shape: int, dtype: torch.dtype | None) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        return CompressedSegments(
            zeros(slots, dim, dtype=dtype),
            zeros(slots, dtype=torch.bool),
            zeros(inputs, dim, dtype=dtype),
            zeros(inputs, dtype=torch.bool),
            zeros(inputs if with_usage else 0, dtype=dtype),
            zeros(dtype=torch.int64),
        )

    def detach(self) -> "CompressedSegments":
        """The same values without the graph that computed them."""
        return CompressedSegments(*(part.detach() for part in self))


class Blocks(NamedTuple):
    """The blocks of `block` inputs that leave the memory in a call: of each row at most M, the newest last.

    x [B, M·block, D]; valid [B, M·block] bool. usage [B, M·block]: the attention that each input received, per query
    that could attend to it; or [B, 0]. moved [B]: how many of the M blocks a row has. They are the last ones; the
    places before them hold inputs that are not valid.
    """

    x: Tensor
    valid: Tensor
    usage: Tensor
    moved: Tensor


class CompressionGrid(NamedTuple):
    """When inputs are compressed: in blocks of `block` tokens, counted from the beginning of a row.

    A block is compressed as soon as one of its tokens is older than the last `memory` tokens at the end of a call. The
    uncompressed inputs are then `memory` tokens, or up to block − 1 fewer, and none is lost. Rows may be at different
    places, and the blocks are the same wherever a sequence is cut into calls.
    """

    memory: int
    block: int
    window: int | None = None  # the number of positions that a query reads, with its own; None: all before it

    def count_passed(self, seen: Tensor) -> Tensor:
        """The number of blocks that are compressed after `seen` tokens [B]."""
        return ((seen - self.memory).clamp(min=0) + self.block - 1) // self.block

    def leaving(
        self, x: Tensor, valid: Tensor, usage: Tensor, before: Tensor, after: Tensor, t: int, most: int
    ) -> Blocks | None:
        """The blocks, `most` at most, that T tokens push out of the inputs x [B, memory + T, D], which end with them.

        valid [B, memory + T] bool, usage [B, memory + T] or [B, 0], before and after [B]: tokens seen before and after
        these. None: no block leaves in any row.
        """
        last = self.count_passed(after)
        count = last - self.count_passed(before)
        if isinstance(t, int):  # else an exported program, which has one form for all T
            most = min(most, -(-t // self.block))
        if reads_without_waiting(count):
            most = min(most, int(count.max()) if count.numel() else 0)
        if not most:
            return None
        n = x.shape[1]
        places = torch.arange(most * self.block, device=x.device)
        index = ((last - most) * self.block - after + n)[:, None] + places
        # A row with fewer blocks than `most` finds compressed inputs, or the first one for those before it. That one is
        # compressed too: a row whose first input is the first of a block moves as many blocks as any.
        index, rows = index.clamp(min=0), torch.arange(x.shape[0], device=x.device)[:, None]
        if usage.shape[1]:
            asked = valid.flip(1).cumsum(1).flip(1)  # queries at this token or later
            if self.window is not None:  # without those that are too far behind it
                asked = asked - F.pad(asked, (0, self.window))[:, self.window :]
            usage = (usage / asked.clamp(min=1))[rows, index]
        return Blocks(x[rows, index], valid[rows, index], usage, count.clamp(max=most))

    def uncompressed(self, seen: Tensor) -> Tensor:
        """Which of the last `memory` inputs are in no compressed block after `seen` tokens [B], [B, memory] bool."""
        position = seen[:, None] + torch.arange(-self.memory, 0, device=seen.device)
        return position >= (self.count_passed(seen) * self.block)[:, None]


def push(kept: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """The last K of `kept` [B, K, ..] followed by the last `count` [B] of `new` [B, M, ..]."""
    k, m = kept.shape[1], new.shape[1]
    place = torch.arange(k, device=kept.device)
    index = place + count[:, None]
    index = torch.where(index < k, index, place + m)
    rows = torch.arange(kept.shape[0], device=kept.device)[:, None]
    return torch.cat([kept, new.to(kept.dtype)], 1)[rows, index]


class Compressor(nn.Module):
    """`slots, slots_valid = compressor(x, valid, usage)`: N inputs of each row become N/ratio slots.

    x [B, N, D], N divisible by the ratio; valid [B, N] bool: padding does not influence a slot; usage [B, N]: the
    average attention that an input received (only `MostUsed` reads it). slots [B, N/ratio, D]; slots_valid [B, N/ratio]
    bool: those with at least one valid input. Slots that are not valid are finite.
    """

    learned = False  # whether it has parameters, which a loss must train
    needs_usage = False  # whether `forward` reads `usage`

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.dim, self.ratio = dim, ratio

    def forward(self, x: Tensor, valid: Tensor, usage: Tensor) -> tuple[Tensor, Tensor]:
        valid = valid.unflatten(1, (-1, self.ratio))
        return self.slots(x.unflatten(1, (-1, self.ratio)), valid[..., None]), valid.any(-1)

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """Inputs x [B, n, ratio, D] and which are valid [B, n, ratio, 1] -> slots [B, n, D]."""
        raise NotImplementedError


class Mean(Compressor):
    """The mean of the valid inputs: mean pooling with kernel and stride of the ratio."""

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        return (x * valid).sum(2) / valid.sum(2).clamp(min=1)


class Max(Compressor):
    """The largest value of each channel among the valid inputs: max pooling with kernel and stride of the ratio."""

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        return x.masked_fill(~valid, -torch.inf).amax(2).masked_fill(~valid.any(2), 0)


class Convolution(Compressor):
    """A convolution with kernel and stride of the ratio, with a bias; it reads padding as zeros.

    `linear.weight` [D, ratio·D] is the convolution's weight [D, D, ratio] with its last two axes exchanged: because
    stride and kernel are equal, it is one product.
    """

    learned = True

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__(dim, ratio)
        self.linear = nn.Linear(ratio * dim, dim)

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        return self.linear((x * valid).flatten(2))


class Dilated(Compressor):
    """⌈log2 ratio⌉ convolutions of kernel 2 with dilations 1, 2, 4 …, with GELU between them.

    The stack of van den Oord et al. 2016; Rae et al. do not say how theirs is built. Only the outputs at the last input
    of each group are needed, and for them each layer halves the number of inputs. Reads padding as zeros; a group that
    is no power of 2 has zeros before its first input.
    """

    learned = True

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__(dim, ratio)
        self.levels = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(max(1, (ratio - 1).bit_length())))

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        x = F.pad(x * valid, (0, 0, 2 ** len(self.levels) - self.ratio, 0))
        for level, convolution in enumerate(self.levels):
            x = convolution((F.gelu(x) if level else x).unflatten(2, (-1, 2)).flatten(3))
        return x.squeeze(2)


class MostUsed(Compressor):
    """The block/ratio inputs of each block that received the most attention, in their order; the others are dropped.

    With block = ratio it keeps one input of each group.
    """

    needs_usage = True

    def __init__(self, dim: int, ratio: int, block: int) -> None:
        super().__init__(dim, ratio)
        self.block = block

    def forward(self, x: Tensor, valid: Tensor, usage: Tensor) -> tuple[Tensor, Tensor]:
        ranked = usage.masked_fill(~valid, -1).unflatten(1, (-1, self.block))
        kept = ranked.topk(self.block // self.ratio, -1).indices.sort(-1).values
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        index = (kept + self.block * torch.arange(kept.shape[1], device=x.device)[:, None]).flatten(1)
        return x[rows, index], valid[rows, index]


def compressor(name: Compression, dim: int, ratio: int, block: int) -> Compressor:
    """The compression function of that name: `ratio` inputs of width `dim` become one, in blocks of `block` inputs."""
    if name == "most-used":
        return MostUsed(dim, ratio, block)
    kinds: dict[str, type[Compressor]] = {"mean": Mean, "max": Max, "convolution": Convolution, "dilated": Dilated}
    return kinds[name](dim, ratio)


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
        check_fields(c, "attention")
        if not causal:
            raise InputError(
                "compressive attention: expected causal=True, its only mode, found causal=False; use RelativeConfig"
            )
        if c.ratio < 1 or c.block < 0 or block % c.ratio:
            raise InputError(
                f"expected a ratio of at least 1 and a block that is a multiple of it, or 0; found ratio {c.ratio}, "
                f"block {c.block}; change one"
            )
        if c.memory < block or c.compressed < block // c.ratio:
            raise InputError(
                f"expected a memory of at least one block, {block} tokens, and {block // c.ratio} compressed slots for "
                f"it; found memory {c.memory}, compressed {c.compressed}; raise them"
            )
        if c.reconstruction < 0:
            raise InputError(
                f"reconstruction: expected a weight of at least 0, found {c.reconstruction}; use 0 for none"
            )
        if c.compression in ("convolution", "dilated") and c.detached and not c.reconstruction:
            raise InputError(
                f"compression {c.compression!r}: expected something that trains it, found reconstruction 0 and a "
                "detached memory; set one of them, or use another compression"
            )
        reach = c.memory + c.compressed
        window = reach + 1 if c.same_length else None
        super().__init__(dim, num_heads, causal, dropout, "segments", reach, c.clamp, c.detached, window)
        self.config, self.grid = c, CompressionGrid(c.memory, block, window)
        self.compressor = compressor(c.compression, dim, c.ratio, block)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> CompressedSegments:
        sizes = self.config.compressed, self.config.memory, self.dim
        return CompressedSegments.empty(batch_size, sizes, self.compressor.needs_usage, device, dtype)

    def check_state(self, state: CompressedSegments, batch_size: int) -> None:
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
        # --- what is read: slots, memory and segment, without what no row can attend to ---
        b, t, _ = x.shape
        order: Tensor | None = None
        count: Tensor | int = t
        if mask is not None:  # distances are counted in columns: padding goes in front of its row
            order, count = valid_last(mask), mask.sum(1)
            x, mask = take(x, order), take(mask, order)
        valid = torch.ones(b, t, dtype=torch.bool, device=x.device) if mask is None else mask
        before = self.empty(b, x.device, x.dtype) if state is None else state
        before = before.detach() if self.config.detached else before
        whole = torch.cat([before.slots, before.x, x], 1)
        whole_valid = torch.cat([before.filled, before.valid, valid], 1)
        usage = before.usage
        if self.compressor.needs_usage:
            usage = F.pad(usage, (self.config.compressed, t))
        if mask is not None and state is not None:  # and then in front of what its row has read before
            front = padding_first(whole.shape[1] - t, mask)
            whole, whole_valid = take(whole, front), take(whole_valid, front)
            usage = take(usage, front) if self.compressor.needs_usage else usage
        first = whole.shape[1] - t
        if state is not None:
            read = whole_valid[:, :first].any(0)
            if not reads_without_waiting(read):
                first = 0
            elif bool(read.any()):
                first = int(read.int().argmax())
        context, seen = whole[:, first:], whole_valid[:, first:] if mask is not None or state is not None else None
        heads = self.read(x, context, seen)

        # --- blocks that are older than the memory become slots ---
        c, k = self.config, self.config.compressed
        if self.compressor.needs_usage:
            new_usage = F.pad(self.measure_attention(x, context, seen, valid), (first, 0))
            usage = (usage + new_usage.to(usage.dtype))[:, k:]
        most = -(-k // (self.grid.block // c.ratio))
        if state is None:  # known without reading a tensor
            most = min(most, max(0, -(-(t - c.memory) // self.grid.block)))
        inputs, kept = whole[:, k:], whole_valid[:, k:]
        if mask is not None and state is not None:  # padding in front has moved slots here
            kept = kept & (torch.arange(kept.shape[1], device=x.device) >= (~mask).sum(1, keepdim=True))
        slots, filled, tokens = before.slots, before.filled, before.seen + count
        blocks = self.grid.leaving(inputs, kept, usage, before.seen, tokens, t, most)
        if blocks is not None:
            old = blocks.x.detach()
            new, new_filled = self.compressor(old if c.detached else blocks.x, blocks.valid, blocks.usage)
            if self.training and self.compressor.learned and c.reconstruction:  # without gradient too: replay compares
                # Through time the task's loss trains the compression too; this loss must not go on into the inputs.
                alone = new if c.detached else self.compressor(old, blocks.valid, blocks.usage)[0]
                loss = self._reconstruction(x, valid, old, blocks.valid, alone, new_filled)
                add_auxiliary_loss(c.reconstruction * loss)
            moved = blocks.moved * (self.grid.block // c.ratio)
            slots, filled = push(slots, new, moved), push(filled, new_filled, moved)

        # --- what is kept: a copy, because a view would keep the keys' inputs of the whole call alive ---
        n = inputs.shape[1] - c.memory
        kept = kept[:, n:] & self.grid.uncompressed(tokens)
        after = CompressedSegments(slots, filled, inputs[:, n:].clone(), kept, usage[:, n:], tokens)
        heads = heads if order is None else take(heads, order.argsort(1))
        return heads, after.detach() if c.detached else after

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
