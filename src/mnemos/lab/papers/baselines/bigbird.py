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


@register
@dataclass(frozen=True)
class BlockSparseConfig(AttentionConfig):
    """BigBird: blocks of queries read the first and the last block, their neighbours and some random blocks.

    Attributes:
        block: the number of tokens per block.
        window: the number of blocks around its own that a block reads, itself included; odd.
        random_blocks: the number of random blocks that each block reads in each head.
        global_blocks: the number of blocks at each end that read all tokens and are read by all.
        seed: of the random blocks. The layers of a model have different ones, see `of_layer`.
    """

    name: ClassVar[str] = "block-sparse"
    block: int = 64
    window: int = 3
    random_blocks: int = 3
    global_blocks: int = 1
    seed: int = 0

    @property
    def causal_modes(self) -> frozenset[bool]:
        """BigBird is an encoder: its last blocks are global, so later tokens are read everywhere."""
        return frozenset({False})

    def of_layer(self, number: int) -> "BlockSparseConfig":
        """With a seed that depends on the number of the layer."""
        return replace(self, seed=self.seed + _LAYER * number)

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "BlockSparseAttention":
        return BlockSparseAttention(dim, num_heads, causal, dropout, self)


class BlockSparseAttention(MultiHeadAttention[KeyValues]):
    """Multi-head block-sparse self-attention: `y, state = layer(x, state=None, mask=None)`; never causal, no state.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `block_sparse_attention` has the pattern. T
    has any divisibility: the sequence is padded inside. Sequences of at most S = 2·global_blocks + window +
    random_blocks blocks get softmax attention over all tokens. The parameters are those of `SoftmaxAttention`.

    The random blocks are a function of the seed and of the number of blocks: the same in training and in evaluation,
    for all rows, and different between heads. They depend on the length with its padding, and so does the place of the
    last block: beyond S blocks, the outputs of valid tokens are those of another pattern if padding adds a block.

    Cost of a call: O(T·S·block·D) time and O(T·S·D) memory, linear in T; O(T²·D) up to S blocks.
    Raises InputError if D is not divisible by H, causal is True, or the pattern does not exist.
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
        self.settings = s = settings or BlockSparseConfig()
        _check_pattern(s.block, s.window, s.random_blocks, s.global_blocks)
        if causal:
            raise InputError("block-sparse attention: expected causal=False, found True; use another attention")
        self.qkv = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim)

    def random_blocks(self, length: int, device: Device = None) -> Tensor:
        """The random blocks for `length` tokens, [H, rows, random_blocks]: see `draw_random_blocks`."""
        s = self.settings
        blocks = -(-length // s.block)
        return draw_random_blocks(self.num_heads, blocks, s.random_blocks, s.window, s.global_blocks, s.seed, device)

    def compute_heads(self, x: Tensor, state: KeyValues | None, mask: Tensor | None) -> tuple[Tensor, None]:
        s = self.settings
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        drawn = self.random_blocks(x.shape[1], x.device)
        pattern = s.block, s.window, s.global_blocks
        return block_sparse_attention(q, k, v, drawn, *pattern, mask, self.active_dropout), None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    random_blocks: Tensor,
    block: int = 64,
    window: int = 3,
    global_blocks: int = 1,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """y_i = Σ_{j∈P_i} softmax(q_i·k_j/√D)·v_j, where P_i holds the keys of the blocks that the block of query i reads.

    The sequence is cut into n = ⌈T/block⌉ blocks. The first and the last `global_blocks` blocks read all keys, and all
    queries read them. Every other block also reads the `window` blocks around it and its random blocks.

    q, k [B, T, H, D], v [B, T, H, M]. random_blocks [H or 1, n − 2·global_blocks, R] int64: the numbers of the blocks
    that each block that is not global reads in addition (`draw_random_blocks`), below n − global_blocks; one that is
    read already counts again. mask [B, T] bool, True = valid: an invalid token is read by no other, and
    has the result 0. dropout: the fraction of the weights dropped. -> y [B, T, H, M].

    T ≥ 0, of any divisibility. At n ≤ 2·global_blocks + window + R y is softmax attention over all keys, and
    random_blocks may have any number of rows.
    Cost: O(T·(2·global_blocks + window + R)·block·(D + M)·H) time, and as much memory without the factor `block`.
    Raises InputError for shapes, patterns or dropout that do not fit.
    """
    _CHECK(q=q, k=k, v=v, mask=mask)
    check_dropout(dropout)
    extra = random_blocks.shape[-1]
    _check_pattern(block, window, extra, global_blocks)
    (b, t, h, _), ends = q.shape, global_blocks
    if not b or not t:
        return v
    q, k, v = (zero_invalid(x, mask).transpose(1, 2) for x in (q, k, v))  # [B, H, T, ..]
    tokens = None if mask is None else mask[:, None]
    n = -(-t // block)
    # --- a short sequence: every query reads every key ---
    if is_dense(n, window, extra, ends):
        return zero_invalid(_attend(q, k, v, tokens, dropout).transpose(1, 2), mask)
    # --- the global blocks' queries read everything ---
    random_blocks = random_blocks.to(q.device).expand(h, -1, -1)
    edges = torch.cat([q[:, :, : ends * block], q[:, :, (n - ends) * block :]], 2)
    edges = _attend(edges, k, v, tokens, dropout)
    outputs = [edges[:, :, : ends * block]]
    # --- the others, in blocks: those beside the global ones have shorter windows, so each is a run by itself ---
    missing = n * block - t
    # Contiguous once, or `_gather` would copy all blocks in each run.
    q, k, v = (F.pad(x, (0, 0, 0, missing)).contiguous().unflatten(2, (n, block)) for x in (q, k, v))
    if tokens is not None:
        tokens = F.pad(tokens, (0, missing)).expand(-1, h, -1).unflatten(2, (n, block))
    starts = [*range(ends, ends + window // 2 + 1), *range(n - ends - window // 2, n - ends + 1)]
    for start, stop in itertools.pairwise(starts):
        near = torch.tensor([[*range(ends), *_window(row, n, window, ends)] for row in range(start, stop)])
        last = torch.arange(n - ends, n, device=q.device).expand(h, stop - start, ends)
        drawn = random_blocks[:, start - ends : stop - ends]
        read = torch.cat([near.to(q.device).expand(h, -1, -1), drawn, last], 2)  # [H, rows, blocks]
        # The last block is the last of every list, and the tokens that fill it are cut off.
        visible = read.shape[2] * block - missing
        keys, values = (_gather(x, read)[..., :visible, :] for x in (k, v))
        seen = None if tokens is None else _gather(tokens[..., None], read)[..., :visible, 0].flatten(1, 2)
        y = _attend(q[:, :, start:stop].flatten(1, 2), keys.flatten(1, 2), values.flatten(1, 2), seen, dropout)
        outputs.append(y.unflatten(1, (h, stop - start)).flatten(2, 3))
    return zero_invalid(torch.cat([*outputs, edges[:, :, ends * block :]], 2).transpose(1, 2), mask)


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


def _check_pattern(block: int, window: int, random_blocks: int, global_blocks: int) -> None:
    if block < 1 or global_blocks < 1 or random_blocks < 0 or window < 1 or window % 2 == 0:
        raise InputError(
            f"block-sparse attention: expected block and global_blocks of at least 1, an odd window, and random_blocks "
            f"of at least 0, found block {block}, global_blocks {global_blocks}, window {window} and random_blocks "
            f"{random_blocks}; change them"
        )


def is_dense(blocks: int, window: int, random_blocks: int, global_blocks: int) -> bool:
    """Whether a sequence has no more blocks than a query of the pattern reads, so that every query reads every key."""
    return blocks <= 2 * global_blocks + window + random_blocks


def _window(row: int, blocks: int, window: int, global_blocks: int) -> range:
    """The blocks of the window of a block that is not global, without the global blocks."""
    half = window // 2
    return range(max(global_blocks, row - half), min(blocks - global_blocks, row + half + 1))


def draw_random_blocks(
    num_heads: int,
    blocks: int,
    random_blocks: int = 3,
    window: int = 3,
    global_blocks: int = 1,
    seed: int = 0,
    device: Device = None,
) -> Tensor:
    """The random blocks of each head and each block that is not global: [H, blocks − 2·global_blocks, random_blocks].

    They are distinct, and drawn uniformly from the blocks that are neither global nor in the window. Equal arguments
    give equal blocks, in every process and version: the draw uses only `random.Random(seed).random()`, whose sequence
    Python keeps. Where every query reads every key (`is_dense`) no block is drawn: [H, 0, random_blocks].
    Cost: O(H·blocks·random_blocks); the last draws are kept.
    """
    if is_dense(blocks, window, random_blocks, global_blocks):
        return torch.empty(num_heads, 0, random_blocks, dtype=torch.int64, device=device)
    drawn = _draw_constant(num_heads, blocks, random_blocks, window, global_blocks, seed)
    shape = num_heads, blocks - 2 * global_blocks, random_blocks
    return torch.tensor(drawn, dtype=torch.int64, device=device).view(shape)


@assume_constant  # compilers cannot trace random.Random
def _draw_constant(heads: int, blocks: int, count: int, window: int, ends: int, seed: int) -> tuple[int, ...]:
    return _draw(heads, blocks, count, window, ends, seed)


@functools.lru_cache(maxsize=64)
def _draw(heads: int, blocks: int, count: int, window: int, ends: int, seed: int) -> tuple[int, ...]:
    """Floyd's sampling without replacement, for each head and row in turn."""
    uniform = random.Random(seed).random
    drawn: list[int] = []
    for _ in range(heads):
        for row in range(ends, blocks - ends):
            near = _window(row, blocks, window, ends)
            others = blocks - 2 * ends - len(near)
            chosen: list[int] = []
            for last in range(others - count, others):
                number = int(uniform() * (last + 1))
                chosen.append(last if number in chosen else number)
            drawn += (ends + number + (len(near) if ends + number >= near.start else 0) for number in chosen)
    return tuple(drawn)
