"""A decoder block that reads an encoded source: self-attention with a state, attention to the source, MLP."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mnemos.attention.cross import CrossAttention, KeysValues
from mnemos.memory.branched import Encoded
from mnemos.ops.dropout import Dropout
from mnemos.types import Attention, State

from .blocks import MLP, Norm, add


class DecoderBlock(nn.Module):
    """Self-attention, attention to a source, MLP: each with a residual and a norm before ("pre") or after ("post").

    x [R, T, D], state of the self-attention, mask [R, T], keys and values of the sources [G, S, H, D/H], and which of
    them are visible, [G, 1, 1, S] bool or None -> y [R, T, D], state. The rows of a source are next to each other.
    """

    attention: Attention

    def __init__(self, attention: Attention, mlp: MLP, dim: int, norm: Norm, dropout: float) -> None:
        super().__init__()
        self.attention, self.attention_norm = attention, nn.LayerNorm(dim)
        self.read, self.read_norm = CrossAttention(dim, attention.num_heads, dropout), nn.LayerNorm(dim)
        self.mlp, self.mlp_norm = mlp, nn.LayerNorm(dim)
        self.norm, self.dropout = norm, Dropout(dropout)

    def forward(
        self, x: Tensor, state: State, mask: Tensor | None, source: KeysValues, visible: Tensor | None
    ) -> tuple[Tensor, State]:
        """See the class."""
        if self.norm == "pre":
            y, state = self.attention(self.attention_norm(x), state, mask)
            x = add(x, self.dropout(y))
            x = add(x, self.dropout(self._read(self.read_norm(x), source, visible)))
            return add(x, self.dropout(self.mlp(self.mlp_norm(x)))), state
        y, state = self.attention(x, state, mask)
        x = self.attention_norm(add(x, self.dropout(y)))
        x = self.read_norm(add(x, self.dropout(self._read(x, source, visible))))
        return self.mlp_norm(add(x, self.dropout(self.mlp(x)))), state

    if TYPE_CHECKING:
        __call__ = forward

    def _read(self, x: Tensor, source: KeysValues, visible: Tensor | None) -> Tensor:
        """All tokens of a source's rows attend to it as the queries of one row: its keys and values are not copied."""
        return self.read(x.reshape(source[0].shape[0], -1, x.shape[-1]), source, visible).reshape(x.shape)


def encoded_source(blocks: Sequence[DecoderBlock], y: Tensor, valid: Tensor) -> Encoded:
    """The keys and values of encoder outputs y [B, S, D] for every block, projected once per source."""
    layers = tuple(block.read.keys_values(y) for block in blocks)
    if not torch.is_grad_enabled():  # as each head reads them: one token after the other
        layers = tuple((_by_head(k), _by_head(v)) for k, v in layers)
    return Encoded(layers, valid)


def _by_head(x: Tensor) -> Tensor:
    """[B, S, H, d], with heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
