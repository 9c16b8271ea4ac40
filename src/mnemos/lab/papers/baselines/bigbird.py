"""BigBird (Zaheer et al. 2020): block-sparse attention of encoders, the operator and the layer. See README.md."""

import functools
import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos._compat import assume_constant
from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.config import AttentionConfig
from mnemos.memory.key_values import KeyValues
from mnemos.ops.checks import check_dropout
from mnemos.ops.dense_layer import Linear
from mnemos.ops.padding import zero_invalid
from mnemos.ops.signature import Signature
from mnemos.registry import register
from mnemos.types import Device, InputError

_CHECK = Signature("block_sparse_attention", q="B T H D", k="B T H D", v="B T H M", mask="B T bool ?")
_LAYER = 1_000_003  # between the seeds of consecutive layers, so that models of small seeds share no pattern
RANDOM = 3  # random blocks that a block reads in each head
DENSE = 5 + RANDOM  # blocks that a block reads: the first and the last, its own with its neighbours, and random ones


@register
@dataclass(frozen=True)
class BlockSparseConfig(AttentionConfig):
    """BigBird: blocks of queries read the first and the last block, their neighbours and three random blocks.

    Attributes:
        block: the number of tokens per block.
        seed: of the random blocks. The layers of a model have different ones, see `of_layer`.
    """

    name: ClassVar[str] = "block-sparse"
    block: int = 64
    seed: int = 0

    @property
    def causal_modes(self) -> frozenset[bool]:
        """BigBird is an encoder: its last block is read everywhere."""
        return frozenset({False})

    def of_layer(self, number: int) -> "BlockSparseConfig":
        """With a seed that depends on the number of the layer."""
        return replace(self, seed=self.seed + _LAYER * number)

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "BlockSparseAttention":
        return BlockSparseAttention(dim, num_heads, causal, dropout, self)


