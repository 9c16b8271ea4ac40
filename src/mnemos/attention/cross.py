"""Attention from one sequence to another (Memformer, eq. 1 to 3): from tokens to slots, from decoder to encoder."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mnemos.ops.dense_layer import Linear
from mnemos.types import check_heads, check_input

from .softmax import attend

KeysValues = tuple[Tensor, Tensor]  # each [B, N, H, D/H]


class CrossAttention(nn.Module):
    """softmax(x·W_Q·(s·W_K)ᵀ/√(D/H) + scores)·s·W_V per head: `y = layer(x, layer.keys_values(source))`.

    x [B, T, D], source s [B, N, D] -> y [B, T, D]. Keys and values are computed separately, so that many calls can
    read one source. `visible` [B or 1, 1 or H, 1 or T, N]: the positions attended to (bool), or a term added to the
    scores (float; −∞ hides a position).
    Cost: O(N·D²) for keys and values, O(T·D² + T·N·D) to attend. Raises InputError for shapes that do not fit.
    """

    attend = staticmethod(attend)  # programs have another form of it

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.dim, self.num_heads, self.dropout = dim, num_heads, dropout
        self.query, self.key_value, self.output = Linear(dim, dim), Linear(dim, 2 * dim), Linear(dim, dim)

    def keys_values(self, source: Tensor) -> KeysValues:
        """[B, N, D] -> keys and values, [B, N, H, D/H] each."""
        check_input(source, self.dim)
        # Slots are float32 even where the model's weights are in half precision.
        source = source.to(self.key_value.weight.dtype)
        k, v = self.key_value(source).unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        return k, v

    def forward(self, x: Tensor, source: KeysValues, visible: Tensor | None = None) -> Tensor:
        check_input(x, self.dim)
        q, (k, v) = self.query(x).unflatten(-1, (self.num_heads, -1)), source
        if k.dtype != q.dtype:  # the source was read under autocast, and this call is not, or the reverse
            k, v = k.to(q.dtype), v.to(q.dtype)
        heads = self.attend(q, k, v, visible, False, self.dropout if self.training else 0.0)
        return self.output(heads.flatten(2))

    if TYPE_CHECKING:
        __call__ = forward
