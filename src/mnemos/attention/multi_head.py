"""The bases of self-attentions: checks and padding once for all, and heads that a cache can mix."""

from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from mnemos.ops.padding import zero_invalid
from mnemos.types import Device, S, Splits, StateKind, check_heads, check_input, check_mask, check_stateful


class SelfAttention(nn.Module, Generic[S]):
    """Multi-head self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. A subclass defines `empty`, `check_state` and a `forward`
    that begins with `checked`. `splits` and `state_kind` are those of the causal layer; a layer that is not causal has
    no state, and refuses one.
    Raises InputError if D is not divisible by H.
    """

    rows_independent = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool,
        dropout: float = 0.0,
        splits: Splits = "anywhere",
        state_kind: StateKind = "growing",
    ) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.dim, self.num_heads, self.causal, self.dropout = dim, num_heads, causal, dropout
        self.splits: Splits = splits if causal else "never"
        self.state_kind: StateKind = state_kind if causal else "none"

    @property
    def state_gradient(self) -> bool:
        """Whether gradient flows through the incoming and outgoing state."""
        return True

    @property
    def active_dropout(self) -> float:
        """The fraction of weights that this call drops."""
        return self.dropout if self.training else 0.0

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> S:
        """The state of `batch_size` new rows of the causal layer."""
        raise NotImplementedError

    def check_state(self, state: S, batch_size: int) -> None:
        """Raise InputError for a state that is not one of `batch_size` rows of the causal layer."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> S | None:
        """The state of `batch_size` new rows, by default like the weights; None in `forward` means the same."""
        if not self.causal:
            return None
        like = next(self.parameters(), None)  # None after the weights were packed, as dynamic quantisation does
        if like is not None:
            device, dtype = like.device if device is None else device, dtype or like.dtype
        return self.empty(batch_size, device, dtype)

    def pad_to_capacity(self, state: S) -> S:
        """The same state, with bounded parts such as the keys of a window at their greatest length.

        Exported programs take and return such states (`mnemos.export`), so that only unbounded parts change size.
        """
        return state

    def checked(self, x: Tensor, state: S | None, mask: Tensor | None) -> Tensor:
        """x with zeros in the padding, after a check of all three."""
        check_input(x, self.dim)
        if mask is not None:
            check_mask(mask, x.shape[:2])
            x = zero_invalid(x, mask)
        if state is not None:
            check_stateful(self.state_kind, state)
            self.check_state(state, x.shape[0])
        return x


class MultiHeadAttention(SelfAttention[S]):
    """A self-attention with heads that a gated cache can mix: a subclass defines `compute_heads` of checked inputs.

    `output` projects the heads.
    """

    output: nn.Linear

    def compute_heads(self, x: Tensor, state: S | None, mask: Tensor | None) -> tuple[Tensor, S | None]:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        raise NotImplementedError

    def heads(
        self, x: Tensor, state: S | None = None, mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, S | None]:
        """The heads before projection, [B, T, H, D/H], and the new state; `more` is for `compute_heads`."""
        return self.compute_heads(self.checked(x, state, mask), state, mask, **more)

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]."""
        return self.output(heads.flatten(2))

    def forward(self, x: Tensor, state: S | None = None, mask: Tensor | None = None) -> tuple[Tensor, S | None]:
        heads, state = self.heads(x, state, mask)
        return self.project(heads), state

    if TYPE_CHECKING:
        __call__ = forward


def padded_state(part: object, state: S) -> S:
    """The state of an attention or model, with what has a bound as long as it becomes."""
    wide: S = part.pad_to_capacity(state) if state is not None and hasattr(part, "pad_to_capacity") else state
    return wide