class BlockSparseAttention(MultiHeadAttention[KeyValues]):
    """Multi-head block-sparse self-attention: `y, state = layer(x, state=None, mask=None)`; never causal, no state.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `block_sparse_attention` has the pattern. T has any
    divisibility: the sequence is padded inside. Sequences of at most `DENSE` blocks get softmax attention over all
    tokens. The parameters are those of `SoftmaxAttention`.

    The random blocks are a function of the seed and of the number of blocks: the same in training and in evaluation,
    for all rows, and different between heads. They depend on the length with its padding, and so does the place of the
    last block: beyond `DENSE` blocks, the outputs of valid tokens are those of another pattern if padding adds a block.

    Cost of a call: O(T·DENSE·block·D) time and O(T·DENSE·D) memory, linear in T; O(T²·D) up to `DENSE` blocks.
    Raises InputError if D is not divisible by H, causal is True, or block is below 1.
    """

    padding_free = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        settings: BlockSparseConfig | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout)
        self.settings = settings or BlockSparseConfig()
        if causal:
            raise InputError("block-sparse attention: expected causal=False, found True; use another attention")
        if self.settings.block < 1:
            raise InputError(
                f"block-sparse attention: expected a block of at least 1, found {self.settings.block}; change it"
            )
        self.qkv = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim)

    def random_blocks(self, length: int, device: Device = None) -> Tensor:
        """The random blocks for `length` tokens, [H, rows, RANDOM]: see `draw_random_blocks`."""
        return draw_random_blocks(self.num_heads, -(-length // self.settings.block), self.settings.seed, device)

    def compute_heads(self, x: Tensor, state: KeyValues | None, mask: Tensor | None) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        drawn = self.random_blocks(x.shape[1], x.device)
        return block_sparse_attention(q, k, v, drawn, self.settings.block, mask, self.active_dropout), None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    random_blocks: Tensor,
    block: int = 64,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y_i = Σ_{j∈P_i} softmax(q_i·k_j/√D)·v_j, where P_i holds the keys of the blocks that the block of query i reads.

    The sequence is cut into n = ⌈T/block⌉ blocks. The first and the last block read all keys, and all queries read
    them. Every other block also reads itself, the block on either side and its random blocks.

    q, k [B, T, H, D], v [B, T, H, M]. random_blocks [H or 1, n − 2, R] int64: the numbers of the blocks that each block
    but the first and the last reads in addition (`draw_random_blocks`), below n − 1; one that is read already counts
    again. mask [B, T] bool, True = valid: an invalid token is read by no other, and has the result 0. dropout: the
    fraction of the weights dropped. -> y [B, T, H, M].

    T ≥ 0, of any divisibility. At n ≤ `DENSE` y is softmax attention over all keys, and random_blocks is not read.
    Cost: O(T·(5 + R)·block·(D + M)·H) time, and as much memory without the factor `block`.
    Raises InputError for shapes or dropout that do not fit.
    """
    _CHECK(q=q, k=k, v=v, mask=mask)
    check_dropout(dropout)
    b, t, h, _ = q.shape
    if not b or not t:
        return v
    q, k, v = (zero_invalid(x, mask).transpose(1, 2) for x in (q, k, v))  # [B, H, T, ..]
    tokens = None if mask is None else mask[:, None]
    n = -(-t // block)
    # --- a short sequence: every query reads every key ---
    if n <= DENSE:
        return zero_invalid(_attend(q, k, v, tokens, dropout).transpose(1, 2), mask)
    # --- the queries of the first and the last block read everything ---
    random_blocks = random_blocks.to(q.device).expand(h, -1, -1)
    edges = torch.cat([q[:, :, :block], q[:, :, (n - 1) * block :]], 2)
    edges = _attend(edges, k, v, tokens, dropout)
    outputs = [edges[:, :, :block]]
    # --- the others, in blocks: those beside the edges have one neighbour, so each is a run by itself ---
    missing = n * block - t
    # Contiguous once, or `_gather` would copy all blocks in each run.
    q, k, v = (F.pad(x, (0, 0, 0, missing)).contiguous().unflatten(2, (n, block)) for x in (q, k, v))
    if tokens is not None:
        tokens = F.pad(tokens, (0, missing)).expand(-1, h, -1).unflatten(2, (n, block))
    for start, stop in itertools.pairwise((1, 2, n - 2, n - 1)):
        near = torch.tensor([[0, *_neighbours(row, n)] for row in range(start, stop)], device=q.device)
        last = torch.full((h, stop - start, 1), n - 1, device=q.device)
        read = torch.cat([near.expand(h, -1, -1), random_blocks[:, start - 1 : stop - 1], last], 2)  # [H, rows, blocks]
        # The last block is the last of every list, and the tokens that fill it are cut off.
        visible = read.shape[2] * block - missing
        keys, values = (_gather(x, read)[..., :visible, :] for x in (k, v))
        seen = None if tokens is None else _gather(tokens[..., None], read)[..., :visible, 0].flatten(1, 2)
        y = _attend(q[:, :, start:stop].flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2), seen, dropout)
        outputs.append(y.unflatten(1, (h, stop - start)).flatten(2, 3))
    return zero_invalid(torch.cat([*outputs, edges[:, :, block:]], 2).transpose(1, 2), mask)


def _gather(x: Tensor, read: Tensor) -> Tensor:
    """Blocks [B, H, n, block, D] at [H, rows, blocks] -> [B, H, rows, blocks·block, D]. A copy of whole blocks."""
    b, h, n = x.shape[:3]
    first = n * torch.arange(b * h, device=x.device).view(b, h, 1, 1)
    picked = x.reshape(b * h * n, -1).index_select(0, (read + first).flatten())
    return picked.view(b, h, read.shape[1], -1, x.shape[4])


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    """Softmax attention: q [B, G, i, D], k [B, G, j, D]; visible [B, G or 1, j]. Where no key is, all are read."""
    if visible is not None:
        visible = (visible | ~visible.any(-1, keepdim=True))[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, visible, dropout)


def _neighbours(row: int, blocks: int) -> range:
    """A block and those beside it, without the first and the last block."""
    return range(max(1, row - 1), min(blocks - 1, row + 2))


def draw_random_blocks(num_heads: int, blocks: int, seed: int = 0, device: Device = None) -> Tensor:
    """The random blocks of each head and each block but the first and the last: [H, blocks − 2, RANDOM].

    They are distinct, and drawn uniformly from the blocks that are not read anyway. Equal arguments give equal blocks,
    in every process and version: the draw uses only `random.Random(seed).random()`, whose sequence Python keeps. Where
    every query reads every key (at most `DENSE` blocks) no block is drawn: [H, 0, RANDOM].
    Cost: O(H·blocks); the last draws are kept.
    """
    drawn = _draw_constant(num_heads, blocks, seed) if blocks > DENSE else ()
    return torch.tensor(drawn, dtype=torch.int64, device=device).view(num_heads, -1, RANDOM)


@assume_constant  # compilers cannot trace random.Random
def _draw_constant(heads: int, blocks: int, seed: int) -> tuple[int, ...]:
    return _draw(heads, blocks, seed)


@functools.lru_cache(maxsize=64)
def _draw(heads: int, blocks: int, seed: int) -> tuple[int, ...]:
    """Floyd's sampling without replacement, for each head and row in turn."""
    uniform = random.Random(seed).random
    drawn: list[int] = []
    for _ in range(heads):
        for row in range(1, blocks - 1):
            near = _neighbours(row, blocks)
            others = blocks - 2 - len(near)
            chosen: list[int] = []
            for last in range(others - RANDOM, others):
                number = int(uniform() * (last + 1))
                chosen.append(last if number in chosen else number)
            drawn += (1 + number + (len(near) if 1 + number >= near.start else 0) for number in chosen)
    return tuple(drawn)
