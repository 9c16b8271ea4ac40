"""Block-sparse attention (BigBird, Zaheer et al. 2020) as a layer of encoders."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.config import AttentionConfig
from mnemos.memory.key_values import KeyValues
from mnemos.ops.dense_layer import Linear
from mnemos.registry import register
from mnemos.types import Device, InputError

from .operator import block_sparse_attention, check_pattern, draw_random_blocks

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
        """The layer, [B, T, dim] -> [B, T, dim]."""
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
        check_pattern(s.block, s.window, s.random_blocks, s.global_blocks)
        if causal:
            raise InputError("block-sparse attention: expected causal=False, found True; use another attention")
        self.qkv = Linear(dim, 3 * dim)
        self.output = Linear(dim, dim)

    def random_blocks(self, length: int, device: Device = None) -> Tensor:
        """The random blocks for `length` tokens, [H, rows, random_blocks]: see `draw_random_blocks`."""
        s, n = self.settings, -(-length // self.settings.block)
        return draw_random_blocks(self.num_heads, n, s.random_blocks, s.window, s.global_blocks, s.seed, device)

    def compute_heads(self, x: Tensor, state: KeyValues | None, mask: Tensor | None) -> tuple[Tensor, None]:
        s = self.settings
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        drawn = self.random_blocks(x.shape[1], x.device)
        p = self.active_dropout
        return block_sparse_attention(q, k, v, drawn, s.block, s.window, s.global_blocks, mask, p), None
