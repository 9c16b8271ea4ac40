"""Relative attention (Transformer-XL, Dai et al. 2019): heads over a memory, and the layer of a segment memory."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import AttentionConfig
from mnemos.memory.gated_cache import own_weight
from mnemos.memory.key_values import Segments
from mnemos.ops.dense_layer import Linear
from mnemos.ops.padding import padding_first, take, valid_last
from mnemos.ops.relative_position import distance_scores, hide, relative_attention, seen_keys, sinusoids, weigh
from mnemos.registry import register
from mnemos.types import Device, InputError, S, Splits

from .multi_head import MultiHeadAttention


class RelativeHeads(MultiHeadAttention[S]):
    """The base of layers whose queries read a memory by relative attention; a subclass defines `compute`, by `read`.

    softmax([(q+u)·k + (q+v)·W_R R_(i−j)]/√(D/H))·v, where R are sinusoids of the distance in positions of the context
    that is read. W_R (`position`), u and v (`content_bias`, `position_bias`) belong to the layer; no other part has a
    bias, as in the paper's code.

    memory: the positions that are usually remembered, for which the table of R is made at once. clamp: the greatest
    distance; larger ones count as this one; 0: no limit. detached: no gradient flows into what is remembered. window:
    the number of positions that a query reads, with its own; None: all.
    Raises InputError if D is not divisible by H, or memory or clamp is below 0.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool,
        dropout: float,
        splits: Splits,
        memory: int,
        clamp: int,
        detached: bool,
        window: int | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout, splits=splits, state_kind="constant")
        if memory < 0 or clamp < 0:
            raise InputError(
                f"expected memory and clamp of at least 0, found memory {memory}, clamp {clamp}; use 0 for none"
            )
        self._memory, self._clamp, self._detached, self.window = memory, clamp, detached, window
        self.query, self.key_value = Linear(dim, dim, bias=False), Linear(dim, 2 * dim, bias=False)
        self.position, self.output = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(num_heads, dim // num_heads).normal_(std=0.02))
        self.position_bias = nn.Parameter(torch.empty(num_heads, dim // num_heads).normal_(std=0.02))
        self._table: Tensor | None = None

    @property
    def state_gradient(self) -> bool:
        """Whether gradient flows through the incoming and outgoing state. Without a memory, none is cut."""
        return not self._detached or not self._memory

    def compute(self, x: Tensor, state: S | None, mask: Tensor | None) -> tuple[Tensor, S | None]:
        """`compute_heads` of rows whose padding is in front."""
        raise NotImplementedError

    def compute_heads(self, x: Tensor, state: S | None, mask: Tensor | None) -> tuple[Tensor, S | None]:
        if mask is None:
            return self.compute(x, state, None)
        order = valid_last(mask)  # distances are counted in columns: padding goes in front of its row
        heads, state = self.compute(take(x, order), state, take(mask, order))
        return take(heads, order.argsort(1)), state

    def read(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """The heads before projection, [B, T, H, D/H], of queries x [B, T, D].

        context [B, N, D]: the inputs of keys and values, which end with x; mask [B, N] bool, True = valid. Takes the
        cheaper of two paths: O(N·D² + T·N·D), or O(T·D² + T·N·D·H) for few queries.
        """
        t, n = x.shape[1], context.shape[1]
        # Multiplications: N·2D² for all keys and values, or T·N·2D more per head.
        few = t > 0 and t * n * (self.num_heads - 1) < (n - t) * self.dim
        return (self.read_few if few else self.read_many)(x, context, mask)

    def read_many(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """Project keys, values and distances, and compare them with the queries."""
        t, n = x.shape[1], context.shape[1]
        q = self.query(x).unflatten(-1, (self.num_heads, -1))
        if n > t and self._detached and torch.is_grad_enabled():  # saves the products for a gradient that is not used
            memory = context[:, : n - t].detach()
            kv = torch.cat([self.key_value(memory), self.key_value(context[:, n - t :])], 1)
        else:
            kv = self.key_value(context)
        k, v = kv.unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        r = self.position(self.distances(n, 0 if self.causal else 1 - t, x)).unflatten(-1, (self.num_heads, -1))
        biases = self.content_bias, self.position_bias
        return relative_attention(q, k, v, r, *biases, self.causal, mask, self.window, self.active_dropout)

    def read_few(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """The same for few queries and a long memory: q·(W x) = (Wᵀq)·x, so the memory is not projected.

        Each query is projected to the D channels of the inputs, per head, and compared with inputs and sinusoids; the
        weighted sum of the inputs is projected to values.
        """
        b, t, _ = x.shape
        n, h, c = context.shape[1], self.num_heads, self.dim
        d = c // h
        key, value = own_weight(self.key_value).view(2, h, d, c)
        q = self.query(x).view(b * t, h, d).transpose(0, 1)
        content = torch.bmm((q + self.content_bias[:, None]) * d**-0.5, key).view(h, b, t, c)
        position = torch.bmm((q + self.position_bias[:, None]) * d**-0.5, own_weight(self.position).view(h, d, c))
        r = self.distances(n, 0, x).to(position.dtype)
        scores = distance_scores(position.view(1, h * b, t, c), r[None], n).view(h, b, t, n)
        scores = hide(scores, seen_keys(t, n, True, mask, self.window, x.device))
        content, scores = (y.transpose(0, 1).reshape(b, h * t, y.shape[3]) for y in (content, scores))
        read = weigh(content, context, context, scores, self.active_dropout)
        read = read.view(b, h, t, c).transpose(0, 1).reshape(h, b * t, c)
        return torch.bmm(read, value.mT).view(h, b, t, d).permute(1, 2, 0, 3)

    def distances(self, n: int, last: int, x: Tensor) -> Tensor:
        """R of the distances n − 1 … last, [n − last, D] like x, from a table that is kept between calls and grows."""
        clamp, device, dtype = self._clamp, x.device, self.position.weight.dtype
        if torch.compiler.is_compiling():
            return sinusoids(n - 1, last, self.dim, clamp, device).to(dtype)
        table = self._table
        first = -1 if table is None else len(table) // (1 if self.causal else 2) - self.causal
        if table is None or first < n - 1 or table.device != device or table.dtype != dtype:
            first = max(n - 1, self._memory)
            with torch.inference_mode(False):  # training must be able to use a table made during inference
                table = sinusoids(first, 0 if self.causal else -first, self.dim, clamp, device).to(dtype)
            self._table = table
        return table[first - (n - 1) : first + 1 - last]


@register
@dataclass(frozen=True)
class RelativeConfig(AttentionConfig):
    """softmax([(q+u)·k + (q+v)·W_R R_(i−j)]/√(D/H))·v over the segment and a memory of inputs before it.

    Attributes:
        memory: the number of tokens kept from before the segment, if causal; 0: none.
        same_length: if causal, a query attends to exactly `memory` tokens before it, wherever segments end.
        clamp: the greatest distance in tokens; larger distances count as this one. 0: no limit.
        detached: no gradient flows into an earlier call. If False it does, and memory replay can carry it.
    """

    name: ClassVar[str] = "relative"
    knows_distances: ClassVar[bool] = True
    at_evaluation: ClassVar[tuple[str, ...]] = ("memory", "same_length", "clamp")
    memory: int = 224
    same_length: bool = False
    clamp: int = 0
    detached: bool = True

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "RelativeAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return RelativeAttention(dim, num_heads, causal, dropout, self)


class RelativeAttention(RelativeHeads[Segments]):
    """Multi-head relative self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Positions enter as distances only, so the model around
    the layer needs no positions (`position="none"`). R: sinusoids. W_R (`position`), u and v (`content_bias`,
    `position_bias`) belong to the layer. No other part has a bias, as in the paper's code.

    Causal: the state is a `Segments`, the layer's inputs at the last `memory` tokens; keys and values are computed from
    them with the present weights. A query attends to all of them and to its own segment up to itself, so the cuts are
    part of the computation (splits = "segments"). With same_length it attends to the `memory` tokens before it, and the
    cuts have no effect (splits = "anywhere"). The state is detached on the way in and out, unless `detached` is False.
    Not causal: there is no state (None), and distances have both signs. The output of a padded query is finite and has
    no meaning.

    Cost of a call with N = memory + T: O(N·D² + T·N·D) time, or O(T·D² + T·N·D·H) for few tokens, which read the inputs
    directly (see `RelativeHeads`). The state has N·D numbers per row, half as many as keys and values.
    Raises InputError if D is not divisible by H, memory or clamp is below 0, or a state has another width.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        config: RelativeConfig | None = None,
    ) -> None:
        c = config or RelativeConfig()
        cuts: Splits = "anywhere" if c.same_length else "segments"
        window = c.memory + 1 if causal and c.same_length else None
        super().__init__(dim, num_heads, causal, dropout, cuts, c.memory, c.clamp, c.detached, window)
        self.config = c

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> Segments:
        return Segments.empty(batch_size, self.dim, device, dtype)

    def check_state(self, state: Segments, batch_size: int) -> None:
        shape = list(state.x.shape) if isinstance(state, Segments) else type(state).__name__
        if not isinstance(state, Segments) or (shape[0], shape[2]) != (batch_size, self.dim):
            raise InputError(
                f"expected a state of inputs [{batch_size}, N, {self.dim}], found {shape}; use initial_state"
            )

    def pad_to_capacity(self, state: Segments) -> Segments:
        return state.pad_to(self.config.memory)

    def compute(self, x: Tensor, state: Segments | None, mask: Tensor | None) -> tuple[Tensor, Segments | None]:
        if not self.causal:
            return self.read(x, x, mask), None
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        context, seen = Segments(x, valid), mask
        if state is not None:
            context = (state.detach() if self.config.detached else state).append(x, valid)
            if mask is not None:  # and then in front of what its row has read before
                front = padding_first(state.x.shape[1], mask)
                context = Segments(take(context.x, front), take(context.valid, front))
            seen = context.valid
        heads, remembered = self.read(x, context.x, seen), context.last(self.config.memory)
        owned = state is None or not state.x.shape[1]  # by the caller, who may change it
        remembered = remembered.kept(copied=owned)
        return heads, remembered.detach() if self.config.detached else remembered


class PositionBias(nn.Module):
    """bias(distance): integer distances key − query, [.., T, N] -> biases [.., H, T, N].

    For keys at or before the query (key − query ≤ 0), the first half of a direction's buckets hold one distance each,
    the others share the distances up to `max_distance` evenly in the logarithm, and the last also holds all larger
    ones. With `both` directions, keys after the query have as many buckets of their own; without, they share the bucket
    of distance 0, and the caller must mask them.
    `bias` [buckets, H] is added to scores that are scaled by 1/√d. It starts at −a·ln(1 + distance), with a = 4 for the
    first head, half as much for each next head, and 0 for the last: the first heads attend to near keys, the last to
    all. Cost: O(H·T·N).
    Raises InputError for fewer than 2 buckets per direction, or a max_distance that the single buckets already reach.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, both: bool = False) -> None:
        super().__init__()
        each = buckets // 2 if both else buckets
        if each < 2 or (both and buckets % 2) or max_distance <= each // 2:
            least = "at least 4 buckets, an even number," if both else "at least 2 buckets"
            raise InputError(
                f"relative positions: expected {least} and a max_distance above {max(1, each // 2)}, found {buckets} "
                f"buckets and max_distance {max_distance}; change one of them"
            )
        self.both = both
        self.bias = nn.Parameter(torch.empty((1 + both) * each, heads))
        # The nearest distance of each bucket, computed once in Python's precision.
        distances = range(max_distance + 1)
        nearest = torch.tensor(
            [bisect_left(distances, b, key=lambda d: bucket(d, each, max_distance)) for b in range(each)]
        )
        table = torch.searchsorted(nearest, torch.arange(max_distance + 1), right=True) - 1
        # Saved, though it follows from the settings: a model built on the meta device gets it with the weights.
        self.register_buffer("table", torch.cat([table, table + each]) if both else table)
        self.table: Tensor
        # Adam moves a bias by at most the learning rate per update: from noise, a head took hundreds of updates to
        # prefer near keys.
        slope = torch.tensor([-4.0 / 2**h for h in range(heads - 1)] + [0.0])
        with torch.no_grad():
            self.bias.copy_((nearest.log1p()[:, None] * slope).repeat(1 + both, 1))

    def forward(self, distance: Tensor) -> Tensor:
        most = len(self.table) // (1 + self.both) - 1
        row = (-distance).clamp(0, most)
        if self.both:  # keys after the query: the second half of the table
            row = distance.abs().clamp(max=most) + (distance > 0) * (most + 1)
        return self.bias[self.table[row]].movedim(-1, -3)


def bucket(distance: int, buckets: int, max_distance: int) -> int:
    """The bucket of a distance of 0 or more, from `buckets` for one direction."""
    exact = buckets // 2
    if distance < exact:
        return distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return min(buckets - 1, exact + int(share * (buckets - exact)))
